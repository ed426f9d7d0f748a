"""Is a learner's message possible at all? Asked before anything believes it: a refusal costs the peer its connection and
changes nothing else. What depends on the state of a round is judged where that state is."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import Config
from atoll.ids import LearnerId, OuterStep
from atoll.protocol.accounts import StepMost
from atoll.protocol.leases import INDEX_MAX, Leases
from atoll.protocol.membership import Member
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.versions import Versions
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Contribution,
    Decline,
    Envelope,
    Hello,
    Loaded,
    Message,
    RecoveryFailed,
    Report,
    SnapshotPart,
    Unit,
)  # fmt: skip

COUNT_MAX = 2**53
"""Counters beyond this are impossible: no run lasts as long."""
REASON_MAX = 1000
"""Characters of detail in a reason that a peer may give."""


def objection(config: Config, envelope: Envelope) -> Reason | None:
    """Why the syncer refuses this message."""
    counts = envelope.seq, envelope.after, envelope.incarnation, envelope.clock
    if min(counts) < 0 or max(counts) > COUNT_MAX:
        numbered = _counts((envelope.seq, envelope.after, envelope.incarnation))
        return _impossible("its clock cannot be" if numbered else "its sequence number cannot be")
    body = envelope.body
    return _report(config, body) if type(body) is Report else _body(config, body)


def _body(config: Config, body: Message) -> Reason | None:
    match body:
        case Hello():
            return _hello(config, body)
        case Contribution():
            counts = (body.local_step, body.c_steps, body.c_tokens, body.c_samples, body.tokens, body.anchor, body.outer_step)
            fits = 0 <= body.fragment < config.protocol.fragments and min(counts) >= 0 and max(counts) <= COUNT_MAX
            return None if fits else _impossible("contribution names what cannot be")
        case Loaded():
            fits = _counts((body.ticket, body.local_step)) and _versions(config, body.held) and body.source >= -1
            return None if fits else _impossible("Loaded names what cannot be")
        case RecoveryFailed(ticket=number, reason=reason) | Decline(outer_step=number, reason=reason):
            return None if _counts((number,)) and _short(reason) else _impossible(f"{type(body).__name__} cannot be")
        case SnapshotPart(snapshot=number, flaw=flaw):
            return None if _counts((number,)) and (flaw is None or _short(flaw)) else _impossible("SnapshotPart cannot be")
        case _:
            given: Reason | None = getattr(body, "reason", None)
            return None if given is None or _short(given) else _impossible("its reason is too long")


def _hello(config: Config, body: Hello) -> Reason | None:
    if not _versions(config, body.held):
        return _impossible("Hello names versions that never were")
    units_max = 4 + 2 * config.limits.members_max
    if len(body.left) > units_max or not all(_unit(config, unit) for unit in body.left):
        return _impossible("Hello names data that cannot be")
    counts = (body.local_step, body.tokens, body.own_next, body.grants)
    return None if _counts(counts) and _short(body.reason) else _impossible("Hello names what cannot be")


def _report(config: Config, body: Report) -> Reason | None:
    counts = (
        body.session, body.local_step, body.tokens, body.samples, body.step_nanos, body.waited_nanos, body.batch,
        body.snapshot,
    )  # fmt: skip
    if min(counts) < 0 or max(counts) > COUNT_MAX or not 0 <= body.stream < config.limits.members_max:
        return _impossible("report names what cannot be")
    # on arrival a learner counts its own steps as position, and a fast one runs ahead without bound
    if not NO_VERSION <= body.position <= COUNT_MAX:
        return _impossible("report names a position that cannot be")
    if len(body.adopted) > 4 * config.protocol.fragments:
        return _impossible("report names too many adoptions")
    for adoption in body.adopted:
        if not 0 <= adoption.local_step <= COUNT_MAX or not 0 <= adoption.kept <= adoption.tokens <= body.tokens:
            return _impossible("report names an adoption that cannot be")
    return None


def hello_claims(body: Hello, learner: LearnerId, outer_step: OuterStep, leases: Leases, most: StepMost) -> Reason | None:
    """What a Hello claims and cannot have: versions, tokens, data."""
    if any(v > outer_step for v in body.held):
        return Reason(Why.UNEARNED, "Hello names versions that never were")
    if body.tokens > body.local_step * most.tokens:
        return Reason(Why.UNEARNED, "Hello claims more tokens than its steps can hold")
    beyond = body.own_next > max(INDEX_MAX, leases.own_next(learner))
    strange = beyond or leases.never_given(learner, body.left)
    return Reason(Why.UNEARNED, "Hello names data that nobody was given") if strange else None


def report_claims(body: Report, member: Member, versions: Versions, leases: Leases, most: StepMost) -> Reason | None:
    if body.local_step > member.reported + 1:  # every step is reported while the connection stands, and a Hello says the rest
        return Reason(Why.UNEARNED, "report skips steps")
    if body.tokens > body.local_step * most.tokens or body.samples > body.local_step * most.samples:
        return Reason(Why.UNEARNED, "report claims more tokens or samples than its steps can hold")
    for adoption in body.adopted:
        if not versions.ever_was(adoption):
            return Reason(Why.UNEARNED, "report names an adoption that never could be")
    if body.local_step > member.reported and not leases.may_draw(member.learner, body.stream, body.batch):
        return Reason(Why.UNEARNED, "report names data that it was not granted")
    return None


def claims_too_much(body: Contribution, reported: int, tokens: int, samples: int, most: StepMost) -> bool:
    """A contribution weighs what its learner has reported before, and never more than its steps can hold."""
    return (
        not 0 <= body.c_tokens <= body.tokens <= tokens
        or not 0 <= body.c_steps <= body.local_step <= reported
        or not 0 <= body.c_samples <= samples
        or body.c_tokens > body.c_steps * most.tokens
        or body.c_samples > body.c_steps * most.samples
    )


def _impossible(words: str) -> Reason:
    return Reason(Why.IMPOSSIBLE, words)


def _short(reason: Reason) -> bool:
    return len(reason.detail) <= REASON_MAX


def _unit(config: Config, unit: Unit) -> bool:
    return 0 <= unit.stream < config.limits.members_max and 0 <= unit.index <= COUNT_MAX


def _versions(config: Config, held: Sequence[OuterStep]) -> bool:
    return len(held) == config.protocol.fragments and all(NO_VERSION <= v <= COUNT_MAX for v in held)


def _counts(values: Sequence[int]) -> bool:
    """Of every message: two passes in C take less than one in Python."""
    return not values or (min(values) >= 0 and max(values) <= COUNT_MAX)
