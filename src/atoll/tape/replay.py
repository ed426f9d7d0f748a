"""Feed a tape's events to new machines and require that they decide as on the tape.

Without an executor replay re-derives decisions only and needs no tensors. With one it executes the effects again in the taped
order, and so retrains the model bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from atoll.config import Config, from_builtins
from atoll.errors import ConfigError, ReplayDiverged, TapeError
from atoll.ids import SYNCER, OuterStep, WorkerId, seconds, worker_name
from atoll.protocol.checkpoint import thaw
from atoll.protocol.interface import Executor, Machine
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.ledger import Fates
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Effect, Event, Lane, Received, Send, Started, Stored
from atoll.tape.format import Gap, Header, Missing, Record
from atoll.tape.segments import Segment


class TapeSource(Protocol):
    """A tape, or the tapes of a live run woven into one."""

    path: Path
    header: Header
    cut: bool
    whole_records: int

    def gap_before(self, key: int) -> Gap | None: ...
    def begins_with(self, key: int = ...) -> tuple[bytes, Segment] | None: ...
    def missing(self) -> list[Missing]: ...
    def sourced(self) -> Iterator[tuple[int, Record]]: ...
    def headers(self) -> list[Header]: ...


class Outcome(msgspec.Struct, frozen=True):
    records: int
    cut: bool
    outer_step: int
    fates: Fates | None = None
    missing: tuple[Missing, ...] = ()
    """What the tapes lack: decisions of those learners are not checked from there on."""
    differing: int = 0
    """Thetas whose digest was another than on the tape, where that was allowed."""
    distance: float = 0.0
    """Of the final Theta from the recorded one, where differences were allowed."""


def machine_for(config: Config, worker: WorkerId, incarnation: int, state: bytes | None = None) -> Machine:
    """A new one, or one that goes on from a state."""
    machine = SyncerMachine(config) if worker == SYNCER else LearnerMachine(config, worker, incarnation)
    return machine if state is None else thaw(state, machine)


def replay(
    tape: TapeSource,
    executor_for: Callable[[WorkerId, int], Executor] | None = None,
    progress: Callable[[int, OuterStep], None] | None = None,
    observe: Callable[[Record, Machine | None], None] | None = None,
    *, exact: bool = True,
) -> Outcome:  # fmt: skip
    """Raises ReplayDiverged at the first difference, with the events that led to it. Beyond a gap a worker has no machine any
    more: its records are observed, and not checked. Unless `exact`, a Theta with another digest is counted and no difference."""
    if not tape.header.derivable:
        raise TapeError(f"tape {tape.path}: is of torch's data-parallel training, which no machine decides: it has no replay")
    try:
        config = from_builtins(tape.header.config)
    except ConfigError as error:
        raise TapeError(f"tape {tape.path}: the config in its header is refused: {error}") from None
    workers = TapeWorkers(config, executor_for, tape)
    in_transit = _InTransit()
    digests: dict[int, str] = {}
    differing = 0
    story: deque[Record] = deque(maxlen=12)
    for key, record in tape.sourced():
        if tape.gap_before(key) is not None:
            if executor_for is not None:
                raise TapeError(f"{tape.missing()[0]}: --weights needs every record; without it the decisions are replayed")
            if observe is not None:
                observe(record, None)
            continue
        machine = workers.machine(key, record)
        effects = tuple(machine.on(record.event, record.now))
        story.append(record)
        if effects != record.effects:
            raise ReplayDiverged(describe_divergence(story, record, effects))
        if executor_for is not None:
            differing += _differs(record, digests, exact=exact)
            digests.update(_carry_out(workers.executor[key], record, effects, in_transit))
        if observe is not None:
            observe(record, machine)
        if progress is not None:
            progress(record.number, workers.syncer.outer_step if workers.syncer is not None else 0)
    return msgspec.structs.replace(workers.outcome(tape), differing=differing)


class TapeWorkers:
    """The workers of a tape: a new machine for each start, and its executor."""

    def __init__(self, config: Config, executor_for: Callable[[WorkerId, int], Executor] | None, tape: TapeSource) -> None:
        self._config, self._executor_for, self._tape = config, executor_for, tape
        self._machines: dict[int, Machine] = {}
        self.executor: dict[int, Executor] = {}
        self.syncer: SyncerMachine | None = None

    def machine(self, key: int, record: Record) -> Machine:
        event, worker = record.event, record.worker
        if key not in self._machines:
            self._go_on(key, worker)
        if isinstance(event, Started):
            if worker != SYNCER or key not in self._machines:  # a restarted syncer is the same machine, re-derived
                self._add(key, machine_for(self._config, worker, event.incarnation))
            if self._executor_for is not None:
                self.executor[key] = self._executor_for(worker, event.incarnation)
        if key not in self._machines:
            raise TapeError(f"tape {self._tape.path}: record {record.number}: {worker_name(worker)} acts before it starts")
        return self._machines[key]

    def _go_on(self, key: int, worker: WorkerId) -> None:
        """A tape whose beginning is not kept, or not read, begins with a machine."""
        begins = self._tape.begins_with(key)
        if begins is None:
            return
        state, segment = begins
        if self._executor_for is not None:
            raise TapeError(
                f"tape {self._tape.path}: begins at outer step {segment.outer_step}, and --weights needs the whole run; "
                "without it the decisions since then are replayed"
            )
        self._add(key, machine_for(self._config, worker, segment.incarnation, state))

    def _add(self, key: int, machine: Machine) -> None:
        self._machines[key] = machine
        self.syncer = machine if isinstance(machine, SyncerMachine) else self.syncer

    def outcome(self, tape: TapeSource) -> Outcome:
        if self.syncer is None:
            return Outcome(tape.whole_records, tape.cut, 0, missing=tuple(tape.missing()))
        step, fates = self.syncer.outer_step, self.syncer.fates()
        return Outcome(tape.whole_records, tape.cut, step, fates, tuple(tape.missing()))


class _InTransit:
    """Payloads between their Send and their Received. Channels are FIFO: payloads sent before the one that arrived are lost."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int, int], dict[int, Any]] = {}

    def take(self, event: Event) -> Any:
        if not isinstance(event, Received):
            return None
        e = event.envelope
        if e.body.lane is not Lane.BULK:
            return None
        channel = self._channels.get((e.sender, e.incarnation, e.receiver), {})
        if e.seq not in channel and event.flaw is None:
            raise TapeError(
                f"the tape of {worker_name(e.sender)}, which sent a payload, is missing or ends too soon: --weights needs all of "
                "every learner's tape"
            )
        payload = channel.get(e.seq)
        for seq in [seq for seq in channel if seq <= e.seq]:
            del channel[seq]
        return payload

    def put(self, send: Send, payload: Any) -> None:
        if payload is not None:
            e = send.envelope
            self._channels.setdefault((e.sender, e.incarnation, e.receiver), {})[e.seq] = payload


