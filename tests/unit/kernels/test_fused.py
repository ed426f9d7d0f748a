"""The compiled loops against torch's operations: every byte of Theta, momentum, announcement and packet, and every norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.config import Config, load
from atoll.errors import UserError
from atoll.executor.merging import packet_norm
from atoll.executor.syncer import TensorSyncer
from atoll.kernels import fused
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Accept, Contribution, Merge, Share, Store, Stored
from atoll.store.versions import MemoryVersions, Version
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.norms import outlier_norm
from atoll.tensors.outer import OuterState, initial_state, outer_rule

SIZES = (300, 70_001, 2048, 1)
"""Slots that end in the middle of a block, of a leaf and of a chunk."""
NUMEL = sum(SIZES)


def fragment() -> Fragment:
    slots, at = [], 0
    for index, size in enumerate(SIZES):
        slots.append(Slot(f"w{index}", "param", 0, size, (size,), at, size, torch.float32, embedding=index == 2))
        at += size
    return Fragment(0, tuple(slots), (), at, 0)


def config(**changes: Any) -> Config:
    protocol = {"fragments": 1, "local_steps_per_round": 4, "overlap": 2} | changes.pop("protocol", {})
    return load(preset_name="decoupled", overrides={"learners": 3, "protocol": protocol, **changes})


def numbers(seed: int, size: float) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * size


def first_version(settings: Config, count: int) -> Version:
    theta = numbers(1, 0.02)
    rule = outer_rule(settings)
    state = None if rule is None else initial_state(rule, NUMEL)
    if state is not None and count and state.momentum is not None:
        state = OuterState(numbers(2, 1e-4), state.pending, count)
    announced = theta if codec(settings.protocol.codec_down).lossless else theta + numbers(3, 1e-6)
    return Version(theta, torch.empty(0), state, None, announced, None)


def merged(
    settings: Config, weights: Sequence[float], count: int = 3, plain: bool = False, opposite: bool = False, *,
    by_torch: bool = False,
) -> tuple[Version, Stored]:  # fmt: skip
    syncer = TensorSyncer(settings, (fragment(),), MemoryVersions([first_version(settings, count)]))
    if by_torch:
        syncer.merger.use_torch()
    else:
        assert syncer.merger.kernels.startswith("numba")
    for m in range(len(weights)):
        sent = numbers(10, -1.0 if m else 1.0) if opposite else numbers(10 + m, 1e-3 * (m + 1))
        packet = codec(settings.protocol.codec_up).encode(sent)
        syncer.execute(Accept(1, 0, m, 0), Payload("packet", packet.nbytes, (packet, torch.empty(0))))
    shares = tuple(Share(m, weight, 0, 4) for m, weight in enumerate(weights))
    syncer.execute(Merge(1, 0, shares, 0, plain), None)
    (stored,) = syncer.execute(Store(1, (0,)), None)
    assert isinstance(stored, Stored)
    return syncer.disk.at(0, 1), stored


def parts(version: Version) -> dict[str, Tensor | None]:
    packet, outer = version.packet, version.outer
    return {
        "theta": version.theta, "announced": version.announced, "momentum": outer.momentum if outer else None,
        "pending": outer.pending if outer else None, "codes": packet.codes if packet else None,
        "scales": packet.scales if packet else None, "average": outer.average if outer else None,
    }  # fmt: skip


def assert_same(
    settings: Config, weights: Sequence[float], count: int = 3, plain: bool = False, opposite: bool = False
) -> None:
    mine, stored = merged(settings, weights, count, plain, opposite)
    theirs, expected = merged(settings, weights, count, plain, opposite, by_torch=True)
    for (name, a), b in zip(parts(mine).items(), parts(theirs).values(), strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    assert stored == expected


@pytest.fixture(autouse=True)
def small_is_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", 1)


@pytest.mark.parametrize("weights", [[7.0], [1.0, 1.0, 1.0], [3.0, 1.0, 2.5]])
@pytest.mark.parametrize("up", ["int4", "int8", "bf16", "fp32", "e3m0", "int2", "top_k:0.1", "chunk_top_k:0.1"])
def test_merge_is_that_of_torch_for_every_codec_up(up: str, weights: list[float]) -> None:
    assert_same(config(protocol={"codec_up": up, "codec_down": "int8"}), weights)


@pytest.mark.parametrize("down", ["int8", "bf16", "fp32", "int4", "e3m0"])
@pytest.mark.parametrize("anchor", ["present", "adopted"])
def test_announcement_is_that_of_torch_for_every_codec_down(down: str, anchor: str) -> None:
    assert_same(config(protocol={"codec_up": "int4", "codec_down": down, "anchor": anchor}), [1.0, 2.0])


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "delayed_nesterov"])
def test_outer_step_is_that_of_torch_for_every_outer_optimiser(optimizer: str, count: int) -> None:
    assert_same(config(outer={"outer_optimizer": optimizer}, protocol={"codec_down": "int8"}), [1.0, 1.0], count)


@pytest.mark.parametrize("merge", ["mean", "rda", "trimmed_mean", "aligned"])
@pytest.mark.parametrize("norm", ["tensor", "fragment"])
def test_merged_gradient_is_that_of_torch_for_every_merge(merge: str, norm: str) -> None:
    assert_same(config(protocol={"merge": merge, "merge_norm": norm}), [1.0, 2.0, 1.0, 1.0])


@pytest.mark.parametrize("count", [0, 3])
def test_outer_step_over_time_and_the_average_are_those_of_torch(count: int) -> None:
    """Of 25 outer steps of the fragment the first is warm-up, and from the fourth on the rate and the momentum are lower."""
    keys = {"momentum_warmup": 0.04, "momentum_schedule": [[0.16, 0.3]], "rate_schedule": [[0.16, 0.5]], "average_decay": 0.9}
    settings = config(total_steps=100, outer=keys, protocol={"codec_down": "int8"})
    assert_same(settings, [1.0, 2.0], count)
    constant = config(total_steps=100, protocol={"codec_down": "int8"})
    assert not torch.equal(merged(settings, [1.0, 2.0], count)[0].theta, merged(constant, [1.0, 2.0], count)[0].theta)


def test_plain_average_is_that_of_torch() -> None:
    assert_same(config(), [2.0, 1.0], plain=True)


def test_directions_that_cancel_are_merged_by_their_mean() -> None:
    settings = config(protocol={"codec_up": "fp32", "codec_down": "int8", "anchor": "adopted"})
    assert_same(settings, [1.0, 1.0], opposite=True)


@pytest.mark.parametrize("up", ["int4", "int8", "bf16", "fp32", "e3m0", "int1"])
def test_inspected_norm_is_that_of_the_decoded_packet(up: str) -> None:
    settings = config(protocol={"codec_up": up})
    syncer = TensorSyncer(settings, (fragment(),), MemoryVersions([first_version(settings, 1)]))
    packet = codec(up).encode(numbers(5, 1e-3))
    found = syncer.inspect(Contribution(1, 0, 4, 0, 4, 10, 1, 10), Payload("packet", packet.nbytes, (packet, torch.empty(0))))
    assert found.measure is not None
    assert found.measure.norm == packet_norm(packet) == pytest.approx(outlier_norm(codec(up).decode(packet)), rel=1e-7)
    assert found.measure.weights == outlier_norm(first_version(settings, 1).announced)


def test_merging_takes_all_cores_of_a_small_machine_and_half_of_a_large_one() -> None:
    assert [fused.threads_for(cores) for cores in (1, 2, 8, 12, 16, 64)] == [1, 2, 8, 8, 8, 32]


def test_number_of_threads_changes_no_byte() -> None:
    settings, seen = config(protocol={"codec_down": "int8"}), []
    packets = [codec("int4").encode(numbers(m, 1e-3)) for m in range(3)]
    before = first_version(settings, 2)
    rule = outer_rule(settings)
    assert before.outer is not None and rule is not None
    for threads in (1, 2, 5):
        loops = fused.Fused(settings, threads)
        given = [fused.MergePart(packet, before.announced) for packet in packets]
        delta, factors = loops.merged(fragment(), before.theta, given, [1.0, 2.0, 3.0], plain=False)
        seen.append(loops.step(fragment(), delta, factors, before.theta, before.announced, before.outer, rule))
        loops.close()
    for other in seen[1:]:
        assert torch.equal(other.theta, seen[0].theta) and torch.equal(other.announced, seen[0].announced)
        assert other.packet.codes.equal(seen[0].packet.codes)
        assert other.moves.tolist() == seen[0].moves.tolist() and other.sizes.tolist() == seen[0].sizes.tolist()


def test_hostile_codes_decode_as_by_torch() -> None:
    """A nibble of -8 is no honest code, and still has one value."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.int8).repeat(2)
    for name in ("int4", "e3m0"):
        packet = Packet(name, 1024, codes, torch.full((4,), 0.37))
        loops = fused.Fused(config(), 1)
        assert loops.norm(packet) == packet_norm(packet) == pytest.approx(outlier_norm(codec(name).decode(packet)), rel=1e-7)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e38, 3e38])
