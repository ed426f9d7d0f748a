"""A tape as the points that a logger writes: one for each outer step, and one for each held-out loss.

The same tape gives the same points, times included, so what a sink has already is known by its last step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from atoll.ids import SYNCER, LearnerId, OuterStep, seconds
from atoll.protocol.vocabulary import FixParticipants, Received, Report, StepDone, Stored
from atoll.tape.format import Header, Record
from atoll.tape.heldout import HeldoutPoint

ROUNDS, HELDOUT = "rounds", "heldout"
STREAMS = (ROUNDS, HELDOUT)
"""The steps of each rise, those of both together do not: a held-out loss comes long after its step."""
HELDOUT_LOSS, TRAIN_LOSS = "heldout/loss", "train/loss"


class LogPoint(msgspec.Struct, frozen=True):
    stream: str
    step: OuterStep
    unix_seconds: float
    values: dict[str, float]


class RunIdentity(msgspec.Struct, frozen=True):
    """How sinks know a run again."""

    key: str
    """The same for every logger of this run, and for no other run."""
    name: str
    config: dict[str, object]


def identity_of(header: Header, name: str) -> RunIdentity:
    """A live run has an id. Other runs are told apart by config, beginning and folder."""
    digest = hashlib.sha256(msgspec.json.encode((header.config, header.epoch, name))).hexdigest()
    return RunIdentity(header.run or digest[:12], name, header.config)


class LogFold:
    """Records of a syncer's tape, or of a whole run's, in order."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._losses: dict[LearnerId, float] = {}
        self._reported: dict[tuple[LearnerId, int], int] = {}
        self._tokens = 0
        self._last: OuterStep = 0
        self._present = 0
        self._times: dict[OuterStep, float] = {}

    def feed(self, record: Record) -> Iterator[LogPoint]:
        event = record.event
        if isinstance(event, StepDone) and not self._header.derivable:  # a rank of torch's: nobody reports it
            self._hears(record.worker, event.tokens, event.loss)
        if record.worker != SYNCER:
            return
        if isinstance(event, Received) and isinstance(event.envelope.body, Report):
            report, whose = event.envelope.body, (event.envelope.sender, event.envelope.incarnation)
            before = self._reported.get(whose, 0)
            self._reported[whose] = max(before, report.tokens)  # cumulative within an incarnation
            self._hears(event.envelope.sender, max(0, report.tokens - before), report.loss)
        fixed = [effect for effect in record.effects if isinstance(effect, FixParticipants)]
        if self._header.derivable:
            for effect in fixed:
                yield from self._reaches(record, effect.outer_step, len(effect.participants))
        elif fixed:
            self._present = len(fixed[-1].participants)
        elif isinstance(event, Stored):  # its steps are on the tape by now
            yield from self._reaches(record, event.outer_step, self._present)

    def _hears(self, learner: LearnerId, tokens: int, loss: float | None) -> None:
        self._tokens += tokens
        if loss is not None:
            self._losses[learner] = loss

    def _reaches(self, record: Record, step: OuterStep, participants: int) -> Iterator[LogPoint]:
        """A step that is gathered again was reached before. The loss is the mean of those heard since the step before."""
        if step <= self._last:
            return
        self._last, at = step, seconds(self._header.epoch + record.now)
        self._times[step] = at
        values = {"round/participants": float(participants), "tokens/trained": float(self._tokens)}
        if self._losses:
            values[TRAIN_LOSS] = sum(self._losses.values()) / len(self._losses)
            self._losses.clear()
        yield LogPoint(ROUNDS, step, at, values)

    def heldout(self, points: Sequence[HeldoutPoint]) -> list[LogPoint]:
        """At the times of their steps: a held-out loss has none of its own."""
        known = ((point.outer_step, point.loss) for point in points if point.outer_step in self._times)
        return [LogPoint(HELDOUT, step, self._times[step], {HELDOUT_LOSS: loss}) for step, loss in known if loss is not None]
