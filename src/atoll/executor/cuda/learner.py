"""The GPU side of a learner: staged and sent packets, incoming versions, the training stream, and the loss.

`TensorLearner` has a `CudaSide` if its model is on CUDA. Its state belongs to the thread that holds the driver's lock: the
training thread at a step boundary, the loop's thread while a step runs or the learner waits. A `StagedSend` belongs to the
sending thread; nothing else here waits for a fragment's bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.codecs import Packet
from atoll.errors import ConfigError, NotFinite
from atoll.executor.cuda.staging import CudaStager, Incoming, StagedPacket
from atoll.executor.cuda.transfer import each_tensor
from atoll.executor.late import LateContent
from atoll.executor.ranks.stitch import EncodedPart
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.interface import Payload
from atoll.tensors.layout import Fragment
from atoll.tensors.pieces import Run

Key = tuple[FragmentId, OuterStep]


class StagedSend(LateContent):
    """A packet whose bytes the device may still be writing. Its memory is held while this object lives and
    while a lent view is in use."""

    def __init__(self, staged: StagedPacket) -> None:
        self._staged = staged
        self._hold_while_alive(self)

    def part(self) -> tuple[EncodedPart, Tensor] | None:
        """Of one of several ranks: its part of the packet."""
        try:
            return self._staged.part()
        except NotFinite:
            return None

    def resolve(self) -> tuple[Packet, Tensor] | None:
        try:
            return self._staged.wait()
        except NotFinite:
            return None

    def lend(self, view: memoryview) -> None:
        if view.nbytes:
            self._hold_while_alive(view.obj)

    def _hold_while_alive(self, reader: Any) -> None:
        weakref.finalize(reader, self._staged.hold().release).atexit = False


class CudaSide:
    def __init__(
        self, device: torch.device, fragments: Sequence[Fragment], optimizer: torch.optim.Optimizer, micro_batches: int
    ) -> None:
        self.device = device
        self.stager = CudaStager(device, max(f.numel for f in fragments))
        self._compute = torch.cuda.current_stream(device)
        self._staged: dict[Key, StagedPacket] = {}
        self._unchecked: list[StagedPacket] = []
        """Staged, and not yet checked for NaN and Inf."""
        self._sent: dict[FragmentId, StagedPacket] = {}
        """With error feedback: the packet sent last; its residual counts once it is merged."""
        self._incoming: dict[FragmentId, Incoming] = {}
        self._losses = torch.empty(micro_batches, dtype=torch.float64, pin_memory=True)
        self._forward_done = torch.cuda.Event(blocking=True)
        # A hook, so that a user's own training loop needs no call.
        self.unhook = optimizer.register_step_pre_hook(lambda *_: self._before_step()).remove

    # ------------------------------------------------------------ the training stream

    def training_stream(self) -> AbstractContextManager[Any]:
        """While a learner waits, the loop's thread serves it, and that thread's current stream and device may differ."""
        return torch.cuda.stream(self._compute)

    def use_current_stream(self) -> None:
        self._compute = torch.cuda.current_stream(self.device)

    def _before_step(self) -> None:
        self.use_current_stream()
        self.stager.before_optimizer_step()

    def record_loss(self, micro: int, loss: Tensor) -> None:
        """Called right after the forward pass: the loss is copied to the host while the rest of the step is launched."""
        self._losses[micro].copy_(loss.detach().double(), non_blocking=True)
        self._forward_done.record(torch.cuda.current_stream(self.device))

    def loss(self, parts: Sequence[float]) -> float:
        """Called once the step is launched. Waits for its last forward pass only, so the device still runs the backward pass and
        the optimiser step while the host is at the boundary. Launches are never more than a step ahead."""
        self._forward_done.synchronize()
        total = 0.0
        for loss, part in zip(self._losses.tolist(), parts, strict=True):  # one by one, as on the CPU
            total += loss / part
        return total

    # ------------------------------------------------------------ staged copies

    def put(self, key: Key, staged: StagedPacket) -> None:
        self.drop(key)
        self._staged[key] = staged
        self._unchecked.append(staged.hold())

    def drop(self, key: Key) -> None:
        staged = self._staged.pop(key, None)
        if staged is not None:
            staged.release()

    def poisons(self) -> list[str]:
        """The places of NaN or Inf in staged packets, each reported once. Packets that the device has not finished are checked
        at the next call."""
        found: list[str] = []
        unfinished: list[StagedPacket] = []
        for staged in self._unchecked:
            if not staged.is_ready():
                unfinished.append(staged)
                continue
            if staged.poison():
                found.append(staged.poison())
            staged.release()
        self._unchecked = unfinished
        return found

    def payload(self, keys: Sequence[Key], *, feedback: bool) -> Payload:
        """The payload of the first key that is staged."""
        key = next((key for key in keys if key in self._staged), keys[0])
        sent = self.send(key, feedback=feedback)
        return Payload("packet", 0 if sent is None else self._staged[key].nbytes, sent)

    def send(self, key: Key, *, feedback: bool) -> StagedSend | None:
        """What is staged, to be waited for in another thread. None if nothing is, or if NaN or Inf is known to be in it."""
        staged = self._staged.get(key)
        if staged is None or staged.poison():
            return None
        if feedback:
            self._forget_sent(key[0])
            self._sent[key[0]] = staged.hold()
        return StagedSend(staged)

    def has(self, key: Key) -> bool:
        return key in self._staged

    def seams_not_carried(self, p: FragmentId, runs: Sequence[Run], values: Tensor) -> None:
        """Of a rank's part, known once the packet is assembled."""
        residual = self.residual_sent(p)
        if residual is not None:
            self.stager.add_to(residual, runs, values)

    def residual_of(self, p: FragmentId, *, merged: bool) -> Tensor | None:
        """What the last packet sent did not carry. A merged packet was sent, so this waits only if a newer one is being sent."""
        try:
            return self.residual_sent(p) if merged else None
        finally:
            self._forget_sent(p)

    def residual_sent(self, p: FragmentId) -> Tensor | None:
        """The same, before it is known whether that packet was merged."""
        staged = self._sent.get(p)
        if staged is None:
            return None
        try:
            return staged.residual_once_known()
        except NotFinite:
            return None

    def forget_work(self) -> None:
        for key in list(self._staged):
            self.drop(key)
        for p in list(self._sent):
            self._forget_sent(p)
        for staged in self._unchecked:
            staged.release()
        self._unchecked.clear()

    def _forget_sent(self, p: FragmentId) -> None:
        before = self._sent.pop(p, None)
        if before is not None:
            before.release()

    # ------------------------------------------------------------ announced versions

    def arriving(self, payload: Payload) -> Payload:
        """The same with its tensors in pinned memory, which the device reads without the host. For the receiving thread: the copy
        takes time, and `prefetch` runs while the training thread may wait for the driver's lock."""
        if not isinstance(payload.content, tuple):
            return payload
        sent, buffers = payload.content
        if isinstance(sent, Packet):
            pinned: Packet | Tensor = replace(sent, codes=self.pinned(sent.codes), scales=self.pinned(sent.scales))
        else:
            pinned = self.pinned(sent)
        return Payload(payload.kind, payload.nbytes, (pinned, self.pinned(buffers)))

    def prefetch(
        self, p: FragmentId, sent: Tensor | Packet, buffers: Tensor, base: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Starts the copy to the device; returns the version in pinned memory, which is filled once `settle` returns."""
        self._incoming[p] = self.stager.prefetch(sent, buffers, base)
        return self._incoming[p].announced, buffers

    def adopt(
        self, fragment: Fragment, tensors: Mapping[str, Tensor], announced: Tensor, buffers: Tensor, alpha: float,
        optimizer: torch.optim.Optimizer, taken: Tensor | None = None,
    ) -> None:  # fmt: skip
        incoming = self._incoming.pop(fragment.id, None)
        if incoming is None or incoming.announced is not announced:  # the version came with a peer's state
            incoming = self.stager.prefetch(announced, buffers)
        self.stager.adopt(fragment, tensors, incoming, alpha, optimizer, taken)

    # ------------------------------------------------------------ state from a peer or a snapshot

    def pinned(self, value: Any) -> Any:
        """The same tensors in pinned memory, which staging reads without a wait."""
        return each_tensor(value, lambda tensor: self.stager.pin(tensor) if tensor.numel() else tensor)

    def on_device(self, value: Any) -> Any:
        return each_tensor(value, lambda tensor: tensor.to(self.device))


def cuda_device_of(tensors: Mapping[str, Tensor]) -> torch.device | None:
    """The GPU that a model is on, None if it is on none. A model on several devices is refused."""
    devices = {tensor.device for tensor in tensors.values()}
    if not any(device.type == "cuda" for device in devices):
        return None
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model is on {where}: put all parameters and buffers of a learner on one device")
    return devices.pop()
