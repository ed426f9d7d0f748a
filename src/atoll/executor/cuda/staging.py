"""Staging and adopting on a GPU: the inner step never waits for a fragment's bytes.

    compute   ... optimiser step | forward, backward ....................... | optimiser step ...
    reads                        | read, read_done                           ^ waits for read_done
    encodes                              | anchor in, subtract, encode, codes out | ready
    arrivals  (any time) | codes in, decode, add, sum out | arrived          ^ adopting waits for arrived

Three streams, because they wait for different things. Reads touch live weights and are short; queued behind the anchor's
copy over PCIe, they would make the next optimiser step wait for that copy too. Announced versions arrive on a stream of
their own, so that they are on the device at their step boundary. A version announced as a difference is decoded and added
there too: on the host, decoding 47 million numbers held up the training thread for two steps.

Encoding takes a dozen small launches around one kernel of Triton (`codecs/device.py`), which would delay a training thread that
is bound by launches. From the third time on they are one launch of a captured CUDA graph of the same kernels.

The host waits only in `StagedPacket.wait`, which the sending thread calls. NaN and Inf are therefore found there, or later by
`poison`, and not in `stage`: the device writes a flag beside the codes. Packets equal those of the CPU byte for byte. A codec
that cannot do this on CUDA runs on the host, in the sending thread; `why_on_host` gives the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from atoll.codecs import BLOCK, Codec, Packet, UncheckedCodec, encode_with_feedback
from atoll.codecs import codec as codec_of
from atoll.codecs.layout import layout
from atoll.config.codecs import codec_spec
from atoll.errors import NotFinite
from atoll.executor.cuda.encoder import Encoder
from atoll.executor.ranks.stitch import EncodedPart, encode_part
from atoll.tensors.access import cast_like, read_buffers, read_params, write_buffers, write_params
from atoll.tensors.layout import Fragment
from atoll.tensors.outer import mix, rebased
from atoll.tensors.pieces import BlockSplit, Run, joined_runs, put_runs, take_runs

MASTER_KEYS: Final = ("master", "master_param", "master_weights", "fp32_param")
"""Where optimisers of 16-bit models keep a parameter's fp32 master copy in its state."""
FREE_MAX: Final = 8
"""Idle pinned buffers kept of one size. Further ones are freed: tau fragments and their sends need few."""
_ALIGN: Final = 64
_PAGE: Final = 4096


class EventLike(Protocol):
    """The part of a recorded CUDA event that is used."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


def why_on_host(codec: Codec, rng: torch.Generator | None) -> str | None:
    """The reason why this packet is encoded on the host; None if the device encodes it. The steps of a device codec are
    elementwise and correctly rounded, or a maximum, so the order of execution changes no bit."""
    if rng is not None:
        return "the device's random numbers differ from the host's, so stochastic rounding would give other bytes"
    if not codec_spec(codec.name).on_device or not isinstance(codec, UncheckedCodec):
        return f"{codec.name} sums, selects or shuffles elements, which the device does in another order"
    return None


def master_weights(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The fp32 copy that an optimiser trains in place of the parameter, if it keeps one. Its next step would undo a write to the
    parameter alone. A copy of another shape (flattened, sharded) is left alone."""
    state = optimizer.state.get(parameter, {})
    for key in MASTER_KEYS:
        master = state.get(key)
        if isinstance(master, Tensor) and master.shape == parameter.shape and master.dtype == torch.float32:
            return master
    return None


