"""Train on a tape that was recorded without tensors, or with others: its history, new weights.

Who stepped when, who was merged with whom, who failed and came back stay as taped: the tape's events are fed to new machines
in the taped order. What a tensor brings about is put in their place: tokens and loss of a step, the digest of what was stored,
the bytes beside a message. What comes out is again an ordinary course of events, and is observed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.config import Config
from atoll.errors import ReplayDiverged, RunFailed
from atoll.ids import WorkerId, worker_name
from atoll.protocol.causality import lane_of
from atoll.protocol.interface import Executor, Observer
from atoll.protocol.vocabulary import Effect, Envelope, Event, Poisoned, Received, Send, Started, StepDone, Stored
from atoll.tape.format import Record
from atoll.tape.replay import Company, Outcome, TapeSource


def retrain(
    tape: TapeSource, config: Config, executor_for: Callable[[WorkerId, int], Executor], observers: Sequence[Observer]
) -> Outcome:
    """`config` may differ from the tape's in whatever no decision depends on: model, data, optimisers."""
    company = Company(config, executor_for, tape.path)
    now_true = _Truth()
    for key, record in tape.sourced():
        machine = company.machine(key, record)
        event, payload = now_true.of(key, record, company.executor[key])
        effects = tuple(machine.on(event, record.now))
        if [_course(e) for e in effects] != [_course(e) for e in record.effects]:
            raise ReplayDiverged(_tell(record, event, effects))
        for observe in observers:
            observe(record.now, record.worker, event, effects)
        for effect in effects:
            now_true.carry_out(key, record, company.executor[key], effect, payload)
    return company.outcome(tape)


class _Truth:
    """What happened here in the place of what the tape says happened."""

    def __init__(self) -> None:
        self._steps: dict[int, StepDone] = {}
        self._stored: dict[int, Stored] = {}
        self._post: dict[tuple[int, int, int, int], dict[int, tuple[Envelope, Any]]] = {}

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
        lane = self._post.get(_lane(e), {})
        envelope, payload = lane.get(e.seq, (e, None))
        for seq in [seq for seq in lane if seq <= e.seq]:  # lanes are FIFO: what was sent before is lost
            del lane[seq]
        flaw = event.flaw or (executor.inspect(envelope.body, payload) if payload is not None else "")
        size = payload.nbytes if payload is not None else event.payload_bytes
        return msgspec.structs.replace(event, envelope=envelope, payload_bytes=size, flaw=flaw), payload

    def carry_out(self, key: int, record: Record, executor: Executor, effect: Effect, payload: Any) -> None:
        if isinstance(effect, Send):
            e = effect.envelope
            self._post.setdefault(_lane(e), {})[e.seq] = (e, executor.payload_for(effect))
            return
        for event in executor.execute(effect, payload):
            match event:
                case StepDone():
                    self._steps[key] = event
                case Stored():
                    self._stored[event.outer_step] = event
                case Poisoned(where=where):
                    raise RunFailed(
                        f"record {record.number}: {worker_name(record.worker)}'s {where} holds NaN or Inf, and the tape goes on "
                        f"as if it did not: lower inner.learning_rate"
                    )
                case _:
                    raise AssertionError(f"nobody expects {event} of {effect}")


def _lane(e: Envelope) -> tuple[int, int, int, int]:
    return e.sender, e.incarnation, e.receiver, lane_of(e.body)


def _course(effect: Effect) -> tuple[Any, ...]:
    """What must be as taped: who does what with which fragment of which outer step; not how much it weighs."""
    if isinstance(effect, Send):
        e = effect.envelope
        return Send, type(e.body), e.receiver, e.seq
    names = ("outer_step", "fragment", "fragments", "learner", "participants", "slot", "local_step", "stream", "batch")
    return type(effect), *(getattr(effect, name, None) for name in names)


def _tell(record: Record, event: Event, effects: Sequence[Effect]) -> str:
    here = f" ({event.flaw})" if isinstance(event, Received) and event.flaw else ""
    pairs = zip(record.effects, effects, strict=False)
    taped = next((t for t, e in pairs if _course(t) != _course(e)), "another number of effects")
    return (
        f"record {record.number}: {worker_name(record.worker)} takes another course here than on the tape{here}; "
        f"the tape has {taped}"
    )
