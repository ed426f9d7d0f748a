"""top_k, random_drop, and error feedback on every codec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.codecs import codec, encode_with_feedback
from atoll.config.codecs import CODECS as TABLE
from atoll.errors import NotFinite

CODECS = tuple(spec.name for spec in TABLE.values() if spec.kind in ("plain", "blocks"))

def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_top_k_keeps_the_largest_magnitudes_unchanged_and_zeros_the_rest() -> None:
    x = normal(1000)
    decoded = codec("top_k:0.1").decode(codec("top_k:0.1").encode(x))
    largest = x.abs().sort(descending=True).indices[:100]
    expected = torch.zeros_like(x)
    expected[largest] = x[largest]
    assert torch.equal(decoded, expected)


def test_random_drop_keeps_its_share_and_multiplies_it_to_stay_unbiased() -> None:
    x = normal(1000)
    decoded = codec("random_drop:0.25").decode(codec("random_drop:0.25").encode(x))
    kept = decoded != 0
    assert int(kept.sum()) == 250
    assert torch.equal(decoded[kept], x[kept] * 4)


def test_random_drop_over_many_draws_has_the_input_as_mean() -> None:
    x, draws = torch.linspace(-1, 1, 50), 3000
    rng, total = torch.Generator().manual_seed(0), torch.zeros(50)
    for _ in range(draws):
        codec("random_drop:0.5").accumulate(codec("random_drop:0.5").encode(x, rng=rng), total)
    assert ((total / draws - x).abs() <= 5 * x.abs() / draws**0.5 + 1e-6).all()


def test_random_drop_without_generator_repeats_itself_and_with_one_follows_its_seed() -> None:
    x, c = normal(400), codec("random_drop:0.5")
    assert c.encode(x).to_bytes() == c.encode(x).to_bytes()
    seeded = [c.encode(x, rng=torch.Generator().manual_seed(seed)).to_bytes() for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


@pytest.mark.parametrize("name", ["top_k:0.3", "random_drop:0.3", "top_k:1", "random_drop:1.0"])
@pytest.mark.parametrize("numel", [0, 1, 2, 333])
def test_sparse_codecs_of_any_length_stay_within_their_bound_and_size(name: str, numel: int) -> None:
    x, c = normal(numel), codec(name)
    packet = c.encode(x)
    assert packet.nbytes == c.nbytes(numel)
    assert ((c.decode(packet) - x).abs() <= c.error_bound(x)).all()
    if name.endswith(("1", "1.0")):
        assert torch.equal(c.decode(packet), x)


@pytest.mark.parametrize("name", ["top_k:0.5", "random_drop:0.5"])
def test_sparse_codecs_refuse_nan_even_where_they_would_drop_it(name: str) -> None:
    for at in range(8):
        x = normal(8)
        x[at] = float("nan")
        with pytest.raises(NotFinite):
            codec(name).encode(x)


def test_random_drop_that_would_overflow_by_its_gain_raises_not_finite() -> None:
    with pytest.raises(NotFinite):
        codec("random_drop:0.5").encode(torch.full((4,), 3e38))


@pytest.mark.parametrize("name", [*CODECS, "top_k:0.1"])
def test_residual_is_exactly_what_the_packet_does_not_carry(name: str) -> None:
    x, residual, c = normal(700), normal(700, seed=1) * 0.1, codec(name)
    before = x.clone(), residual.clone()
    packet, left = encode_with_feedback(c, x, residual)
    assert packet.to_bytes() == c.encode(x + residual).to_bytes()
    assert torch.equal(left, (x + residual) - c.decode(packet))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("name", [*CODECS, "top_k:0.1"])
def test_first_residual_is_the_coding_error_itself(name: str) -> None:
    x, c = normal(700), codec(name)
    packet, left = encode_with_feedback(c, x, None)
    assert torch.equal(left, x - c.decode(packet))


@pytest.mark.parametrize("name", [*CODECS, "top_k:0.1"])
def test_sum_of_decoded_packets_with_feedback_tracks_the_sum_of_inputs(name: str) -> None:
    c, rounds = codec(name), 60
    wanted, sent, plain = (torch.zeros(500, dtype=torch.float64) for _ in range(3))
    residual: Tensor | None = None
    for round_number in range(rounds):
        x = normal(500, seed=round_number) + 0.3
        packet, residual = encode_with_feedback(c, x, residual)
        wanted += x
        sent += c.decode(packet)
        plain += c.decode(c.encode(x))
    assert residual is not None
    # The sums differ by the last residual alone, however many rounds there were.
    torch.testing.assert_close(sent + residual, wanted, rtol=0.0, atol=1e-3)
    if not c.lossless:
        assert (sent - wanted).norm() < (plain - wanted).norm()


def test_feedback_with_stochastic_rounding_follows_the_seed() -> None:
    x, c = normal(700), codec("int2")
    first, second = (encode_with_feedback(c, x, None, rng=torch.Generator().manual_seed(4)) for _ in range(2))
    assert first[0].to_bytes() == second[0].to_bytes()
    assert torch.equal(first[1], second[1])
