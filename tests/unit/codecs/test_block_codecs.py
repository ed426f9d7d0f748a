"""int8, int4, int2, int1 and e3m0 against a dumb reference in Python floats (fp64), one block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codecs import BLOCK, codec
from atoll.codecs.blocks import PANEL_CPU, TINY
from atoll.config.codecs import CODECS as TABLE
from atoll.errors import ConfigError, DataError, NotFinite

CODECS = tuple(spec.name for spec in TABLE.values() if spec.kind in ("plain", "blocks"))

pytestmark = pytest.mark.usefixtures("each_kernels")

BLOCKED = ("int8", "int4", "int2", "int1", "e3m0")
ROUNDING = ("int8", "int4", "int2", "e3m0")
CODE_MAX = {"int8": 127, "int4": 7, "int2": 1}
SIZES = (0, 1, 2, 3, 5, 7, 9, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1000)
FLOAT_MAX = 3.4028234663852886e38


def grid_of(name: str, block: list[float]) -> list[float]:
    """The values a block may decode to."""
    absmax = max(map(abs, block))
    if name == "e3m0":
        steps = [absmax * 2.0**-k for k in range(7)]
        return [0.0, *steps, *(-step for step in steps)]
    if name == "int1":
        mean = math.fsum(map(abs, block)) / len(block)
        return [mean, -mean]
    top = CODE_MAX[name]
    return [absmax / top * code for code in range(-top, top + 1)]


def reference(name: str, x: Tensor) -> list[float]:
    """The nearest value of the grid, for every element."""
    values = [float(v) for v in x]
    out: list[float] = []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        grid = grid_of(name, block)
        if name == "int1":
            out += [grid[1] if v < 0 else grid[0] for v in block]
        else:
            out += [min(grid, key=lambda g, v=v: abs(g - v)) for v in block]
    return out


def normal(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("numel", SIZES)
def test_decoding_of_random_numbers_of_any_length_agrees_with_reference(name: str, numel: int) -> None:
    x = normal(numel, seed=numel)
    decoded = codec(name).decode(codec(name).encode(x))
    assert decoded.dtype == torch.float32
    assert decoded.shape == (numel,)
    # Scales are rounded to fp32, and no random number is so near a border that this moves it over.
    torch.testing.assert_close(decoded, torch.tensor(reference(name, x)), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("numel", [PANEL_CPU - 1, PANEL_CPU, PANEL_CPU + BLOCK + 77])
def test_decoding_across_a_panel_border_equals_decoding_block_by_block(name: str, numel: int) -> None:
    x = normal(numel)
    c = codec(name)
    whole = c.decode(c.encode(x))
    near = (PANEL_CPU // BLOCK - 2) * BLOCK
    parts = [c.decode(c.encode(part)) for part in x[near:].split(BLOCK)]
    assert torch.equal(whole[near:], torch.cat(parts))


@st.composite
def wild_vectors(draw: st.DrawFn) -> Tensor:
    """Magnitudes over the whole range of fp32, subnormals and zeros included, in few or many blocks."""
    exponent = draw(st.integers(-149, 127))
    spread = draw(st.integers(0, 160))
    numel = draw(st.integers(1, 600))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = exponent - spread * torch.rand(numel, generator=rng, dtype=torch.float64)
    mantissa = 1 + torch.rand(numel, generator=rng, dtype=torch.float64)
    sign = torch.randint(-1, 2, (numel,), generator=rng)
    return (sign * mantissa * 2.0**exponents).clamp(-FLOAT_MAX, FLOAT_MAX).float()


@settings(max_examples=150, deadline=None)
@given(x=wild_vectors())
@example(x=torch.tensor([1e-45]))
@example(x=torch.tensor([1e-45, -3e38]))
@example(x=torch.full((257,), 3e38))
@example(x=torch.full((300,), -FLOAT_MAX))
@example(x=torch.tensor([TINY, -TINY / 2]))
@example(x=torch.tensor([TINY * 1.0001, -TINY / 2]))
def test_error_of_any_finite_input_is_finite_and_within_the_bound(x: Tensor) -> None:
    for name in CODECS:
        c = codec(name)
        packet = c.encode(x)
        decoded = c.decode(packet)
        assert torch.isfinite(decoded).all()
        error = (decoded.double() - x.double()).abs()
        assert (error <= c.error_bound(x).double()).all(), name
        assert packet.nbytes == c.nbytes(x.numel())
        if packet.scales is not None and name != "int1":
            largest = torch.nn.functional.pad(x.abs(), (0, -x.numel() % BLOCK)).view(-1, BLOCK).amax(1)
            assert (packet.scales <= largest).all()


@settings(max_examples=200, deadline=None)
@given(mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(20, 253), name=st.sampled_from(ROUNDING))
def test_largest_element_takes_the_largest_code_and_never_exceeds_it(mantissa: int, exponent: int, name: str) -> None:
    absmax = torch.tensor([exponent << 23 | mantissa], dtype=torch.int32).view(torch.float32)
    x = torch.cat([absmax, -absmax, absmax * 0.999999, -absmax * 0.999999])
    decoded = codec(name).decode(codec(name).encode(x))
    top = CODE_MAX.get(name, 1)
    expected = absmax / top * top
    assert torch.equal(decoded, torch.cat([expected, -expected, expected, -expected]))


@pytest.mark.parametrize("below", range(8))
@pytest.mark.parametrize("name", ROUNDING)
def test_largest_floats_come_back_finite(name: str, below: int) -> None:
    """Codes times their step may round up: the step is lowered where that would be Inf."""
    x = torch.tensor([254 << 23 | 2**23 - 1 - below], dtype=torch.int32).view(torch.float32)
    decoded = codec(name).decode(codec(name).encode(torch.cat([x, -x])))
    assert bool(torch.isfinite(decoded).all()) and bool((decoded.abs() >= x * (1 - 2.0**-20)).all())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["int8", "int4", "int2", "e3m0"])
def test_stochastic_largest_element_never_exceeds_the_largest_code(name: str, seed: int) -> None:
    x = normal(BLOCK * 64, seed=seed).abs()
    decoded = codec(name).decode(codec(name).encode(x, rng=torch.Generator().manual_seed(seed)))
    largest = x.view(-1, BLOCK).amax(1)
    assert (decoded.view(-1, BLOCK).amax(1) <= largest * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", BLOCKED)
def test_zero_block_beside_a_normal_one_has_scale_zero_and_decodes_to_zeros(name: str) -> None:
    x = torch.cat([torch.zeros(BLOCK), normal(BLOCK), -torch.zeros(9)])
    packet = codec(name).encode(x)
    assert packet.scales is not None
    assert packet.scales[0] == 0
    assert packet.scales[1] > 0
    assert packet.scales[2] == 0
    decoded = codec(name).decode(packet)
    assert (decoded[:BLOCK] == 0).all()
    assert (decoded[2 * BLOCK :] == 0).all()


def test_int1_of_negative_zero_is_positive() -> None:
    decoded = codec("int1").decode(codec("int1").encode(torch.tensor([-0.0, 0.0, 3.0, -3.0])))
    assert decoded.tolist() == [1.5, 1.5, 1.5, -1.5]


def test_e3m0_values_are_exact_powers_of_two_times_the_scale() -> None:
    scale = torch.tensor(1.2345678)
    x = torch.cat([scale * 2.0**-k * sign for k in range(7) for sign in (torch.ones(1), -torch.ones(1))])
    assert torch.equal(codec("e3m0").decode(codec("e3m0").encode(x)), x)


@pytest.mark.parametrize("border", [1.5 * 2.0**-k for k in range(1, 7)] + [2.0**-7])
def test_e3m0_on_either_side_of_a_border_goes_to_its_own_neighbour(border: float) -> None:
    lower = 0.0 if border == 2.0**-7 else border / 1.5
    upper = 2.0**-6 if border == 2.0**-7 else lower * 2
    x = torch.tensor([1.0, border * (1 - 1e-5), border * (1 + 1e-5), -border * (1 - 1e-5), -border * (1 + 1e-5)])
    assert codec("e3m0").decode(codec("e3m0").encode(x)).tolist() == [1.0, lower, upper, -lower, -upper]


@settings(max_examples=60, deadline=None)
@given(x=wild_vectors(), name=st.sampled_from(["fp32", "bf16", "int4", "int2", "int8", "e3m0"]))
def test_decoded_values_encode_to_themselves(x: Tensor, name: str) -> None:
    c = codec(name)
    once = c.decode(c.encode(x))
    twice = c.decode(c.encode(once))
    # absmax -> scale -> absmax rounds, so a scale may move by an ulp; codes do not move.
    torch.testing.assert_close(twice, once, rtol=3e-7, atol=TINY)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("weight", [1.0, -1.0, 0.25, 0.3, 1e-3])
@pytest.mark.parametrize("numel", [0, 5, 300, PANEL_CPU + 1111])
def test_accumulate_adds_the_weighted_decoding(name: str, weight: float, numel: int) -> None:
    x, into = normal(numel, seed=1), normal(numel, seed=2)
    c = codec(name)
    packet = c.encode(x)
    decoded = c.decode(packet)
    expected = into + decoded * weight
    c.accumulate(packet, into, weight)
    if math.frexp(abs(weight))[0] == 0.5:  # a power of two commutes with rounding: to the bit
        assert torch.equal(into, expected)
    else:
        slack = decoded.abs().mul(abs(weight)).add(expected.abs()) * 2.0**-22
        assert ((into - expected).abs() <= slack).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_encoding_of_nan_or_inf_anywhere_raises_not_finite(name: str, bad: float, at: int) -> None:
    x = normal(300)
    x[at] = bad
    with pytest.raises(NotFinite, match=name):
        codec(name).encode(x)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int1", "top_k:0.1"])
def test_generator_for_a_codec_without_stochastic_rounding_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        codec(name).encode(normal(10), rng=torch.Generator())


@pytest.mark.parametrize("name", ROUNDING)
def test_stochastic_rounding_over_many_draws_has_the_input_as_mean(name: str) -> None:
    draws, x = 4000, normal(BLOCK, seed=3)
    c = codec(name)
    # Equal blocks have equal scales, so each is one draw.
    decoded = c.decode(c.encode(x.repeat(draws), rng=torch.Generator().manual_seed(11)))
    means = decoded.view(draws, BLOCK).double().mean(0)
    # A draw errs by less than a step, so a mean's deviation is at most 1 / (2 sqrt n) steps; five are allowed.
    steps = 2 * c.error_bound(x)
    assert ((means - x).abs() <= steps * 2.5 / draws**0.5).all()


@pytest.mark.parametrize("name", ROUNDING)
def test_stochastic_rounding_with_equal_seeds_gives_equal_bytes_and_with_others_not(name: str) -> None:
    x = normal(PANEL_CPU + 99)
    first, second, third = (codec(name).encode(x, rng=torch.Generator().manual_seed(s)).to_bytes() for s in (5, 5, 6))
    assert first == second != third


@pytest.mark.parametrize("name", ROUNDING)
def test_stochastic_rounding_of_values_on_the_grid_moves_none(name: str) -> None:
    c = codec(name)
    x = c.decode(c.encode(normal(512) * 4))
    noisy = c.decode(c.encode(x, rng=torch.Generator().manual_seed(1)))
    moved = (noisy - x).abs() > x.abs() * 1e-5
    # An inverse scale rounded down leaves a value an ulp under its grid point, and rarely one falls.
    assert moved.sum() <= 1


@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_sums_do_not_depend_on_the_thread_count(name: str) -> None:
    x, c = normal(3 * PANEL_CPU + 12_345), codec(name)
    seen: list[tuple[bytes, Tensor]] = []
    for count in (1, 2, 3, 7):
        with threads(count):
            packet = c.encode(x)
            into = torch.ones_like(x)
            c.accumulate(packet, into, 0.3)
            seen.append((packet.to_bytes(), into))
    for data, into in seen[1:]:
        assert data == seen[0][0]
        assert torch.equal(into, seen[0][1])


@pytest.mark.parametrize("name", CODECS)
def test_encoding_leaves_the_input_alone_and_the_packet_does_not_follow_it(name: str) -> None:
    x = normal(700)
    before = x.clone()
    packet = codec(name).encode(x)
    assert torch.equal(x, before)
    data = packet.to_bytes()
    x.zero_()
    assert packet.to_bytes() == data


def test_fp32_is_bit_exact_including_subnormals_and_negative_zero() -> None:
    x = torch.tensor([1e-45, -0.0, 3.4e38, -1e-40, 1.0])
    decoded = codec("fp32").decode(codec("fp32").encode(x))
    assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))
    assert codec("fp32").lossless
    assert not codec("bf16").lossless


@pytest.mark.parametrize("name", ["int3", "", "INT4", "top_k", "top_k:", "top_k:0", "top_k:1.5", "top_k:nan", "fp32:1"])
def test_unknown_codec_is_refused_with_its_name_and_the_allowed_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        codec(name)
    assert repr(name) in str(caught.value)
    assert all(allowed in str(caught.value) for allowed in CODECS)


def test_packet_of_another_codec_is_refused() -> None:
    packet = codec("int4").encode(normal(10))
    with pytest.raises(DataError, match=r"int4.*e3m0"):
        codec("e3m0").decode(packet)


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [
        ("fp32", 1000, 4000),
        ("bf16", 1000, 2000),
        ("int8", 1000, 1000 + 16),
        ("int4", 1000, 500 + 16),
        ("int4", 257, 129 + 8),
        ("e3m0", 512, 256 + 8),
        ("int2", 1001, 251 + 16),
        ("int1", 1001, 126 + 16),
        ("top_k:0.1", 1000, 800),
        ("random_drop:0.5", 1000, 4000),
        ("int4", 0, 0),
    ],
)
def test_size_in_bytes_is_exact(name: str, numel: int, expected: int) -> None:
    assert codec(name).nbytes(numel) == codec(name).encode(normal(numel)).nbytes == expected


@pytest.mark.parametrize("name", ROUNDING)
def test_bytes_do_not_depend_on_the_flush_to_zero_mode(name: str) -> None:
    x = torch.cat([normal(BLOCK), normal(BLOCK) * 1e-40, normal(BLOCK) * 1e-36, torch.full((9,), 3e38)])
    x[5] = 1e-45
    expected = codec(name).encode(x)
    decoded = codec(name).decode(expected)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush to zero")
        assert codec(name).encode(x).to_bytes() == expected.to_bytes()
        assert torch.equal(codec(name).decode(expected), decoded)
    finally:
        torch.set_flush_denormal(False)
