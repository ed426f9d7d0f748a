"""The syncer's hands: Theta, outer state and announced versions, fragment by fragment, on CPU in fp32.

Everything is a value: a merge makes new tensors from those of the version it names as `previous`, so carrying the same
merge out twice gives the same bytes, and a merge that was never taped as stored leaves no trace.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.codecs import Packet, codec
from atoll.config import Config
from atoll.executor.hands import SUSPECT, Blob, Hands
from atoll.executor.inner import build_optimizer, optimizer_step
from atoll.executor.learner import TensorLearner
from atoll.executor.shelf import Shelf as MemoryShelf
from atoll.executor.workbench import Workbench
from atoll.ids import SYNCER, FragmentId, Incarnation, LearnerId, OuterStep, WorkerId
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Accept,
    Announce,
    Books,
    Contribution,
    Discard,
    Effect,
    Envelope,
    Event,
    ForgetVersion,
    Merge,
    Message,
    RecordInFlight,
    RecordSyncer,
    SealSnapshot,
    Send,
    Store,
    Stored,
)  # fmt: skip
from atoll.rules import learning_rate
from atoll.tensors.access import cast_like, named_tensors, read_buffers, read_params
from atoll.tensors.layout import Fragment
from atoll.tensors.merge import mean, merge, merge_buffers, outlier_norm
from atoll.tensors.outer import OuterRule, OuterState, initial_state, outer_step

PLAIN = OuterRule(optimizer="sgd", learning_rate=1.0)


@dataclass(frozen=True, slots=True)
class Version:
    """A fragment as of one outer step. `announced` is what learners hold; it differs from Theta by the down codec's residual."""

    theta: Tensor
    buffers: Tensor
    outer: OuterState | None
    inner: dict[str, Any] | None
    announced: Tensor
    packet: Packet | None
    """The announced difference to the version before; None where announcements are in full."""


class Storage(Protocol):
    """Where the versions of fragments lie: `Disk` in memory, `durable.DurableDisk` on disk."""

    def at(self, p: FragmentId, v: OuterStep) -> Version: ...
    def announced(self, p: FragmentId, v: OuterStep) -> Tensor: ...
    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None: ...
    def newest(self) -> list[Version]: ...
    def put(self, t: OuterStep, versions: Mapping[FragmentId, Version]) -> None:
        """Durable when it returns."""
        ...

    def forget(self, p: FragmentId, v: OuterStep) -> None: ...


class Shelf(Protocol):
    """Where the syncer's side of snapshots goes: `shelf.Shelf` in memory, `snapshots.SyncerShelf` on disk."""

    def begin(self, snapshot: OuterStep, books: Books) -> None: ...
    def put_in_flight(self, snapshot: OuterStep, envelope: Envelope, blob: Blob | None) -> None: ...
    def seal(self, snapshot: OuterStep, learners: tuple[LearnerId, ...], complete: bool) -> None: ...


class Disk:
    """What survives a killed syncer. This one is memory, for virtual runs and replays; `durable.py` holds the real one."""

    def __init__(self, initial: Sequence[Version]) -> None:
        self.versions: list[dict[OuterStep, Version]] = [{0: version} for version in initial]

    def at(self, p: FragmentId, v: OuterStep) -> Version:
        return self.versions[p][v]

    def announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        return self.versions[p][v].announced

    def packet(self, p: FragmentId, v: OuterStep) -> Packet | None:
        return self.versions[p][v].packet

    def put(self, t: OuterStep, versions: Mapping[FragmentId, Version]) -> None:
        for p, version in versions.items():
            self.versions[p][t] = version

    def forget(self, p: FragmentId, v: OuterStep) -> None:
        self.versions[p].pop(v, None)

    def kept(self) -> list[list[OuterStep]]:
        return [sorted(versions) for versions in self.versions]

    def newest(self) -> list[Version]:
        return [versions[max(versions)] for versions in self.versions]

    def copy(self) -> Disk:
        """As it is now: versions are values, so this costs no tensor."""
        copy = Disk(())
        copy.versions = [dict(versions) for versions in self.versions]
        return copy

    def theta(self) -> tuple[list[Tensor], list[Tensor]]:
        newest = self.newest()
        return [v.theta for v in newest], [v.buffers for v in newest]

    def theta_sha256(self) -> str:
        return digest([v.theta.cpu() for v in self.newest()] + [v.buffers.cpu() for v in self.newest()])