@pytest.mark.parametrize("name", ["int4", "int8", "e3m0"])
def test_scales_that_decode_to_no_number_are_found(name: str, scale: float) -> None:
    packet = codec(name).encode(numbers(5, 1e-3))
    assert packet.scales is not None
    packet.scales[7] = scale
    packet.codes.view(-1, 1)[: 300].fill_(127 if name == "int8" else 0x77)
    decoded = outlier_norm(codec(name).decode(packet))
    for norm in (fused.Fused(config(), 1).norm(packet), packet_norm(packet)):
        assert norm is not None and math.isfinite(norm) == math.isfinite(decoded)


def test_high_bits_of_an_odd_last_byte_are_no_element() -> None:
    for name in ("int4", "e3m0"):
        packet = codec(name).encode(torch.ones(3))
        packet.codes[1] = 0x77
        expected = pytest.approx(outlier_norm(codec(name).decode(packet)), rel=1e-7)
        assert fused.Fused(config(), 1).norm(packet) == packet_norm(packet) == expected


def test_arrays_are_used_again_only_when_nobody_holds_them() -> None:
    buffers = fused.ArrayPool()
    first = buffers.take(1000, "float32")
    view, address = first[10:20], first.data_ptr()
    del first
    assert buffers.take(1000, "float32").data_ptr() != address
    del view
    again = [buffers.take(1000, "float32") for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in again}


