"""The outer step against torch.optim.SGD (bit for bit) and a scalar reference, and mixing on adoption."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.tensors.merge import mean
from atoll.tensors.outer import OuterRule, initial_state, mix, outer_step

NUMEL = 1003  # no multiple of any vector width


def gradients(count: int, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(numel, generator=generator) for _ in range(count)]
    made[0][:2] = torch.tensor([-0.0, 0.0])[:numel]
    return made


def start(numel: int) -> Tensor:
    theta = torch.linspace(-1.0, 1.0, numel)
    theta[:2] = -0.0  # under a gradient of -0.0 and 0.0: the sign of zero tells whether the first step adds to zeros
    return theta


def run(rule: OuterRule, deltas: list[Tensor]) -> list[Tensor]:
    theta, state = start(deltas[0].numel()), initial_state(rule, deltas[0].numel())
    seen = []
    for delta in deltas:
        theta, state = outer_step(theta, delta, state, rule)
        seen.append(theta)
    assert state.count == len(deltas)
    return seen


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)  # torch.equal takes -0.0 for 0.0


def test_the_outer_gradient_is_before_minus_after_so_a_step_of_one_lands_on_after() -> None:
    before, after = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
    theta, _ = outer_step(before, before - after, initial_state(OuterRule("sgd", 1.0), 2), OuterRule("sgd", 1.0))
    assert torch.equal(theta, after)


def test_sgd_with_rate_one_is_federated_averaging() -> None:
    before = torch.zeros(2)
    after = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])]
    delta = mean([before - a for a in after], [1.0, 3.0])
    theta, _ = outer_step(before, delta, initial_state(OuterRule("sgd", 1.0), 2), OuterRule("sgd", 1.0))
    assert torch.equal(theta, mean(after, [1.0, 3.0]))


@pytest.mark.parametrize("rate", [1.0, 0.7])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("sgd", {}), ("momentum", {"momentum": 0.9}), ("nesterov", {"momentum": 0.9, "nesterov": True})],
)
def test_every_bit_is_that_of_torch_sgd(optimizer: str, options: dict[str, float | bool], rate: float) -> None:
    deltas = gradients(6)
    parameter = nn.Parameter(start(NUMEL))
    theirs = torch.optim.SGD([parameter], lr=rate, **options)
    for ours, delta in zip(run(OuterRule(optimizer, rate), deltas), deltas, strict=True):
        parameter.grad = delta.clone()
        theirs.step()
        assert torch.equal(bits(ours), bits(parameter.detach()))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_a_flat_vector_steps_as_its_tensors_would_one_by_one(optimizer: str) -> None:
    deltas = gradients(3)
    whole = run(OuterRule(optimizer, 0.7), deltas)[-1]
    rule = OuterRule(optimizer, 0.7)
    theta = start(NUMEL)
    parts = []
    for part in (slice(0, 5), slice(5, 700), slice(700, NUMEL)):
        piece, state = theta[part], initial_state(rule, theta[part].numel())
        for delta in deltas:
            piece, state = outer_step(piece, delta[part], state, rule)
        parts.append(piece)
    assert torch.equal(bits(torch.cat(parts)), bits(whole))


def dumb_delayed_nesterov(theta: float, gs: list[float], lr: float, mu: float, n: int, c: float) -> list[float]:
    """docs/reference/arithmetic.md, "Outer step", on one number."""
    b = d = 0.0
    seen = []
    for t, g in enumerate(gs, start=1):
        d += g
        if t % n == 0:
            b = mu * b + d / n
            theta -= lr * ((1 - c * n + c) * mu * b + g / n)
            d = 0.0
        else:
            theta -= lr * (c * mu * b + g / n)
        seen.append(theta)
    return seen


@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize("c", [0.0, 0.25])
def test_delayed_nesterov_agrees_with_the_scalar_reference(delay: int, c: float) -> None:
    deltas = gradients(9, 5)
    seen = torch.stack(run(OuterRule("delayed_nesterov", 0.7, 0.9, delay, c), deltas))
    for element in range(5):
        first = start(5)[element].item()
        reference = dumb_delayed_nesterov(first, [d[element].item() for d in deltas], 0.7, 0.9, delay, c)
        assert seen[:, element].tolist() == pytest.approx(reference, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("c", [0.0, 0.5])
def test_delayed_nesterov_without_delay_is_nesterov(c: float) -> None:
    deltas = gradients(6)
    delayed, plain = run(OuterRule("delayed_nesterov", 0.7, 0.9, 1, c), deltas), run(OuterRule("nesterov", 0.7), deltas)
    assert all(torch.allclose(one, two, rtol=1e-6, atol=1e-6) for one, two in zip(delayed, plain, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "delayed_nesterov"])
def test_a_step_changes_none_of_its_arguments_and_shares_no_memory_with_them(optimizer: str) -> None:
    rule = OuterRule(optimizer, 0.7, delay=2, c=0.1)
    theta, state = torch.ones(4), initial_state(rule, 4)
    for delta in gradients(4, 4):
        given_ = [t for t in (theta, delta, state.momentum, state.pending) if t is not None]
        before = [t.clone() for t in given_]
        following, next_state = outer_step(theta, delta, state, rule)
        assert all(torch.equal(bits(one), bits(two)) for one, two in zip(given_, before, strict=True))
        assert following.data_ptr() != theta.data_ptr() and next_state.count == state.count + 1
        if next_state.momentum is not None:
            assert next_state.momentum.data_ptr() != delta.data_ptr()
        theta, state = following, next_state


def test_the_initial_state_holds_what_the_rule_keeps() -> None:
    kept = {
        name: [t is not None for t in (state.momentum, state.pending)]
        for name in ("sgd", "momentum", "nesterov", "delayed_nesterov")
        for state in [initial_state(OuterRule(name, 0.7), 3)]
    }
    assert kept == {
        "sgd": [False, False],
        "momentum": [True, False],
        "nesterov": [True, False],
        "delayed_nesterov": [True, True],
    }


def test_an_unknown_optimizer_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        initial_state(OuterRule("adam", 0.7), 3)
    with pytest.raises(AssertionError, match="unknown outer optimizer 'adam'"):
        outer_step(torch.ones(1), torch.ones(1), initial_state(OuterRule("sgd", 0.7), 1), OuterRule("adam", 0.7))


def test_mix_at_the_ends_takes_the_bits_of_one_side_whatever_the_other_holds() -> None:
    odd, nan = torch.tensor([-0.0, 1e-45, 3.3]), torch.full((3,), math.nan)
    assert torch.equal(bits(mix(nan, odd, 0.0)), bits(odd))
    assert torch.equal(bits(mix(odd, nan, 1.0)), bits(odd))
    assert mix(nan, odd, 0.0).data_ptr() != odd.data_ptr()


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(0, 1))
def test_mix_is_alpha_local_plus_the_rest_global(local: float, global_: float, alpha: float) -> None:
    mixed = mix(torch.tensor([local]), torch.tensor([global_]), alpha)
    assert mixed.item() == pytest.approx(alpha * local + (1 - alpha) * global_, rel=1e-5, abs=1e-5)
