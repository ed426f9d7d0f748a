"""Muon steps hidden matrices by an orthogonal factor and everything else as AdamW would."""

from __future__ import annotations

import copy

import pytest
import torch

from atoll.config import load
from atoll.executor.optim.build import build_optimizer, turned_names
from atoll.executor.optim.muon import Muon, factors, reach
from atoll.tasks.task import language_task


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


def test_matrices_go_as_torchs_muon_and_the_rest_as_torchs_adamw() -> None:
    ours = [torch.nn.Parameter(rand(12, 20)), torch.nn.Parameter(rand(20))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.01, "weight_decay": 0.1}
    mine = Muon(ours, ours[:1], momentum=0.9, betas=(0.9, 0.95), **settings)
    others: list[torch.optim.Optimizer] = [
        torch.optim.Muon(theirs[:1], momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW(theirs[1:], betas=(0.9, 0.95), **settings),
    ]
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = rand(*p.shape, seed=step + 1)
            q.grad = p.grad.clone()
        mine.step()
        for optimizer in others:
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-3)  # theirs turns in bf16
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-7)


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
