"""Muon steps hidden matrices by an orthogonal factor and everything else as AdamW would."""

from __future__ import annotations

import copy

import pytest
import torch

from atoll.config import load
from atoll.executor.optim import muon
from atoll.executor.optim.build import build_optimizer, turned_names
from atoll.executor.optim.muon import MuonWithAdamW, factors, reach
from atoll.tasks.task import language_task

SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (3, 16, 40)])
def test_a_factor_keeps_the_directions_of_its_matrix_and_evens_their_strength(shape: tuple[int, ...]) -> None:
    u, s, v = torch.linalg.svd(rand(*shape), full_matrices=False)
    strengths = torch.linspace(0.1, 1.0, s.shape[-1])
    (found,) = factors([7.0 * (u * strengths) @ v])
    evened = u.mT @ found @ v.mT
    values = evened.diagonal(dim1=-2, dim2=-1)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    torch.testing.assert_close(evened, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_a_step_is_as_large_as_adamws() -> None:
    for shape in ((64, 64), (32, 128), (128, 32)):
        size = (reach(*shape) * factors([rand(*shape)])[0]).square().mean().sqrt()
        assert 0.1 < float(size) < 0.3


def pair(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    ours = [torch.nn.Parameter(rand(*shape)) for shape in shapes]
    return ours, [torch.nn.Parameter(p.detach().clone()) for p in ours]


def torchs(params: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in params if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **SETTINGS),
        torch.optim.AdamW([p for p in params if p.dim() != 2], betas=(0.9, 0.95), fused=True, **SETTINGS),
    ]


def wrapped(params: list[torch.nn.Parameter], adam_rate: float = 1.0) -> MuonWithAdamW:
    matrices = [p for p in params if p.dim() > 1]
    return MuonWithAdamW(params, matrices, momentum=0.9, betas=(0.9, 0.95), adam_rate=adam_rate, **SETTINGS)


def walk(params: list[torch.nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for number, p in enumerate(params):
            p.grad = rand(*p.shape, seed=10 * number + step + 1)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            optimizer.step()


def test_matrices_go_as_torchs_muon_and_the_rest_as_torchs_adamw() -> None:
    ours, theirs = pair((12, 20), (20,), (20, 12))
    mine, others = wrapped(ours), torchs(theirs)
    walk(ours, [mine], range(5))
    walk(theirs, others, range(5))
    for at in (0, 2):
        torch.testing.assert_close(ours[at], theirs[at], rtol=0, atol=6e-3)  # theirs turns in bf16, ours on a CPU in fp32
        assert torch.equal(mine.state[ours[at]]["momentum_buffer"], others[0].state[theirs[at]]["momentum_buffer"])
    assert torch.equal(ours[1], theirs[1])


def test_the_rest_steps_at_a_rate_of_its_own() -> None:
    """Three times the rate of the matrices, at every rate that the schedule sets; decay goes with it."""
    ours, theirs = pair((12, 20), (20,))
    mine, others = wrapped(ours, adam_rate=3.0), torchs(theirs)
    walk(ours, [mine], range(5))
    for step in range(5):
        for number, p in enumerate(theirs):
            p.grad = rand(*p.shape, seed=10 * number + step + 1)
        for optimizer, times in zip(others, (1.0, 3.0), strict=True):
            optimizer.param_groups[0]["lr"] = times * (0.01 * (step + 1))
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=6e-3)
    assert torch.equal(ours[1], theirs[1])
    again = wrapped(ours, adam_rate=3.0)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    before = ours[1].detach().clone()
    walk(ours, [again], range(5, 6))
    moved = ours[1].detach().clone()
    with torch.no_grad():
        ours[1].copy_(before)
    walk(ours, [mine], range(5, 6))
    assert torch.equal(ours[1], moved), "a loaded state has the rate too"


def test_large_matrices_go_through_torchs_muon_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "goes_alone", lambda p: p.dim() == 2)  # as on a GPU
    ours, theirs = pair((12, 20), (20,), (20, 12))
    mine, others = wrapped(ours), torchs(theirs)
    walk(ours, [mine], range(3))
    again = wrapped(ours)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    walk(ours, [again], range(3, 5))
    walk(theirs, others, range(5))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    again.state.clear()
    walk(ours, [again], range(5, 6))
    walk(theirs, torchs(theirs), range(5, 6))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True)), "a cleared state starts anew"


def test_matrices_of_a_stack_step_each_as_alone() -> None:
    stack, single = pair((3, 12, 20))[0], pair((12, 20), (12, 20), (12, 20))[0]
    with torch.no_grad():
        for p, matrix in zip(single, stack[0], strict=True):
            p.copy_(matrix)
    together, apart = wrapped(stack), wrapped(single)
    for step in range(3):
        stack[0].grad = rand(3, 12, 20, seed=step)
        for p, grad in zip(single, stack[0].grad, strict=True):
            p.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stack[0].detach(), torch.stack([p.detach() for p in single]), rtol=1e-5, atol=1e-6)


def test_state_of_either_kind_continues_as_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner on a CPU recovers from one on a GPU: the momentum means the same to both."""
    ours, theirs = pair((12, 20), (20,))
    batched = wrapped(ours)
    walk(ours, [batched], range(2))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            q.copy_(p)
    monkeypatch.setattr(muon, "goes_alone", lambda p: p.dim() == 2)
    alone = wrapped(theirs)
    alone.load_state_dict(copy.deepcopy(batched.state_dict()))
    walk(ours, [batched], range(2, 4))
    walk(theirs, [alone], range(2, 4))
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=6e-3)
    assert torch.equal(ours[1], theirs[1])
    assert set(alone.state[theirs[0]]) == {"momentum_buffer"} == set(batched.state[ours[0]])


def test_embeddings_heads_and_vectors_are_not_turned() -> None:
    config = load(preset_name="decoupled", overrides={"learners": 2, "inner": {"optimizer": "Muon"}})
    task = language_task(config)
    turned = turned_names(config, task.layout.fragments)
    names = {n for n, _ in task.build().named_parameters()}
    assert {n for n in names if n.endswith(("q.weight", "o.weight", "gate.weight", "down.weight"))} <= turned
    assert not any("embedding" in n or "head" in n or "norm" in n for n in turned)


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    config = load(preset_name="decoupled", overrides={"learners": 2, "inner": {"optimizer": "Muon"}})
    task = language_task(config)

    def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for number, p in enumerate(model.parameters()):
                p.grad = rand(*p.shape, seed=10 * number + step)
            optimizer.step()

    models = [task.build() for _ in range(2)]
    first, second = (build_optimizer(config, dict(m.named_parameters()), task.layout.fragments) for m in models)
    take(models[0], first, range(2))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take(models[0], first, range(2, 4))
    take(models[1], second, range(2, 4))
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