def _carry_out(executor: Executor, record: Record, effects: Sequence[Effect], in_transit: _InTransit) -> dict[int, str]:
    payload = in_transit.take(record.event)
    stored: dict[int, str] = {}
    for effect in effects:
        if isinstance(effect, Send):
            in_transit.put(effect, executor.payload_for(effect))
            continue
        for event in executor.execute(effect, payload):
            if isinstance(event, Stored):
                stored[event.outer_step] = event.digest
    return stored


def _differs(record: Record, digests: dict[int, str], *, exact: bool) -> bool:
    event = record.event
    if not isinstance(event, Stored) or digests.get(event.outer_step) == event.digest:
        return False
    if exact or event.outer_step not in digests:  # not even stored: its merge was rejected here
        raise ReplayDiverged(
            f"record {record.number}: Theta of outer step {event.outer_step} has digest {digests.get(event.outer_step)} here, "
            f"{event.digest} on the tape; compare thread count, precision, torch and CPU with those in the tape's header"
        )
    return True


def describe_divergence(story: Sequence[Record], record: Record, effects: Sequence[Effect]) -> str:
    """The last events, and the first effect in which tape and machine differ."""
    lines = [
        f"record {record.number}: {worker_name(record.worker)} at {seconds(record.now):.6f} s decides otherwise than the tape",
        "the last events:",
    ]
    lines += [f"  {r.number:>8} {seconds(r.now):12.6f} {worker_name(r.worker):<10} {r.event}" for r in story]
    width = max(len(record.effects), len(effects))
    for i in range(width):
        taped = record.effects[i] if i < len(record.effects) else "(nothing)"
        derived = effects[i] if i < len(effects) else "(nothing)"
        if taped != derived:
            lines += [f"first difference, effect {i + 1}:", f"  tape:    {taped}", f"  machine: {derived}"]
            break
    return "\n".join(lines)
