"""Every rank but 0: it has no machine and no link. It carries out what rank 0 says, in the order in which rank 0 carried it out.

One thread takes and carries out everything; weights change only while the training thread is inside `step`, between the report
of its boundary and rank 0's word to go on. Bytes arrive in another thread, and are announced to rank 0 when they are all here:
rank 0's machine hears of a version once every rank has its pieces, so no rank waits for bytes at a boundary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.errors import AtollError, RunFailed
from atoll.executor.ranks.executor import OwnPart, RankExecutor, part_of_packet
from atoll.ids import OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import InnerStep, Poisoned, StepDone
from atoll.runtime.ranks.channel import REASON_SECONDS, ChannelClosed, read_in_thread, tensors_of
from atoll.runtime.ranks.group import TorchGroup, store_at
from atoll.runtime.ranks.messages import (
    Agreed,
    Arrival,
    ArrivalTaken,
    Assembled,
    Counted,
    Do,
    DropArrival,
    EncodeAgain,
    EncodePart,
    Ended,
    Go,
    GradientsReady,
    GroupFormed,
    LeaveWanted,
    Note,
    Part,
    PartOfState,
    PartWritten,
    PlaceGiven,
    Profile,
    RankLeaves,
    ReadState,
    ReadWeights,
    Reform,
    SeamResidual,
    StateArrival,
    StepFailed,
    StepReached,
    TakeStep,
    WritePart,
)
from atoll.runtime.ranks.rendezvous import RankLink
from atoll.runtime.syncer.places import Placement
from atoll.store.snapshots import write_rank_part
from atoll.store.tensor_files import pack_state, unpack_state

log = logging.getLogger("atoll.learner")

PATIENCE_SECONDS: Final = 15.0
"""Rank 0 finds out who is missing, so the others wait a little longer than rank 0."""


class RankMember:
    def __init__(self, rank: int, connected: RankLink, timeout_seconds: float) -> None:
        self.rank = rank
        self.placement: Placement
        self._connected = connected
        self._timeout = timeout_seconds + PATIENCE_SECONDS
        self._condition = threading.Condition()
        self._executor: RankExecutor | None = None
        self._ready = threading.Event()
        self._agreed: Agreed | None = None
        self._placed: PlaceGiven | None = None
        self._counted: Counted | None = None
        self._may_take = 0
        self._reform: Reform | None = None
        self._attempt = 0
        self.unblock: Callable[[], None] = lambda: None
        """Ends the collectives that wait for a rank that is gone."""
        self._go: Go | None = None
        self._number = 0
        self._poisoned = ""
        self._arrived: dict[int, tuple[Arrival | StateArrival, Tensor]] = {}
        self._over = self._closing = False
        self._error: RunFailed | None = None
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="rank-parts")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="rank-snapshot")
        """Apart: a pull is not answered later because a disk is slow."""
        self._threads = [
            read_in_thread(connected.control, self._take, self._closed, "rank-0"),
            read_in_thread(connected.bulk, self._take_bytes, self._bulk_closed, "rank-0-bulk"),
        ]

    # ------------------------------------------------------------ the training thread

    def agree(self, profile: Profile) -> Agreed:
        self._tell(profile)
        self._wait(lambda: self._agreed is not None, "answered how the model is divided")
        assert self._agreed is not None
        return self._agreed

    def await_place(self) -> Placement:
        self._wait(lambda: self._placed is not None, "")
        assert self._placed is not None
        self.placement = self._placed.placement
        return self.placement

    def begin(self, executor: RankExecutor) -> None:
        self._executor = executor
        self._ready.set()

    def step_done(self, done: StepDone | None) -> bool:
        """False: all ranks skipped the step."""
        self._number += 1
        self._counted = self._go = None
        poisoned, self._poisoned = self._poisoned, ""
        self._tell(StepReached(self._number, done, poisoned))
        self._wait(lambda: self._counted is not None or self._go is not None, "said that all ranks are at this step")
        return self._counted is None or self._counted.counted

    def next_step(self) -> InnerStep | None:
        """Rank 0 may wait for the syncer here, for as long as the preset makes it wait."""
        self._wait(lambda: self._go is not None, "")
        go, self._go = self._go, None
        assert go is not None
        self._over = go.step is None
        return go.step

    def ready(self, done: StepDone) -> bool:
        """This rank has its gradients. True: all ranks have, and take the step. False: one was lost before, and none takes it."""
        self._tell(GradientsReady(self._number + 1, done))
        self._wait(lambda: self._may_take == self._number + 1 or self.has_lost, "said that all ranks have their gradients")
        return self._may_take == self._number + 1

    @property
    def has_lost(self) -> bool:
        """Rank 0 said that torch's group counts on ranks that are gone."""
        return self._reform is not None

    def await_loss(self, error: BaseException) -> bool:
        """After a collective failed: rank 0 finds out whether a rank is gone, or the learner fails."""
        if not self.has_lost:
            self._tell(StepFailed(self._attempt, f"{type(error).__name__}: {error}"[:300]))
            self._wait(lambda: self.has_lost, "said why a step failed")
        return True

    def regroup(self, group: TorchGroup, form: Callable[[Reform, Any], str]) -> bool:
        """Forms the smaller group, in as many attempts as rank 0 makes. False: this rank is not needed in it."""
        while True:
            with self._condition:
                note, self._reform = self._reform, None
            assert note is not None, "only after a loss"
            if self.rank not in note.order:
                self._over = True
                return False
            if note.number != self._number + 1:
                own = self._number + 1
                raise RunFailed(f"rank {self.rank} of this learner is at its step {own}, and rank 0 at {note.number}")
            self._attempt = note.attempt
            try:
                with group.forming():
                    digest = form(note, store_at(note.host, note.port, self._timeout))
            except RuntimeError as error:
                self.await_loss(error)
                continue
            self._tell(GroupFormed(note.attempt, digest))
            return True

    def leave(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None:
        self._tell(LeaveWanted(reason, within_seconds, returns))

    @property
    def over(self) -> bool:
        return self._over

    def end(self, reason: str, *, failed: bool, seconds: float) -> None:
        """After its loop. Its staged copies may still be pulled, so it stays until rank 0 has ended."""
        try:
            self._connected.control.send(RankLeaves(reason, failed))
        except ChannelClosed:
            return
        if not failed:
            with self._condition:
                self._condition.wait_for(lambda: self._closing, seconds)

    def close(self) -> None:
        self._closing = True
        self._ready.set()
        self._connected.close()
        self._answers.shutdown(wait=False)
        self._writes.shutdown(wait=False)
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _tell(self, note: Note) -> None:
        try:
            self._connected.control.send(note)
        except ChannelClosed as closed:
            self._hear_why()
            raise self._error or RunFailed(f"rank 0 of this learner is gone: {closed}") from None

    def _hear_why(self) -> None:
        """Rank 0 says why it ends before it closes both channels, and what closes may be seen before what was said."""
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self._error is not None, REASON_SECONDS)

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + self._timeout if what else None
        with self._condition:
            while not there() and self._error is None and not self._closing:
                if not self._condition.wait(None if until is None else max(0.0, until - time.monotonic())):
                    raise RunFailed(f"rank 0 of this learner has not {what} for {self._timeout:.0f} s: is a call missing on it?")
            if not there():
                raise self._error or RunFailed("rank 0 of this learner has ended its loop, and this rank has not")

    # ------------------------------------------------------------ what rank 0 says, in order

    def _take(self, note: Any, data: Tensor) -> None:
        match note:
            case Ended(reason=reason, failed=failed):
                with self._condition:
                    if failed:
                        self._error = RunFailed(reason)
                    else:
                        self._go = Go(None)
                    self._closing = True
                    self._condition.notify_all()
                if failed:
                    self.unblock()
            case Reform():
                self._reforms(note)
            case Agreed() | PlaceGiven() | Counted() | Go() | TakeStep():
                self._hear(note)
            case Do(effect=effect, arrival=arrival):
                for event in self._executing().execute(effect, self._payload(arrival)):
                    if isinstance(event, Poisoned):
                        self._poisoned = event.where
            case EncodePart(request=request, fragment=p, slot=slot):
                executor = self._executing()
                executor.answers(p, slot)
                self._send_part(request, executor.encoded(executor.staged_key(p, slot), request))
            case EncodeAgain(request=request, again=again):
                self._send_part(again, self._executing().encoded_again(request, again))
            case Assembled(request=request):
                self._executing().assembled(request)
            case ReadWeights(request=request, fragment=p, start=start, stop=stop):
                owned = self._executing().owned_weights(p, start, stop)
                self._answer(Part(request, (owned.nbytes,)), [owned])
            case ReadState(request=request):
                self._later(self._answers, self._send_state, request, self._executing().part())
            case WritePart(request=request, snapshot=snapshot, folder=folder):
                part = self._executing().part(with_residuals=True)
                self._later(self._writes, self._write_part, request, Path(folder), snapshot, part)
            case SeamResidual(fragment=p, generation=generation):
                self._executing().seams_not_carried(p, data.view(torch.float32), generation)
            case DropArrival(arrival=arrival):
                self._arrived.pop(arrival, None)
            case _:
                raise AssertionError(f"rank 0 never says {note}")

    def _hear(self, note: Any) -> None:
        with self._condition:
            match note:
                case Agreed():
                    self._agreed = note
                case PlaceGiven():
                    self._placed = note
                case Counted():
                    self._counted = note
                case Go():
                    self._go = note
                case TakeStep(number=number):
                    self._may_take = number
            self._condition.notify_all()

    def _reforms(self, note: Reform) -> None:
        if self.rank in note.order:
            self._executing().shrink(note.order)
        self.unblock()  # first: who hears of the loss begins to form a group, which this would end
        with self._condition:
            self._reform = note
            self._closing = self._closing or self.rank not in note.order
            self._condition.notify_all()

    def _executing(self) -> RankExecutor:
        self._ready.wait()
        assert self._executor is not None, "closed before it began"
        return self._executor

    def _payload(self, arrival: int) -> Payload | None:
        if not arrival:
            return None
        note, data = self._arrived.pop(arrival)
        if isinstance(note, StateArrival):
            return Payload("state", data.numel(), unpack_state(data.numpy().data))
        numbers = data.view(torch.float32)
        params, buffers = numbers[: note.sizes[0]], numbers[note.sizes[0] :]
        sent = Packet("fp32", params.numel(), params, None) if note.difference else params
        return Payload("fragment", data.numel(), (sent, buffers))

    def _send_part(self, request: int, own: OwnPart | None) -> None:
        self._later(self._answers, self._send_encoded, request, own)

    def _send_encoded(self, request: int, own: OwnPart | None) -> None:
        found = None if own is None else part_of_packet(own)
        if found is None:
            self._send_bytes(Part(request, ()), [])
            return
        codes, scales, seams = found[0]
        tensors = [codes, torch.empty(0) if scales is None else scales, seams]
        self._send_bytes(Part(request, tuple(t.numel() * t.element_size() for t in tensors)), tensors)

    def _answer(self, note: Part, tensors: list[Tensor]) -> None:
        """In another thread: the next word of rank 0 must not wait behind these bytes."""
        self._later(self._answers, self._send_bytes, note, tensors)

    def _later(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: Any) -> None:
        """What raises there takes the learner down, as here: rank 0 waits for an answer."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._closed(error)

        pool.submit(run)

    def _send_state(self, request: int, part: dict[str, Any]) -> None:
        chunks = tensors_of(pack_state(part))
        self._send_bytes(PartOfState(request), chunks)

    def _write_part(self, request: int, folder: Path, snapshot: OuterStep, part: dict[str, Any]) -> None:
        try:
            path, entry = write_rank_part(folder, snapshot, self.rank, part)
            note = PartWritten(request, str(path), entry.bytes, entry.sha256)
        except (AtollError, OSError) as error:
            note = PartWritten(request, "", 0, "", str(error)[:300])
        self._send_bytes(note, [])

    def _send_bytes(self, note: Note, tensors: list[Tensor]) -> None:
        try:
            self._connected.bulk.send(note, tensors)
        except ChannelClosed as closed:
            self._bulk_closed(closed)

    def _take_bytes(self, note: Any, data: Tensor) -> None:
        if isinstance(note, Arrival):
            data = self._executing().pinned(data)
        self._arrived[note.arrival] = (note, data)
        self._connected.bulk.send(ArrivalTaken(note.arrival))

    def _bulk_closed(self, error: BaseException) -> None:
        if isinstance(error, ChannelClosed):
            self._hear_why()
        self._closed(error)

    def _closed(self, error: BaseException) -> None:
        """The connection ended, or something here raised: then rank 0 is told, and takes the learner down."""
        with self._condition:
            if self._closing or self._error is not None:
                return
            self._error = RunFailed(f"rank 0 of this learner is gone: {error}")
            if not isinstance(error, ChannelClosed):
                log.error("this rank cannot go on", exc_info=error)
                self._error = RunFailed(f"rank {self.rank} of this learner: {type(error).__name__}: {error}")
            self._condition.notify_all()
        self.unblock()
        if not isinstance(error, ChannelClosed):
            self.end(f"{type(error).__name__}: {error}", failed=True, seconds=0.0)


