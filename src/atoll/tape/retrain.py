"""Train new weights through the history of a tape that was recorded without tensors, or with others.

Steps, merges, failures and returns stay as taped: new machines get the tape's events in the taped order. Only what depends on
tensors is replaced by what happens here: tokens and loss of a step, the digest of a stored version, the payload of a
message. The result is an ordinary sequence of events, and observers see it as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.config import Config
from atoll.errors import ReplayDiverged, RunFailed, TapeError
from atoll.ids import WorkerId, worker_name
from atoll.protocol.interface import Executor, Observer
from atoll.protocol.vocabulary import (
    Effect,
    Envelope,
    Event,
    MergeRejected,
    Poisoned,
    Received,
    Refuse,
    Send,
    Started,
    StateWritten,
    StepDone,
    Stored,
)  # fmt: skip
from atoll.tape.format import Record
from atoll.tape.replay import Outcome, TapeSource, TapeWorkers


def retrain(
    tape: TapeSource, config: Config, executor_for: Callable[[WorkerId, int], Executor], observers: Sequence[Observer]
) -> Outcome:
    """`config` may differ from the tape's in keys that no decision depends on: model, data, optimisers."""
    workers = TapeWorkers(config, executor_for, tape)
    outcomes = _Outcomes()
    for key, record in tape.sourced():
        if tape.gap_before(key) is not None:
            raise TapeError(f"{tape.missing()[0]}: nothing can be trained on it")
        machine = workers.machine(key, record)
        event, payload = outcomes.of(key, record, workers.executor[key])
        effects = tuple(machine.on(event, record.now))
        if [_decision_key(e) for e in effects] != [_decision_key(e) for e in record.effects]:
            raise ReplayDiverged(_describe_divergence(record, event, effects))
        for observe in observers:
            observe(record.now, record.worker, event, effects)
        for effect in effects:
            outcomes.carry_out(key, record, workers.executor[key], effect, payload)
    return workers.outcome(tape)


class _Outcomes:
    """Outcomes that depend on tensors, as they happen here; they replace those on the tape."""

    def __init__(self) -> None:
        self._steps: dict[int, StepDone] = {}
        self._stored: dict[int, Stored] = {}
        self._in_transit: dict[tuple[int, int, int, int], dict[int, tuple[Envelope, Any]]] = {}

    def of(self, key: int, record: Record, executor: Executor) -> tuple[Event, Any]:
        event = record.event
        match event:
            case Started():
                self._steps.pop(key, None)
            case StepDone(nanos=nanos):
                return msgspec.structs.replace(self._steps.pop(key), nanos=nanos), None
            case Stored(outer_step=outer_step):
                return self._stored.pop(outer_step, event), None
            case Received():
                return self._received(event, executor)
            case _:
                pass
        return event, None

    def _received(self, event: Received, executor: Executor) -> tuple[Event, Any]:
        e = event.envelope
        lane = self._in_transit.get(_lane(e), {})
        envelope, payload = lane.get(e.seq, (e, None))
        for seq in [seq for seq in lane if seq <= e.seq]:  # lanes are FIFO: earlier messages are lost
            del lane[seq]
        flaw, measure = event.flaw, event.measure
        if flaw is None and payload is not None:
            flaw, measure = executor.inspect(envelope.body, payload)
        size = payload.nbytes if payload is not None else event.payload_bytes
        return msgspec.structs.replace(event, envelope=envelope, payload_bytes=size, flaw=flaw, measure=measure), payload

    def carry_out(self, key: int, record: Record, executor: Executor, effect: Effect, payload: Any) -> None:
        if isinstance(effect, Send):
            e = effect.envelope
            self._in_transit.setdefault(_lane(e), {})[e.seq] = (e, executor.payload_for(effect))
            return
        for event in executor.execute(effect, payload):
            match event:
                case StepDone():
                    self._steps[key] = event
                case Stored():
                    self._stored[event.outer_step] = event
                case StateWritten():
                    pass  # the tape says whether a snapshot was written there
                case Poisoned(where=where):
                    raise RunFailed(
                        f"record {record.number}: {worker_name(record.worker)}'s {where} holds NaN or Inf, and on the tape it "
                        f"does not: lower inner.learning_rate"
                    )
                case MergeRejected(outer_step=outer_step):
                    raise RunFailed(
                        f"record {record.number}: the merge of outer step {outer_step} is rejected, and on the tape it is not"
                    )
                case _:
                    raise AssertionError(f"{effect} led to the unexpected {event}")


def _lane(e: Envelope) -> tuple[int, int, int, int]:
    return e.sender, e.incarnation, e.receiver, e.body.lane


def _decision_key(effect: Effect) -> tuple[Any, ...]:
    """The part of an effect that must equal the tape: who does what with which fragment of which outer step, without weights."""
    if isinstance(effect, Send):
        e = effect.envelope
        return Send, type(e.body), e.receiver, e.seq
    names = ("outer_step", "fragment", "fragments", "learner", "participants", "slot", "local_step", "stream", "batch")
    return type(effect), *(getattr(effect, name, None) for name in names)


def _describe_divergence(record: Record, event: Event, effects: Sequence[Effect]) -> str:
    reasons = [str(effect.reason) for effect in effects if isinstance(effect, Refuse)]
    here = f" ({reasons[0]})" if isinstance(event, Received) and reasons else ""
    pairs = zip(record.effects, effects, strict=False)
    taped = next((t for t, e in pairs if _decision_key(t) != _decision_key(e)), "another number of effects")
    return (
        f"record {record.number}: {worker_name(record.worker)} decides otherwise here than on the tape{here}; "
        f"the tape has {taped}"
    )
