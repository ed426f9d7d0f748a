"""Why: every decision of a machine carries a code for programs and, where it helps, details for people.

Programs compare `why`. Nothing parses the sentence. "Why not" has one convention here and in the executors: `Reason | None`, and
None means that nothing is wrong.
"""

from __future__ import annotations

from enum import StrEnum, unique

import msgspec


@unique
class Why(StrEnum):
    # refused: the peer broke a rule, or came too late
    NOT_A_LEARNER = "not_a_learner"
    NO_HELLO = "no_hello"
    ALREADY_LEFT = "already_left"
    WRONG_RECEIVER = "wrong_receiver"
    OLD_INCARNATION = "old_incarnation"
    CHANNEL_NOT_OPENED = "channel_not_opened"
    OUT_OF_SEQUENCE = "out_of_sequence"
    DUPLICATE = "duplicate"
    IMPOSSIBLE = "impossible"
    UNEARNED = "unearned"
    VIOLATION = "violation"
    LATE = "late"
    VERSION_FORGOTTEN = "version_forgotten"
    NOT_REBASED = "not_rebased"
    # the bytes beside a message
    POISONED = "poisoned"
    MERGE_REJECTED = "merge_rejected"
    OUTLIER = "outlier"
    # a contribution dropped from its round, or a round given up
    GONE = "gone"
    DECLINED = "declined"
    MISSED_DEADLINE = "missed_deadline"
    BELOW_QUORUM = "below_quorum"
    SYNCER_RESTARTED = "syncer_restarted"
    NOT_STORED = "not_stored"
    ROLLED_BACK = "rolled_back"
    NOT_KEPT = "not_kept"
    # a round's participants fixed
    ALL_REPORTED = "all_reported"
    WINDOW_CLOSED = "window_closed"
    # a learner's standing
    JOINS = "joins"
    RECONNECTED = "reconnected"
    RESUMED = "resumed"
    ENTERED = "entered"
    CONNECTION_LOST = "connection_lost"
    SILENT = "silent"
    LEAVES = "leaves"
    LEAVES_FOR_A_WHILE = "leaves_for_a_while"
    EXPELLED = "expelled"
    # a pull declined, a wait
    NOT_TRAINING = "not_training"
    OUT_OF_STEP = "out_of_step"
    NOT_STAGED = "not_staged"
    LAST_STEP_DONE = "last_step_done"
    VERSION_AWAITED = "version_awaited"
    DUE = "due"
    # recovery, and Theta in place of a peer's state
    VERSION_MISSING = "version_missing"
    THETA_INCOMPLETE = "theta_incomplete"
    SOURCE_LOST = "source_lost"
    TRANSFER_LATE = "transfer_late"
    TRANSFER_SILENT = "transfer_silent"
    BAD_STATE = "bad_state"
    OTHER_OPTIMIZER = "other_optimizer"
    SOURCES_FAILED = "sources_failed"
    NOTHING_MERGED = "nothing_merged"
    NO_PEER = "no_peer"
    NO_PEER_LEFT = "no_peer_left"
    # a snapshot sealed
    PARTS_WRITTEN = "parts_written"
    NOT_WRITTEN = "not_written"
    NOBODY_TO_WAIT_FOR = "nobody_to_wait_for"
    LEARNER_LEFT_OUT = "learner_left_out"
    NEXT_SNAPSHOT_DUE = "next_snapshot_due"
    RUN_OVER = "run_over"


SENTENCES: dict[Why, str] = {
    Why.NOT_STAGED: "there is no copy of it from the last step boundary",
    Why.NOT_A_LEARNER: "is not a learner",
    Why.NO_HELLO: "did not say Hello on this connection",
    Why.ALREADY_LEFT: "it left; it may come back as a new incarnation",
    Why.LATE: "contribution late or unasked",
    Why.NOT_REBASED: "a difference against a version that is gone is never re-based",
    Why.POISONED: "poisoned update",
    Why.OUTLIER: "poisoned update",
    Why.MERGE_REJECTED: "the merged weights are not usable",
    Why.EXPELLED: "it broke the rules too often",
    Why.GONE: "is gone",
    Why.DECLINED: "declined",
    Why.MISSED_DEADLINE: "missed the pull deadline",
    Why.SYNCER_RESTARTED: "the syncer restarted",
    Why.NOT_STORED: "the syncer restarted before storing it",
    Why.ROLLED_BACK: "the run is rolled back",
    Why.JOINS: "joins",
    Why.RECONNECTED: "reconnected",
    Why.RESUMED: "the run is resumed from a snapshot",
    Why.LAST_STEP_DONE: "its last local step is done",
    Why.DUE: "due",
    Why.THETA_INCOMPLETE: "Theta was promised and did not come whole",
    Why.TRANSFER_LATE: "the transfer did not come in time",
    Why.TRANSFER_SILENT: "the transfer was not heard of again",
    Why.BAD_STATE: "its source sent a state that cannot be used",
    Why.OTHER_OPTIMIZER: "its source has another optimiser",
    Why.SOURCES_FAILED: "two sources failed",
    Why.NOTHING_MERGED: "nothing was merged yet",
    Why.NO_PEER: "no peer is in sync",
    Why.NO_PEER_LEFT: "no reachable peer is left to ask",
    Why.PARTS_WRITTEN: "every live learner has written its part",
    Why.NOT_WRITTEN: "its part is not written",
    Why.NOBODY_TO_WAIT_FOR: "no learner is in sync",
    Why.RUN_OVER: "the run is over",
}
"""What people read before the details. A code without a sentence has details that are a whole sentence themselves."""

OFFENCES = (Why.IMPOSSIBLE, Why.UNEARNED, Why.VIOLATION, Why.WRONG_RECEIVER, Why.POISONED, Why.OUTLIER)
"""What no correct learner causes but by a bug or bad luck: too many of them cost its place."""

ANSWERED = (Why.DECLINED, Why.POISONED, Why.OUTLIER, Why.MERGE_REJECTED)
"""Reasons for a drop after which nothing more comes from the learner to wake it: it has answered."""


class Reason(msgspec.Struct, frozen=True, array_like=True, gc=False):
    why: Why
    detail: str = ""

    def __str__(self) -> str:
        sentence = SENTENCES.get(self.why, "")
        return f"{sentence}: {self.detail}" if sentence and self.detail else sentence or self.detail or self.why.value

    def __bool__(self) -> bool:
        """A reason is asked for by `is None`: the truth of one would invite the old convention of empty strings."""
        raise TypeError("compare a reason with None, or its `why`")


def wrong_receiver(body: object, receiver: str) -> Reason:
    return Reason(Why.WRONG_RECEIVER, f"{type(body).__name__} is not for {receiver}")


DUE = Reason(Why.DUE)