def test_run_says_what_torch_computes_although_there_are_kernels() -> None:
    settings = config(protocol={"merge": "trimmed_mean", "codec_down": "int4"})
    syncer = TensorSyncer(settings, (fragment(),), MemoryVersions([first_version(settings, 1)]))
    kernels = syncer.merger.kernels
    assert kernels.startswith("numba") and kernels.endswith(", and torch for codec int4 down, merge trimmed_mean")


def test_fragments_too_small_for_the_import_are_merged_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", NUMEL + 1)
    settings = config()
    assert TensorSyncer(settings, (fragment(),), MemoryVersions([first_version(settings, 1)])).merger.kernels == "torch"


def test_environment_names_the_kernels_and_a_wrong_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", NUMEL + 1)
    for name, worth, numba in (("", False, True), ("numba", True, True), ("torch", False, False)):
        monkeypatch.setenv("ATOLL_KERNELS", name)
        assert (fused.worthwhile((fragment(),), 8), fused.has_numba()) == (worth, numba)
    monkeypatch.setenv("ATOLL_KERNELS", "")
    assert fused.worthwhile((fragment(),), fused.MANY_LEARNERS)
    monkeypatch.setenv("ATOLL_KERNELS", "cuda")
    with pytest.raises(UserError, match="is torch, numba, or not set"):
        fused.has_numba()
    monkeypatch.setenv("ATOLL_KERNELS", "numba")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="numba is not installed"):
        fused.has_numba()