class PinnedPool:
    """Pinned memory by size. Pinning takes milliseconds and stalls the device, so in steady state nothing is allocated.

    It holds idle buffers only. A buffer that is never given back is not reused, and is freed like every tensor.
    """

    def __init__(self, allocate: Callable[[int], Tensor] | None = None) -> None:
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._free: dict[int, list[tuple[Tensor, EventLike]]] = {}
        self._lock = threading.RLock()  # the garbage collector gives a view's memory back, in any thread at any time
        self.allocations = 0

    def take(self, nbytes: int) -> Tensor:
        """At least `nbytes` bytes that no device copy is still writing."""
        size = _rounded(nbytes)
        with self._lock:
            idle = self._free.get(size, [])
            for at, (buffer, busy_until) in enumerate(idle):
                if busy_until.query():
                    del idle[at]
                    return buffer
            self.allocations += 1
        return self._allocate(size)

    def give(self, buffer: Tensor, busy_until: EventLike) -> None:
        with self._lock:
            idle = self._free.setdefault(buffer.numel(), [])
            if len(idle) < FREE_MAX:
                idle.append((buffer, busy_until))


def _rounded(nbytes: int) -> int:
    """Rounded up to an eighth of the size's power of two, so that fragments of similar size share buffers."""
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


StagedContent: TypeAlias = tuple[Packet | EncodedPart, Tensor, Tensor | None]
"""What is sent, the flat buffers, and with error feedback what the packet does not carry."""