def initial_versions(bench: Workbench, device: torch.device | None = None) -> list[Version]:
    """Version 0 of every fragment: the model as it is built. `device`: for runs whose tensors all stay there."""
    tensors = named_tensors(bench.build())
    rule = outer_rule(bench.config)
    versions = []
    for fragment in bench.layout.fragments:
        theta = read_params(tensors, fragment).to(device)
        outer = initial_state(rule, fragment.numel, device=device) if rule else None
        versions.append(Version(theta, read_buffers(tensors, fragment).to(device), outer, None, theta, None))
    return versions


def digest(tensors: Sequence[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_cuda:  # a copy to the host each round would cost more than the round
            sha.update(_folded(tensor).to_bytes(8, "little", signed=True))
        else:
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def _folded(tensor: Tensor) -> int:
    """All bits of a tensor in one number, worked out where it lies: each element times its own odd factor, modulo 2^64."""
    bits = tensor.contiguous().view(torch.int32).to(torch.int64)
    factors = torch.arange(bits.numel(), device=tensor.device) * 2654435761 * 2 + 1
    return int((bits.reshape(-1) * factors).sum())


def outer_rule(config: Config) -> OuterRule | None:
    o = config.outer
    if o.outer_optimizer == "inner":
        return None
    return OuterRule(optimizer=o.outer_optimizer, learning_rate=o.outer_learning_rate, momentum=o.outer_momentum, delay=o.delay)


class Norms:
    """What is usual for each fragment: the median of its last contributions' norms, each by the way its steps could have led.
    Far beyond it is poison, or a learner about to diverge; refusing one costs little, merging one may cost the run."""

    WINDOW = 32
    ENOUGH = 8
    """Below so many norms nothing is usual yet."""

    def __init__(self, fragments: int, factor: float) -> None:
        self._factor = factor
        self._seen: list[deque[float]] = [deque(maxlen=self.WINDOW) for _ in range(fragments)]

    def objection(self, fragment: FragmentId, norm: float, way: float) -> str:
        seen = self._seen[fragment]
        usual = way * median(seen) if len(seen) >= self.ENOUGH else 0.0
        if usual > 0 and norm > self._factor * usual:
            return f"{SUSPECT} {norm:.3g} of fragment {fragment} is {norm / usual:.0f} times the usual {usual:.3g}"
        seen.append(norm / way)
        return ""


class TensorSyncer:
    def __init__(self, config: Config, fragments: Sequence[Fragment], disk: Storage, shelf: Shelf | None = None) -> None:
        self._config = config
        self._fragments = fragments
        self.disk = disk
        self._shelf = shelf
        self._rule = outer_rule(config)
        self._up = codec(self._config.protocol.codec_up)
        self._down = codec(self._config.protocol.codec_down)
        self._accepted: dict[tuple[OuterStep, FragmentId], dict[LearnerId, tuple[Packet, Tensor, Tensor]]] = {}
        """(packet, buffers, the announced vector it is a difference to): encoded until the merge, eight times smaller."""
        self.norms = Norms(len(self._fragments), self._config.limits.outlier_factor)
        self._merged: dict[tuple[OuterStep, FragmentId], Version] = {}

    def execute(self, effect: Effect, blob: Blob | None) -> Sequence[Event]:
        match effect:
            case Accept():
                self._accept(effect, blob)
            case AbortRound(outer_step=t):
                for books in (self._accepted, self._merged):
                    for key in [k for k in books if k[0] == t]:
                        del books[key]
            case RecordInFlight(snapshot=snapshot, envelope=envelope):
                if self._shelf is not None:
                    self._shelf.put_in_flight(snapshot, envelope, blob)
            case Discard(outer_step=t, learner=m):
                for (step, _), contributions in self._accepted.items():
                    if step == t:
                        contributions.pop(m, None)
            case Merge():
                self._merged[effect.outer_step, effect.fragment] = self._merge(effect)
            case Store(outer_step=t, fragments=fragments):
                return (self._store(t, fragments),)
            case ForgetVersion(fragment=p, version=v):
                self.disk.forget(p, v)
            case RecordSyncer(snapshot=snapshot, books=books):
                if self._shelf is not None:
                    self._shelf.begin(snapshot, books)
            case SealSnapshot(snapshot=snapshot, learners=learners, complete=complete):
                if self._shelf is not None:
                    self._shelf.seal(snapshot, learners, complete)
            case _:
                pass
        return ()

    def inspect(self, body: Message, blob: Blob) -> str:
        """Before the machine sees a contribution: can it be used at all? Nothing poisoned gets as far as a merge."""
        if not isinstance(body, Contribution):
            return ""
        if blob.content is None:
            return "it came without bytes"
        packet, buffers = blob.content
        if packet.codec != self._up.name or packet.numel != self._fragments[body.fragment].numel:
            return f"{packet.numel} numbers by {packet.codec} are not fragment {body.fragment} by {self._up.name}"
        if buffers.numel() != self._fragments[body.fragment].buffer_numel:
            return f"{buffers.numel()} buffer elements are not those of fragment {body.fragment}"
        norm = outlier_norm(self._up.decode(packet))
        if not math.isfinite(norm) or not bool(torch.isfinite(buffers).all()):
            return f"fragment {body.fragment} holds NaN or Inf"
        return self.norms.objection(body.fragment, norm, self._way(body))

    def _way(self, body: Contribution) -> float:
        """How far its steps could have led: so many at the present rate. In the warm-up both grow, and a fragment that is first
        due after two steps honestly moves hundreds of times as far by its next turn. A gradient does not depend on either."""
        if self._config.protocol.contribution == "gradient":
            return 1.0
        least = 1e-3 * self._config.inner.learning_rate  # a schedule may end at zero
        return max(1, body.c_steps) * max(least, learning_rate(self._config, max(0, body.outer_step - 1)))

    def _accept(self, effect: Accept, blob: Blob | None) -> None:
        assert blob is not None
        packet, buffers = blob.content
        announced = self.disk.announced(effect.fragment, effect.anchor)
        accepted = self._accepted.setdefault((effect.outer_step, effect.fragment), {})
        accepted[effect.learner] = (packet, buffers, announced)

    # ------------------------------------------------------------ merging

    def _merge(self, effect: Merge) -> Version:
        p = effect.fragment
        fragment, previous = self._fragments[p], self.disk.at(p, effect.previous)
        contributions = self._accepted[effect.outer_step, p]
        weights = [share.weight for share in effect.shares]
        parts = [contributions[share.learner] for share in effect.shares]
        deltas = self._outer_gradients(fragment, previous, parts)
        buffers = merge_buffers([part[1] for part in parts], weights, fragment)
        if self._rule is None:
            theta, inner = self._inner_step(fragment, previous, mean(deltas, weights), effect.outer_step)
            return self._announced(previous, theta, buffers, None, inner)
        if effect.plain_average:
            theta, _ = outer_step(previous.theta, mean(deltas, weights), OuterState(None, None, 0), PLAIN)
            return self._announced(previous, theta, buffers, previous.outer, None)
        c = self._config.protocol
        delta = merge(deltas, weights, fragment, method=c.merge, embedding_method=c.embedding_merge, norm=c.merge_norm)
        assert previous.outer is not None
        theta, outer = outer_step(previous.theta, delta, previous.outer, self._rule)
        return self._announced(previous, theta, buffers, outer, None)

    def _outer_gradients(
        self, fragment: Fragment, present: Version, parts: Sequence[tuple[Packet, Tensor, Tensor]]
    ) -> list[Tensor]:
        """Anchored at the present: Theta - theta_m, theta_m rebuilt from the version it was sent against. How far Theta is
        from a version is the same for all who were sent it, and is worked out once."""
        deltas = [self._up.decode(packet) for packet, _, _ in parts]  # new tensors, ours to add to
        if self._config.protocol.anchor != "present":
            return deltas
        moved: dict[int, Tensor | None] = {}
        for delta, (_, _, announced) in zip(deltas, parts, strict=True):
            if id(announced) not in moved:
                base = cast_like(fragment, announced)
                moved[id(announced)] = None if present.theta is base else present.theta - base
            drift = moved[id(announced)]
            if drift is not None:
                delta.add_(drift)
        return deltas

    def _inner_step(
        self, fragment: Fragment, previous: Version, gradient: Tensor, outer_step_: OuterStep
    ) -> tuple[Tensor, dict[str, Any]]:
        """Data-parallel: the inner optimiser on Theta, tensor by tensor as each rank would."""
        params = [nn.Parameter(_slot(previous.theta, s.offset, s.shape, s.numel).clone()) for s in fragment.params]
        optimizer = build_optimizer(self._config, {s.name: p for s, p in zip(fragment.params, params, strict=True)}, (fragment,))
        if previous.inner is not None:
            optimizer.load_state_dict(copy.deepcopy(previous.inner))
        for param, s in zip(params, fragment.params, strict=True):
            param.grad = _slot(gradient, s.offset, s.shape, s.numel).clone()
        optimizer_step(self._config, optimizer, outer_step_ - 1)
        return torch.cat([param.detach().reshape(-1) for param in params]), optimizer.state_dict()

    def _announced(
        self, previous: Version, theta: Tensor, buffers: Tensor, outer: OuterState | None, inner: dict[str, Any] | None
    ) -> Version:
        """Down with a lossy codec: the difference to what was announced before; its error stays with the syncer and is
        part of the next difference."""
        if self._down.lossless:
            return Version(theta, buffers, outer, inner, theta, None)
        packet = self._down.encode(theta - previous.announced)
        return Version(theta, buffers, outer, inner, previous.announced + self._down.decode(packet), packet)

    def _store(self, t: OuterStep, fragments: tuple[FragmentId, ...]) -> Stored:
        versions = {p: self._merged[t, p] for p in fragments}
        self.disk.put(t, versions)
        for p in fragments:
            del self._merged[t, p]
            self._accepted.pop((t, p), None)
        return Stored(t, digest([tensor for v in versions.values() for tensor in (v.theta, v.buffers)]))

    def blob_for(self, send: Send) -> Blob | None:
        body = send.envelope.body
        if not isinstance(body, Announce):
            return None
        version = self.disk.at(body.fragment, body.outer_step)
        bytes_of_buffers = 4 * version.buffers.numel()
        packet = None if body.previous == NO_VERSION else version.packet
        if packet is None:
            return Blob("fragment", 4 * version.announced.numel() + bytes_of_buffers, (version.announced, version.buffers))
        return Blob("fragment", packet.nbytes + bytes_of_buffers, (packet, version.buffers))


def _slot(flat: Tensor, offset: int, shape: tuple[int, ...], numel: int) -> Tensor:
    return flat[offset : offset + numel].view(shape)


class TensorHands:
    """Hands for every worker of one virtual run. The disk and the shelf outlive the workers. `device`: where all tensors lie, the
    syncer's too; by default the host."""

    def __init__(
        self, bench: Workbench, disk: Disk | None = None, shelf: MemoryShelf | None = None, device: torch.device | None = None
    ) -> None:
        self.bench, self._device = bench, device
        self.disk = disk or Disk(initial_versions(bench, device))
        self.shelf = shelf or MemoryShelf(self.disk)
        self.learners: dict[LearnerId, TensorLearner] = {}

    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Hands:
        if worker == SYNCER:
            return TensorSyncer(self.bench.config, self.bench.layout.fragments, self.disk, self.shelf)
        resident = self._device is not None
        self.learners[worker] = TensorLearner(self.bench, worker, self.shelf, device=self._device, resident=resident)
        return self.learners[worker]
