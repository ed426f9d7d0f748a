"""Compiled kernels give torch's bytes and torch's sums to the bit, whatever the input. Without such, this is trivial."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codecs import BLOCK, Packet, available_kernels, choice, codec, kernels, kernels_in_use, neon
from atoll.codecs.blocks import TINY
from atoll.errors import ConfigError, NotFinite

NAMES = ("int4", "e3m0")
WEIGHTS = (1.0, -1.0, 0.25, 0.3, -1e-3, 0.0, -0.0, 1e-38, 1e-45, 1e4, 1e30, 3e38, float("inf"), float("nan"))
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, TINY, -TINY, TINY * (1 + 2.0**-23), 1.1754943508222875e-38, 3e38, -3.4028234663852886e38)
FINITE_BITS = 0x7F7FFFFF


def of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bits_of(x: Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


@st.composite
def adversarial(draw: st.DrawFn, low: int = 0, high: int = 2000) -> Tensor:
    """Finite floats from raw bits with exponents of a random range, some elements special, at a random alignment."""
    numel, offset = draw(st.integers(low, high)), draw(st.integers(0, 5))
    first, second = draw(st.integers(0, FINITE_BITS)), draw(st.integers(0, FINITE_BITS))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    magnitudes = torch.randint(min(first, second), max(first, second) + 1, (numel + offset,), generator=rng)
    x = of_bits(magnitudes) * (1 - 2 * torch.randint(0, 2, magnitudes.shape, generator=rng))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=6)):
        if numel:
            x[offset + int(torch.randint(0, numel, (), generator=rng))] = value
    return x[offset:]


def agree_on_encoding(name: str, x: Tensor) -> Packet:
    seen: list[Packet] = []
    for choose in available_kernels():
        with kernels(choose):
            seen.append(codec(name).encode(x))
    for packet in seen[1:]:
        assert packet.to_bytes() == seen[0].to_bytes()
    return seen[0]


def agree_on_decoding(packet: Packet, into: Tensor, weight: float) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    for choose in available_kernels():
        with kernels(choose):
            # At the alignment of the original.
            target = torch.cat([torch.zeros(into.storage_offset()), into])[into.storage_offset() :]
            codec(packet.codec).accumulate(packet, target, weight)
            seen.append((bits_of(codec(packet.codec).decode(packet)), bits_of(target)))
    for found in seen[1:]:
        assert found == seen[0]


@settings(max_examples=250, deadline=None)
@given(x=adversarial(), name=st.sampled_from(NAMES))
def test_bytes_of_any_finite_input_are_the_same(x: Tensor, name: str) -> None:
    agree_on_encoding(name, x)


@settings(max_examples=250, deadline=None)
@given(x=adversarial(), name=st.sampled_from(NAMES), weight=st.sampled_from(WEIGHTS), seed=st.integers(0, 2**32))
def test_sums_and_decoding_of_any_input_are_the_same_to_the_bit(x: Tensor, name: str, weight: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    magnitude = 2.0 ** float(torch.randint(-140, 127, (), generator=rng))
    packet = agree_on_encoding(name, x)
    agree_on_decoding(packet, torch.randn(x.shape, generator=rng) * magnitude, weight)
    agree_on_decoding(packet, -x, weight)


@settings(max_examples=150, deadline=None)
@given(
    numel=st.integers(0, 2000), name=st.sampled_from(NAMES), weight=st.sampled_from(WEIGHTS),
    seed=st.integers(0, 2**32), offset=st.integers(0, 17), exponents=st.integers(1, 254),
)  # fmt: skip
def test_sums_of_arbitrary_packets_are_the_same_to_the_bit(
    numel: int, name: str, weight: float, seed: int, offset: int, exponents: int
) -> None:
    """Codes no encoder writes (-8), scales of either sign, codes at any address, and NaN and Inf in the target."""
    rng = torch.Generator().manual_seed(seed)
    shape = codec(name).encode(torch.zeros(numel))
    assert shape.scales is not None
    codes = torch.randint(-128, 128, (offset + shape.codes.numel(),), generator=rng).to(torch.int8)[offset:]
    scales = of_bits(torch.randint(0, exponents << 23, shape.scales.shape, generator=rng))
    scales *= 1 - 2 * torch.randint(0, 2, scales.shape, generator=rng)
    into = of_bits(torch.randint(-(2**31), 2**31, (numel + offset,), generator=rng))[offset:]
    agree_on_decoding(Packet(name, numel, codes, scales), into, weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("absmax", [1.0, 1.7, 3e38, 3.4028234663852886e38, 2.0**-114, TINY * (1 + 2.0**-23), 7.0, 1e-30])
def test_codes_are_the_same_for_every_upper_half_of_a_float(name: str, absmax: float) -> None:
    """All 2^16 upper halves, with lower halves around the carry: these decide exponents, first mantissa bits and ties."""
    upper = torch.arange(-(2**15), 2**15).view(-1, 1) << 16
    x = of_bits((upper | torch.tensor([0, 1, 0x7FFF, 0xFFFF])).view(-1))
    x = x[x.abs() <= absmax]
    x = torch.nn.functional.pad(x, (0, -x.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    agree_on_encoding(name, torch.cat([x, torch.full((x.shape[0], 1), absmax)], dim=1).view(-1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.1, 1.2345678, 3e-30, 2e37])
def test_codes_at_ties_and_some_ulp_beside_them_are_the_same(name: str, scale: float) -> None:
    ties = torch.arange(1, 14) / 14 if name == "int4" else torch.cat([1.5 * 2.0 ** -torch.arange(1.0, 8), torch.ones(1) / 128])
    near = of_bits((ties * scale).view(torch.int32).view(-1, 1) + torch.arange(-12, 13)).view(-1)
    for x in (near, -near):
        x = torch.nn.functional.pad(x, (0, -x.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
        agree_on_encoding(name, torch.cat([torch.full((x.shape[0], 1), scale), x], dim=1).view(-1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [0.5, 1.0, 1.99, 2.0, 4.0, 64.0, 100.0])
def test_products_that_overflow_before_the_sum_does_are_the_same(name: str, weight: float) -> None:
    """A fused product and sum would stay finite here."""
    packet = agree_on_encoding(name, torch.linspace(-1, 1, 3 * BLOCK + 5) * 3.4e38)
    agree_on_decoding(packet, torch.linspace(1, -1, 3 * BLOCK + 5) * 3.4e38, weight)


@settings(max_examples=60, deadline=None)
@given(
    x=adversarial(low=1), name=st.sampled_from(NAMES), where=st.floats(0, 1, exclude_max=True),
    bits=st.sampled_from([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]), sign=st.sampled_from([0, -(2**31)]),
)  # fmt: skip
def test_nan_or_inf_anywhere_is_refused_by_all(x: Tensor, name: str, where: float, bits: int, sign: int) -> None:
    x.view(torch.int32)[int(where * x.numel())] = bits + sign
    for choose in available_kernels():
        with kernels(choose), pytest.raises(NotFinite, match=name):
            codec(name).encode(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [choice.WORTHWHILE, 1_000_003])
def test_large_input_is_the_same_under_any_number_of_threads(name: str, numel: int) -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(numel, generator=rng) * 2.0 ** torch.randint(-30, 30, (numel,), generator=rng)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            packet = agree_on_encoding(name, x)
            agree_on_decoding(packet, x, 0.3)
            assert codec(name).encode(x).to_bytes() == packet.to_bytes()
    finally:
        torch.set_num_threads(before)


def test_compiled_kernels_are_used_where_machine_and_llvmlite_allow() -> None:
    expected = platform.machine() == "aarch64" and importlib.util.find_spec("llvmlite") is not None
    assert available_kernels() == (("torch", "neon") if expected else ("torch",))
    assert kernels_in_use() == available_kernels()[-1]
    with kernels("torch"):
        assert kernels_in_use() == "torch"
    large, small = torch.zeros(choice.WORTHWHILE), torch.zeros(choice.WORTHWHILE - 1)
    assert (choice.kernels_for("int4", large) is not None) == expected
    for name, tensor in (("int8", large), ("int4", small), ("int4", large[::2]), ("int4", large.clone().requires_grad_())):
        assert choice.kernels_for(name, tensor) is None


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="sse"), kernels("sse"):
        pass


def test_llvmlite_is_not_imported_before_the_first_large_tensor() -> None:
    program = (
        "import sys, torch, atoll.codecs as c; c.codec('int4').encode(torch.ones(1000)); assert 'llvmlite' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_other_machines_use_torch_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert choice._build() is None


def test_missing_llvmlite_means_torch_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice._build() is None


def test_kernels_that_do_not_compile_mean_torch_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(neon, "Neon", refuse)
    with pytest.warns(RuntimeWarning, match="parsing error"):
        assert choice._build() is None