class StagedPacket:
    """A fragment being copied to pinned memory. Any thread may wait for it; its value is fixed from `stage` on.

    The memory returns to the pool when the last holder has released it: the learner holds it from the start, each send while it
    reads. Without any release it is freed like every tensor.
    """

    def __init__(
        self, nbytes: int, ready: EventLike, finish: Callable[[], StagedContent],
        give_back: Callable[[], None], check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check` is the cheap part of `finish`: it raises NotFinite if the device found NaN or Inf."""
        self.nbytes = nbytes
        """Of packet and buffers, known before these are computed."""
        self._ready = ready
        self._check = check
        self._poison = ""
        self._finish: Callable[[], StagedContent] | None = finish
        self._give_back = give_back
        self._result: StagedContent | None = None
        self._holders = 1
        self._counting = threading.RLock()
        self._finishing = threading.Lock()  # its own lock: a host codec's work must not block the training thread in hold()
        self._weights: tuple[Tensor, torch.cuda.Event] | None = None

    def is_ready(self) -> bool:
        """Whether `wait` would return without waiting for the device (a host codec still encodes in it)."""
        return self._ready.query()

    def wait(self) -> tuple[Packet, Tensor]:
        """The packet and the flat buffers, in host memory that stays valid until the last release. Raises NotFinite."""
        packet, buffers, _ = self._waited()
        assert isinstance(packet, Packet), "staged with a split: ask for the part"
        return packet, buffers

    def part(self) -> tuple[EncodedPart, Tensor]:
        """The same of a rank's part of a packet, which was staged with a split."""
        part, buffers, _ = self._waited()
        assert isinstance(part, EncodedPart), "staged without a split: wait for the packet"
        return part, buffers

    def _waited(self) -> StagedContent:
        self._ready.synchronize()
        with self._finishing:
            if self._result is None:
                assert self._finish is not None, "the memory of a staged packet was released before its last reader came"
                try:
                    self._result = self._finish()
                except NotFinite as error:
                    self._poison = error.where
                    raise
            return self._result

    def poison(self) -> str:
        """The known place of a NaN or Inf, for a holder. Never waits: "" may mean that the device is not done yet."""
        if not self._poison and self._result is None and self._ready.query():
            try:
                self._check()
            except NotFinite as error:
                self._poison = error.where
        return self._poison

    @property
    def residual(self) -> Tensor | None:
        """With error feedback, what the packet does not carry. Valid only after `wait` returned; before, it may be NaN."""
        assert self._result is not None, "call wait() first: it checks that the residual is finite"
        return self._result[2]

    def residual_once_known(self) -> Tensor | None:
        """Waits for it. Raises NotFinite."""
        return self._waited()[2]

    @property
    def weights(self) -> Tensor:
        """The flat fp32 weights that `stage` read (with `keep_weights`), on the device, safe to use on the current stream."""
        assert self._weights is not None, "stage with keep_weights=True to keep them"
        flat, read_done = self._weights
        stream = torch.cuda.current_stream(flat.device)
        stream.wait_event(read_done)
        flat.record_stream(stream)
        return flat

    def keep(self, weights: Tensor, read_done: torch.cuda.Event) -> None:
        self._weights = (weights, read_done)

    def hold(self) -> StagedPacket:
        with self._counting:
            assert self._holders > 0, "a staged packet cannot be held after its last release"
            self._holders += 1
        return self

    def release(self) -> None:
        with self._counting:
            assert self._holders > 0, "a staged packet was released more often than held"
            self._holders -= 1
            if self._holders:
                return
        self._result = self._finish = None
        self._give_back()


@dataclass(frozen=True, slots=True)
class Incoming:
    """An announced version being copied to the device."""

    announced: Tensor
    """In pinned host memory: the next anchor. The host may read it once `arrived` has passed."""
    on_device: Tensor
    buffers: Tensor
    """On the device too."""
    arrived: torch.cuda.Event


class CudaStager:
    """One per learner. Only the training thread calls it, except for `prefetch` and `pin`; "compute" is its current stream."""

    def __init__(self, device: torch.device, numel_max: int) -> None:
        """`numel_max`: elements of the largest fragment. Graphs hold addresses, so scratch memory never grows or moves."""
        self.device = device
        self.pool = PinnedPool()
        # Reads have priority on the device: the next optimiser step depends on them.
        self._reads = torch.cuda.Stream(device, priority=-1)
        self._encodes = torch.cuda.Stream(device)
        self._arrivals = torch.cuda.Stream(device)
        self._unread: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._encodes):
            self._encoder = Encoder(device, numel_max)

    @torch.no_grad()
    def stage(
        self, fragment: Fragment, tensors: Mapping[str, Tensor], before: Tensor | None, codec: Codec, *,
        rng: torch.Generator | None = None, feedback: bool = False, residual: Tensor | None = None, keep_weights: bool = False,
        split: BlockSplit | None = None,
    ) -> StagedPacket:  # fmt: skip
        """Stages `cast(before) - tensors`, or the tensors themselves (gradients) if `before` is None, as of this point of the
        compute stream. Returns at once. `before` is an anchor in pinned memory, or weights on the device. `rng` is a generator
        of the host, which no other caller uses until `wait`. `split`: how a rank, one of several, divides what it sends; the
        fragment is then of its own pieces, and what is waited for its part of the packet."""
        # A forward pass changes buffers (batch statistics) and waits for no event, so these few bytes are read here.
        buffers = read_buffers(tensors, fragment)
        weights, read_done = self._read(fragment, tensors)
        self._encodes.wait_event(read_done)
        with torch.cuda.stream(self._encodes):
            for used in (weights, buffers):
                if used.is_cuda:
                    used.record_stream(self._encodes)
            vector = self._encoder.input(fragment.numel)
            weights = weights if weights.is_cuda else weights.to(self.device)  # a rank that holds none of it: an empty one
            if before is None:
                vector.copy_(weights)
            else:  # casting is idempotent: weights that were read are already cast
                torch.sub(cast_like(fragment, self._to_device(before)), weights, out=vector)
            if why_on_host(codec, rng) is not None:
                staged = self._for_host(fragment, codec, vector, buffers, rng, feedback, residual, split)
            else:
                if residual is not None:
                    vector.add_(self._to_device(residual))
                if split is None:
                    staged = self._on_device(fragment, codec, vector, buffers, feedback)
                else:
                    staged = self._part_on_device(fragment, codec, vector, buffers, feedback, split)
        if keep_weights:
            staged.keep(weights, read_done)
        return staged

    def before_optimizer_step(self) -> None:
        """Call before anything that changes parameters: the compute stream waits for the reads of staged fragments."""
        compute = torch.cuda.current_stream(self.device)
        for read_done in self._unread:
            compute.wait_event(read_done)
        self._unread.clear()

    def pin(self, tensor: Tensor) -> Tensor:
        """The same values in pinned memory (torch caches freed blocks, so this allocates in the first rounds only). It copies on
        the host: call it in the receiving thread, not in the training thread."""
        assert not tensor.is_cuda, "only host memory can be pinned"
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    @torch.no_grad()
    def prefetch(self, sent: Tensor | Packet, buffers: Tensor, base: Tensor | None = None) -> Incoming:
        """Starts the copy of an announced version to the device, long before its step boundary. Any thread may call it. A packet
        is a difference to `base`, which is an anchor in pinned memory."""
        if isinstance(sent, Packet) and why_on_host(codec_of(sent.codec), None) is not None:
            assert base is not None
            self.settle()  # the host reads the anchor
            sent = base + codec_of(sent.codec).decode(sent)
        buffers = self.pin(buffers) if buffers.numel() else buffers
        with torch.cuda.stream(self._arrivals):
            if isinstance(sent, Packet):
                assert base is not None
                on_device = self._to_device(base)
                self._add(sent, on_device)
                announced = torch.empty(sent.numel, pin_memory=True).copy_(on_device, non_blocking=True)
            else:
                announced = self.pin(sent)
                on_device = announced.to(self.device, non_blocking=True)
            there = buffers.to(self.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._arrivals)
        return Incoming(announced, on_device, there, arrived)

    def _add(self, packet: Packet, into: Tensor) -> None:
        """What a packet decodes to. For weight 1 accumulating gives the bytes of decoding and adding: each product is rounded."""
        codes, scales = (None if part is None else self._to_device(self.pin(part)) for part in (packet.codes, packet.scales))
        assert codes is not None
        codec_of(packet.codec).accumulate(Packet(packet.codec, packet.numel, codes, scales), into)

    def settle(self) -> None:
        """Waits until all announced versions are in the host's memory. For recoveries and snapshots, which read anchors there."""
        self._arrivals.synchronize()

    @torch.no_grad()
    def adopt(
        self, fragment: Fragment, tensors: Mapping[str, Tensor], incoming: Incoming, alpha: float,
        optimizer: torch.optim.Optimizer | None, taken: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Mixes an announced version into the live weights, which keep a share `alpha`, on the compute stream. If the optimiser
        has master weights, those are mixed and written, and the weights are their cast."""
        compute = torch.cuda.current_stream(self.device)
        self.before_optimizer_step()
        compute.wait_event(incoming.arrived)
        for prefetched in (incoming.on_device, incoming.buffers):
            prefetched.record_stream(compute)
        adopt_into(fragment, tensors, incoming.on_device, incoming.buffers, alpha, optimizer, taken)

    # ------------------------------------------------------------ parts of staging

    def _read(self, fragment: Fragment, tensors: Mapping[str, Tensor]) -> tuple[Tensor, torch.cuda.Event]:
        self._reads.wait_stream(torch.cuda.current_stream(self.device))
        read_done = torch.cuda.Event()
        with torch.cuda.stream(self._reads):
            flat = read_params(tensors, fragment)
            read_done.record(self._reads)
        for slot in fragment.params:  # the next step frees gradients: their memory must not be reused before the read
            tensors[slot.name].record_stream(self._reads)
        self._unread.append(read_done)
        return flat, read_done

    def _to_device(self, tensor: Tensor) -> Tensor:
        """On the current stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))
            return tensor
        pinned = tensor.is_pinned() or not tensor.numel()
        assert pinned, "a copy from pageable memory blocks the training thread: pin() anchors on arrival"
        return tensor.to(self.device, non_blocking=True)

    def _on_device(self, fragment: Fragment, codec: Codec, vector: Tensor, buffers: Tensor, feedback: bool) -> StagedPacket:
        assert isinstance(codec, UncheckedCodec)
        packet, finite = self._encoder.encode(codec, vector.numel(), feedback)
        residual = vector.clone() if feedback else None
        parts = [packet.codes, finite.view(1), *(() if packet.scales is None else (packet.scales,))]
        memory, views, ready = self._to_host([*parts, buffers])
        finite_flag, flat = views[1], views[-1]
        here = Packet(packet.codec, packet.numel, views[0], None if packet.scales is None else views[2])

        def check() -> None:
            refuse_not_finite(fragment, here, flat, finite_flag)

        def finish() -> StagedContent:
            check()
            return here, flat, residual

        return StagedPacket(here.nbytes + 4 * flat.numel(), ready, finish, lambda: self.pool.give(memory, ready), check)

    def _part_on_device(
        self, fragment: Fragment, codec: Codec, vector: Tensor, buffers: Tensor, feedback: bool, split: BlockSplit
    ) -> StagedPacket:  # fmt: skip
        """The blocks that a rank owns whole, as `encode_part` does on the host; its seams travel as numbers."""
        assert isinstance(codec, UncheckedCodec)
        blocks = joined_runs(split.blocks)
        seams, numel, all_numel = take_runs(vector, split.seams), split.block_numel, vector.numel()
        if numel and not (len(blocks) == 1 and blocks[0].local == 0):
            self._encoder.input(numel).copy_(take_runs(vector, blocks))
        finite = torch.isfinite(seams).all()
        codes, scales = torch.empty(0, dtype=layout(codec.name, 0).code_dtype, device=self.device), None
        if numel:
            packet, blocks_finite = self._encoder.encode(codec, numel, feedback)
            finite, codes, scales = finite & blocks_finite, packet.codes, packet.scales
        elif layout(codec.name, 0).scales is not None:
            scales = torch.empty(0, device=self.device)
        residual = None
        if feedback:
            residual = torch.zeros(all_numel, device=self.device)
            put_runs(residual, blocks, self._encoder.input(numel))
        parts = [codes, finite.view(1), seams, *(() if scales is None else (scales,))]
        memory, views, ready = self._to_host([*parts, buffers])
        part, flat = EncodedPart(views[0], None if scales is None else views[3], views[2]), views[-1]

        def check() -> None:
            refuse_part(fragment, flat, views[1])

        def finish() -> StagedContent:
            check()
            return part, flat, residual

        nbytes = sum(view.nbytes for view in views)
        return StagedPacket(nbytes, ready, finish, lambda: self.pool.give(memory, ready), check)

    def _for_host(
        self, fragment: Fragment, codec: Codec, difference: Tensor, buffers: Tensor, rng: torch.Generator | None,
        feedback: bool, residual: Tensor | None, split: BlockSplit | None,
    ) -> StagedPacket:  # fmt: skip
        """The device only subtracts and checks for NaN and Inf; `wait` encodes."""
        finite = torch.isfinite(difference).all()
        memory, (vector, finite_flag, flat), ready = self._to_host([difference, finite.view(1), buffers])

        def check() -> None:
            refuse_not_finite(fragment, Packet("fp32", vector.numel(), vector, None), flat, finite_flag)

        def finish() -> StagedContent:
            check()
            if split is not None:
                total = vector if residual is None else vector + residual.cpu()
                part, left = encode_part(codec, total, split, feedback=feedback)
                return part, flat, None if left is None else left.to(self.device)
            if feedback:
                before = None if residual is None else residual.cpu()
                packet, left = encode_with_feedback(codec, vector, before, rng=rng)
                return packet, flat, left
            return codec.encode(vector, rng=rng), flat, None

        nbytes = codec.nbytes(vector.numel()) + 4 * flat.numel()
        return StagedPacket(nbytes, ready, finish, lambda: self.pool.give(memory, ready), check)

    def add_to(self, residual: Tensor, runs: Sequence[Run], values: Tensor) -> None:
        """Writes what an assembled packet did not carry of this rank's seams, in the order of the next encoding."""
        with torch.cuda.stream(self._encodes):
            put_runs(residual, runs, values.to(self.device))

    def _to_host(self, parts: list[Tensor]) -> tuple[Tensor, list[Tensor], torch.cuda.Event]:
        """All parts in one pinned buffer, and the event after which they are complete."""
        sizes = [-(-part.numel() * part.element_size() // _ALIGN) * _ALIGN for part in parts]
        memory, at = self.pool.take(sum(sizes)), 0
        views: list[Tensor] = []
        for part, size in zip(parts, sizes, strict=True):
            view = memory[at : at + part.numel() * part.element_size()].view(part.dtype)
            views.append(view.copy_(part, non_blocking=True) if part.numel() else view)
            at += size
        ready = torch.cuda.Event(blocking=True)  # the sending thread sleeps in wait() instead of spinning
        ready.record(self._encodes)
        return memory, views, ready


def masters_of(
    fragment: Fragment, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """The master weights of the fragment's parameters, of those that have any."""
    if optimizer is None:
        return {}
    found = {slot.name: master_weights(optimizer, tensors[slot.name]) for slot in fragment.params}
    return {name: master for name, master in found.items() if master is not None}


def read_live(fragment: Fragment, tensors: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> Tensor:
    """The parameters as they are trained: where there are masters, the weights are only their casts."""
    return read_params({slot.name: masters.get(slot.name, tensors[slot.name]) for slot in fragment.params}, fragment)


def adopt_into(
    fragment: Fragment, tensors: Mapping[str, Tensor], announced: Tensor, buffers: Tensor, alpha: float,
    optimizer: torch.optim.Optimizer | None, taken: Tensor | None = None,
) -> None:  # fmt: skip
    """The arithmetic of an adoption, on any device. `taken`: the weights that went into the version; what they have moved by
    since is added to it."""
    masters = masters_of(fragment, tensors, optimizer)
    weights = announced
    if alpha > 0 and fragment.numel:  # one of several ranks may hold nothing of it
        weights = mix(read_live(fragment, tensors, masters), announced, alpha)
    if taken is not None and fragment.numel:
        weights = rebased(read_live(fragment, tensors, masters), taken, announced)
    write_params(tensors, fragment, weights)
    if masters:
        write_params(masters, replace(fragment, params=tuple(s for s in fragment.params if s.name in masters)), weights)
    if buffers.numel():
        write_buffers(tensors, fragment, buffers)


def refuse_part(fragment: Fragment, buffers: Tensor, finite: Tensor) -> None:
    """A rank's part holds blocks of many places, so a flaw in it has no place but the fragment."""
    if not bool(finite) or not bool(torch.isfinite(buffers).all()):
        raise NotFinite(f"fragment {fragment.id}")


def refuse_not_finite(fragment: Fragment, packet: Packet, buffers: Tensor, finite: Tensor) -> None:
    """`finite` is the flag of the encoded vector. The error names the tensor if the packet still shows it."""
    if buffers.numel() and not bool(torch.isfinite(buffers).all()):
        at = int(torch.nonzero(~torch.isfinite(buffers))[0])
        raise NotFinite("tensor " + next(s.name for s in fragment.buffers if s.offset <= at < s.offset + s.numel))
    if bool(finite):
        return
    shown, width = (packet.codes, 1) if packet.scales is None else (packet.scales, BLOCK)
    bad = torch.nonzero(~torch.isfinite(shown))
    if not bad.numel():  # bf16's clamp hid an Inf
        raise NotFinite(f"fragment {fragment.id}")
    start = int(bad[0]) * width
    names = [s.name for s in fragment.params if s.offset < start + width and start < s.offset + s.numel]
    raise NotFinite("tensor " + " or ".join(names))
