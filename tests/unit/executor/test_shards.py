"""A syncer of several shards decides and stores what one without shards does, to the bit."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.codecs.parts import joined, packet_part
from atoll.config import Config, load
from atoll.errors import UserError
from atoll.executor.shard import ShardSyncer, StripeResult
from atoll.executor.sharded import Announcement, OwnParts, PartFound, ShardedSyncer, ShardedVersions
from atoll.executor.syncer import TensorSyncer
from atoll.ids import FragmentId, OuterStep
from atoll.kernels import fused
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    AbortRound,
    Accept,
    Contribution,
    CopyVersions,
    Discard,
    ForgetVersion,
    Merge,
    MergeRejected,
    Share,
    Store,
    Stored,
)
from atoll.store import versions as digests
from atoll.store.striped import joined_version, stripe_of_version
from atoll.store.versions import MemoryVersions, Version, checksum, checksum_of_parts, digest_part
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.norms import norm_of_parts, outlier_norm, part_squares
from atoll.tensors.outer import initial_state, outer_rule
from atoll.tensors.stripes import Meeting, refuse_unsharded, stripe_bounds, stripes_of

SIZES = (300, 70_001, 2048, 9_000, 1)
"""Slots that end in the middle of a block and of a leaf. The second is cut by every number of shards, the fourth by some."""
NUMEL = sum(SIZES)
BUFFERS = 7
FRAGMENTS = 2


def config(**protocol: Any) -> Config:
    sizes = {"fragments": FRAGMENTS, "local_steps_per_round": 4, "overlap": 2, "codec_down": "int8"}
    return load(preset_name="decoupled", overrides={"learners": 3, "protocol": sizes | protocol})


def layout() -> tuple[Fragment, ...]:
    slots, at = [], 0
    for index, size in enumerate(SIZES):
        slots.append(Slot(f"w{index}", "param", 0, size, (size,), at, size, torch.float32, embedding=index == 3))
        at += size
    running = Slot("running", "float_buffer", 0, BUFFERS, (BUFFERS,), 0, BUFFERS, torch.float32, embedding=False)
    return tuple(Fragment(p, tuple(slots), (running,), at, BUFFERS) for p in range(FRAGMENTS))


def numbers(seed: int, size: float, count: int | None = None) -> Tensor:
    return torch.randn(NUMEL if count is None else count, generator=torch.Generator().manual_seed(seed)) * size


def initial(settings: Config) -> list[Version]:
    rule = outer_rule(settings)
    assert rule is not None
    thetas = [numbers(p, 0.02) for p in range(FRAGMENTS)]
    buffers = numbers(9, 1.0, BUFFERS)
    return [Version(theta, buffers, initial_state(rule, NUMEL), None, theta, None) for theta in thetas]


@dataclass
class InProcess:
    """A shard without a process of its own."""

    syncer: ShardSyncer
    memory: MemoryVersions
    own: dict[tuple[bytes, int], tuple[Packet, Tensor]] = field(default_factory=dict)
    """Parts of contributions that came to it and not to the coordinator."""

    def accept(self, effect: Accept, packet: Packet, buffers: Tensor) -> None:
        self.syncer.execute(effect, Payload("packet", packet.nbytes, (packet, buffers)))

    def accept_own(self, effect: Accept, session: bytes, number: int) -> None:
        self.accept(effect, *self.own[session, number])

    def merge(self, effect: Merge, meeting: Meeting) -> StripeResult:
        return self.syncer.merge(effect, meeting)

    def copy(self, effect: CopyVersions) -> list[StripeResult]:
        self.syncer.execute(effect, None)
        return [self.syncer.result(effect.outer_step, p) for p in range(len(effect.versions))]

    def store(self, effect: Store) -> list[Announcement]:
        self.syncer.store(effect)
        return [self.read_announcement(p, effect.outer_step) for p in effect.fragments]

    def tell(self, effect: AbortRound | Discard | ForgetVersion) -> None:
        self.syncer.execute(effect, None)

    def read_announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        return self.memory.announced(p, v)

    def read_announcement(self, p: FragmentId, v: OuterStep) -> Announcement:
        return Announcement(self.memory.packet(p, v), self.memory.at(p, v).buffers)

    def read_version(self, p: FragmentId, v: OuterStep) -> Version:
        return self.memory.at(p, v)

    def read_theta(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]:
        return self.memory.at(p, v).theta, self.memory.at(p, v).buffers

    def link_into(self, directory: str) -> None:
        raise AssertionError("not asked for here")

    def keep_snapshots(self, names: Sequence[str]) -> None:
        raise AssertionError("not asked for here")


def sharded(settings: Config, count: int) -> ShardedSyncer:
    shards = []
    for shard in range(count):
        stripes = [stripes_of(fragment, count)[shard] for fragment in layout()]
        memory = MemoryVersions([stripe_of_version(v, s) for v, s in zip(initial(settings), stripes, strict=True)])
        shards.append(InProcess(ShardSyncer(settings, layout(), shard, count, memory), memory))
    return ShardedSyncer(settings, layout(), shards, ShardedVersions(shards, [[0]] * FRAGMENTS))


class Both:
    """The same rounds with shards and without."""

    def __init__(self, settings: Config, count: int) -> None:
        self.settings = settings
        self.whole = TensorSyncer(settings, layout(), MemoryVersions(initial(settings)))
        self.shards = sharded(settings, count)
        self.newest = [0] * FRAGMENTS

    def round(
        self, t: OuterStep, *, opposite: bool = False, learners: int = 3, plain: bool = False, limit: float = 0.0,
        own: bool = False,
    ) -> Any:
        """`own`: contributions come to the shards in parts, and not to the coordinator."""
        p = t % FRAGMENTS
        for m in range(learners):
            delta = numbers(97 * t, 1e-3) * (-1) ** m if opposite else numbers(97 * t + m, 1e-3)
            packet = codec(self.settings.protocol.codec_up).encode(delta)
            buffers = numbers(m, 1.0, BUFFERS)
            for syncer in (self.whole, self.shards):
                content = Payload("packet", packet.nbytes, (packet, buffers))
                if own and syncer is self.shards:
                    content = Payload("packet", packet.nbytes, self.cut(p, m, packet, buffers))
                syncer.execute(Accept(t, p, m, 0 if m == 1 else self.newest[p]), content)
        shares = tuple(Share(m, 1.0 if opposite else 1.0 + m, 0, 4) for m in range(learners))
        seen: list[Any] = []
        for syncer in (self.whole, self.shards):
            syncer.execute(Merge(t, p, shares, self.newest[p], plain), None)
            seen += syncer.execute(Store(t, (p,), (limit,) if limit else ()), None)
        assert seen[0] == seen[1]
        if isinstance(seen[0], Stored):
            self.newest[p] = t
            self.require_equal(p, t)
        return seen[0]

    def cut(self, p: FragmentId, m: int, packet: Packet, buffers: Tensor) -> OwnParts:
        for stripe, shard in zip(self.shards._stripes[p], self.shards._shards, strict=True):
            assert isinstance(shard, InProcess)
            part = packet_part(packet, stripe.first, stripe.last)
            shard.own[b"link", m] = part, buffers if stripe.fragment.buffer_numel else buffers[:0]
        return OwnParts(b"link", m)

    def require_equal(self, p: FragmentId, v: OuterStep) -> None:
        one, all_ = self.whole.disk.at(p, v), self.shards.disk.at(p, v)
        assert torch.equal(one.theta, all_.theta) and torch.equal(one.announced, all_.announced)
        assert torch.equal(one.buffers, all_.buffers)
        assert one.outer is not None and all_.outer is not None and one.outer.count == all_.outer.count
        for name in ("momentum", "pending", "average"):
            before, after = getattr(one.outer, name), getattr(all_.outer, name)
            assert (before is None) == (after is None) and (before is None or torch.equal(before, after))
        assert (one.packet is None) == (all_.packet is None)
        if one.packet is not None and all_.packet is not None:
            assert torch.equal(one.packet.codes, all_.packet.codes)
            assert (one.packet.scales is None) == (all_.packet.scales is None)
            assert one.packet.scales is None or torch.equal(one.packet.scales, all_.packet.scales)


KERNELS = [pytest.param(1, id="numba"), pytest.param(1 << 60, id="torch")]


@pytest.mark.parametrize("worthwhile", KERNELS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_shards_stores_the_bytes_of_one(count: int, worthwhile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", worthwhile)
    monkeypatch.setattr(digests, "DIGEST_BLOCK", 4_096)
    both = Both(config(), count)
    for t in range(1, 7):
        both.round(t)
    assert isinstance(both.round(7, opposite=True, learners=2), Stored), "directions that cancel are averaged"
    both.round(8, plain=True)
    both.round(9, learners=1)


@pytest.mark.parametrize(
    "protocol",
    [
        {"codec_up": "fp32", "codec_down": "fp32"},
        {"codec_up": "int8", "codec_down": "bf16"},
        {"codec_up": "e3m0", "codec_down": "int4"},
        {"merge": "mean", "embedding_merge": "rda"},
        {"merge": "mean", "embedding_merge": "mean"},
        {"anchor": "present"},
    ],
)
def test_every_codec_and_merge_that_shards_take(protocol: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", 1)
    both = Both(config(**protocol), 3)
    for t in range(1, 5):
        both.round(t)


@pytest.mark.parametrize("count", [1, 3])
def test_contributions_to_shards_are_merged_as_those_to_the_coordinator(count: int) -> None:
    both = Both(config(), count)
    for t in range(1, 5):
        both.round(t, own=True)


def test_shards_judge_a_contribution_as_a_syncer_does() -> None:
    both, body = Both(config(), 3), Contribution(1, 0, 4, 0, 4, 64, 4, 64)
    packet, buffers = codec("int4").encode(numbers(3, 1e-3)), numbers(4, 1.0, BUFFERS)
    payload = Payload("packet", packet.nbytes, (packet, buffers))
    whole = both.whole.inspect(body, payload)
    bounds = stripe_bounds(NUMEL, 3)
    parts = [packet_part(packet, *bounds[k : k + 2]) for k in range(3)]
    leaves = [both.whole.merger.norm_leaves(part, by_value=False) for part in parts]
    by_value = [both.whole.merger.norm_leaves(part, by_value=True) for part in parts]
    shards = both.shards
    assert shards.judge(body, [PartFound("", each) for each in leaves]) == whole and whole.measure is not None
    unknown = [PartFound("", leaves[0]), PartFound("", None), PartFound("", leaves[2])]
    assert shards.judge(body, unknown) is None, "of values, please"
    assert (again := shards.judge(body, [PartFound("", each) for each in by_value])) is not None and again.measure is not None
    flaw = shards.judge(body, [PartFound("", leaves[0]), PartFound("it is no part", None), PartFound("", leaves[2])])
    assert flaw is not None and str(flaw.flaw) == str(Reason(Why.POISONED, "it is no part"))
    gone = msgspec.structs.replace(body, anchor=10**9)
    for finding in (shards.judge(gone, [PartFound("", each) for each in leaves]), both.whole.inspect(gone, payload)):
        assert finding is not None and finding.flaw is None and finding.measure is not None, "the machine refuses it, mildly"
        assert finding.measure.norm == whole.measure.norm and finding.measure.weights == 0.0
    poisoned = shards.judge(body, [PartFound("", leaves[0]), PartFound("", leaves[1] * math.inf), PartFound("", leaves[2])])
    assert poisoned is not None and "NaN or Inf" in str(poisoned.flaw)


def test_average_of_theta_is_kept_by_stripes() -> None:
    settings = load(preset_name="decoupled", overrides={
        "learners": 3, "outer": {"average_decay": 0.9},
        "protocol": {"fragments": FRAGMENTS, "local_steps_per_round": 4, "overlap": 2},
    })  # fmt: skip
    both = Both(settings, 2)
    for t in range(1, 4):
        both.round(t)


def test_rejected_merge_leaves_no_trace() -> None:
    both = Both(config(), 2)
    both.round(1)
    rejected = both.round(2, limit=1e-9)
    assert isinstance(rejected, MergeRejected)
    for syncer in (both.whole, both.shards):
        syncer.execute(AbortRound(2, Reason(Why.MERGE_REJECTED)), None)
    both.round(2)


def test_rollback_copies_every_stripe() -> None:
    both = Both(config(), 3)
    for t in range(1, 5):
        both.round(t)
    back = tuple(sorted(versions)[1] for versions in both.whole.disk.kept())  # type: ignore[attr-defined]
    seen: list[Any] = []
    for syncer in (both.whole, both.shards):
        syncer.execute(CopyVersions(5, back), None)
        seen += syncer.execute(Store(5, tuple(range(FRAGMENTS))), None)
    assert seen[0] == seen[1]
    for p in range(FRAGMENTS):
        both.require_equal(p, 5)
        both.newest[p] = 5
    both.round(6)


def test_shard_that_fails_in_a_merge_ends_the_wait_of_the_others() -> None:
    both = Both(config(), 3)

    def broken(effect: Merge, meeting: Meeting) -> StripeResult:
        raise RuntimeError("gone")

    both.shards._shards[1].merge = broken  # type: ignore[method-assign]
    packet = codec("int4").encode(numbers(1, 1e-3))
    for m in range(2):
        both.shards.execute(Accept(1, 1, m, 0), Payload("packet", packet.nbytes, (packet, torch.zeros(BUFFERS))))
    with ThreadPoolExecutor(1) as beside:
        merge = beside.submit(both.shards.execute, Merge(1, 1, (Share(0, 1.0, 0, 4), Share(1, 1.0, 0, 4)), 0, False), None)
        with pytest.raises(RuntimeError, match="gone"):
            merge.result(timeout=30)


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 5_000])
@pytest.mark.parametrize("second", [1, 700, 1_024, 9_000])
def test_norm_of_parts_is_the_norm_of_the_whole(at: int, second: int) -> None:
    x = numbers(3, 1.0, at + second + 2_500)
    cuts: Sequence[int] = (0, at, at + second, len(x))
    parts = [part_squares(x[a:b], a, ends=b == len(x)) for a, b in itertools.pairwise(cuts) if a < b]
    assert norm_of_parts(parts) == outlier_norm(x)


@pytest.mark.parametrize("cuts", [(0, 5, 100), (0, 64, 100), (0, 63, 65, 100), (0, 100), (0, 1, 2, 3, 100)])
@pytest.mark.parametrize("block", [16, 64, 100, 101])
def test_checksum_of_parts_is_that_of_the_whole(cuts: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "DIGEST_BLOCK", block)
    x, buffers = numbers(3, 1.0, 100), numbers(4, 1.0, 3)
    parts = [digest_part(x[a:b], a, 100) for a, b in itertools.pairwise(cuts)]
    assert checksum_of_parts([parts, [digest_part(buffers, 0, 3)]]) == checksum([x, buffers])


def test_long_vectors_are_digested_as_before_where_a_tape_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "DIGEST_BLOCK", 16)
    x = numbers(3, 1.0, 100)
    assert checksum([x]) != checksum([x], in_blocks=False)
    assert checksum([x[:16]]) == checksum([x[:16]], in_blocks=False)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "e3m0", "int2", "int1"])
def test_packet_is_put_together_from_its_parts(name: str) -> None:
    x = numbers(5, 1e-3, 5_001)
    packet, bounds = codec(name).encode(x), stripe_bounds(5_001, 3)
    parts = [packet_part(packet, a, b) for a, b in itertools.pairwise(bounds)]
    whole = joined(parts)
    assert torch.equal(whole.codes, packet.codes) and whole.numel == packet.numel
    assert torch.equal(torch.cat([codec(name).decode(part) for part in parts]), codec(name).decode(packet))


def test_version_is_put_together_from_its_stripes() -> None:
    version = initial(config())[0]
    whole = joined_version([stripe_of_version(version, stripe) for stripe in stripes_of(layout()[0], 4)])
    assert torch.equal(whole.theta, version.theta) and whole.announced is whole.theta
    assert torch.equal(whole.buffers, version.buffers)


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("ddp", {}, "data-parallel"),
        ("decoupled", {"protocol": {"merge": "trimmed_mean"}}, "'mean' and 'rda'"),
        ("decoupled", {"protocol": {"merge_norm": "row"}}, "merge_norm"),
        ("decoupled", {"protocol": {"codec_up": "top_k:0.1"}}, "cannot be cut"),
    ],
)
def test_what_a_stripe_cannot_do_is_refused(preset: str, overrides: dict[str, Any], says: str) -> None:
    settings = load(preset_name=preset, overrides=overrides)
    refuse_unsharded(load(preset_name="decoupled"), "--shards 2")
    with pytest.raises(UserError, match=says):
        refuse_unsharded(settings, "--shards 2")


def test_fragment_smaller_than_a_leaf_for_each_shard_is_on_some(monkeypatch: pytest.MonkeyPatch) -> None:
    for worthwhile in (1, 1 << 60):
        monkeypatch.setattr(fused, "WORTHWHILE", worthwhile)
        monkeypatch.setattr(sys.modules[__name__], "SIZES", (300, 1_500))
        monkeypatch.setattr(sys.modules[__name__], "NUMEL", 1_800)
        both = Both(config(), 4)
        for t in range(1, 4):
            both.round(t)
