"""Experts: routed as Qwen3-MoE routes, balanced inside one batch, cut by fragments and trained decoupled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.config.models import SIZES, DecoderShape
from atoll.errors import ConfigError
from atoll.sim.run import run_virtual
from atoll.tasks.task import layout_for
from atoll.tasks.trained import open_trained
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.models.decoder import Decoder, build_decoder, build_model, language_model_loss, token_losses
from atoll.workload.models.moe import ExpertMlp, load_balancing_loss, route, run_experts

RECIPE = Path(__file__).parents[4] / "recipes" / "moe_tiny.toml"
SHAPE = DecoderShape(vocab=40, width=16, layers=2, heads=2, mlp=24, context=12, experts=5, top_k=2)


def some_batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(seed))


def token_by_token(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """The dumb reference: one token, one expert at a time."""
    rows = []
    for token in x:
        probabilities = (router @ token).softmax(0)
        best = probabilities.argsort(descending=True)[:top_k]
        weights = probabilities[best] / probabilities[best].sum()
        parts = [w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token))) for w, e in zip(weights, best, strict=True)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_experts_are_what_each_token_alone_would_go_through(top_k: int) -> None:
    chance = torch.Generator().manual_seed(1)
    x, router = torch.randn(23, 16, generator=chance), torch.randn(5, 16, generator=chance)
    router[3] = -10 * x.mean(0)  # seldom or never chosen: an empty group must be harmless
    gate, up = torch.randn(2, 5, 24, 16, generator=chance).unbind()
    weights = [x, router, gate, up, torch.randn(5, 16, 24, generator=chance)]
    ours, theirs = ([w.clone().requires_grad_() for w in weights] for _ in range(2))
    _, chosen, shares = route(ours[0], ours[1], top_k)
    found, wanted = run_experts(ours[0], chosen, shares, *ours[2:]), token_by_token(*theirs, top_k)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shares.sum(1), torch.ones(23))
    for result in (found, wanted):
        result.square().sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        assert one.grad is not None and two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-3 * float(two.grad.abs().max()) + 1e-6)


def test_several_learners_experts_run_as_groups_of_one_product() -> None:
    """What a fleet does: M x E experts, each learner's tokens sent to its own."""
    layers = [build_decoder(SHAPE, seed).blocks[0].mlp for seed in range(2)]
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))
    routed = [route(x[m], layer.router.weight, 2) for m, layer in enumerate(layers)]
    chosen = torch.cat([r[1] + 5 * m for m, r in enumerate(routed)])
    stacked = [torch.cat([getattr(layer, name) for layer in layers]) for name in ("gate", "up", "down")]
    together = run_experts(x.flatten(0, 1), chosen, torch.cat([r[2] for r in routed]), *stacked)
    alone = torch.cat([layer(x[m : m + 1])[0][0] for m, layer in enumerate(layers)])
    torch.testing.assert_close(together, alone)


def test_load_balancing_loss_is_one_when_even_and_grows_with_the_share_of_the_chosen() -> None:
    even = torch.full((8, 4), 0.25)
    in_turn = torch.arange(8)[:, None] % 2 * 2 + torch.arange(2)
    assert load_balancing_loss(even, in_turn).item() == pytest.approx(1.0)
    one_pair = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(8, 4)
    assert load_balancing_loss(one_pair, torch.tensor([[0, 1]]).expand(8, 2)).item() == pytest.approx(4 / 2)


def test_training_loss_has_the_balance_term_and_held_out_loss_has_not() -> None:
    model, batch = build_decoder(SHAPE, 0), some_batch()
    logits, balance = model(batch[:, :-1], with_balance=True)
    plain = token_losses(logits.flatten(0, 1), batch[:, 1:].flatten()).mean()
    assert language_model_loss(model, batch).item() == pytest.approx((plain + 0.01 * balance).item(), rel=1e-6)
    by_block = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _, __, found: by_block.append(found[1].item()))
    model(batch[:, :-1])
    assert balance.item() == pytest.approx(sum(by_block) / 2)
    wanted = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert heldout_loss(model, [batch]) == pytest.approx(wanted, rel=1e-6)


class Wrapper(torch.nn.Module):
    """Hides a model as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor, **named: bool) -> Tensor:
        found: Tensor = self.module(*inputs, **named)
        return found


def test_wrapped_or_compiled_model_keeps_its_balance_term() -> None:
    """In bf16, the only type in which torch traces a grouped product."""
    model, batch = build_decoder(SHAPE, 0).bfloat16(), some_batch()
    alone = language_model_loss(model, batch).item()
    compiled = torch.compile(model, backend="eager")
    for hidden in (Wrapper(model), compiled, Wrapper(compiled)):
        assert language_model_loss(hidden, batch).item() == pytest.approx(alone, rel=1e-4), "the balance term is 2e-3 of it"


def test_balance_loss_reaches_the_router_and_its_weight_is_a_number() -> None:
    grads = []
    for balance in (0.0, 10.0):
        model = build_model("decoder", dict(SIZES["moe_nano"], vocab=40, balance=balance), 0)
        language_model_loss(model, some_batch()).backward()
        assert isinstance(model, Decoder) and isinstance(model.blocks[0].mlp, ExpertMlp)
        grad = model.blocks[0].mlp.router.weight.grad
        assert grad is not None
        grads.append(grad)
    assert (grads[0] - grads[1]).abs().max() > 1e-4


def test_shared_experts_are_one_wider_mlp_for_every_token() -> None:
    model = build_model("decoder", dict(SIZES["moe_nano"], vocab=40, shared=2), 0)
    assert model.get_parameter("blocks.0.mlp.shared.gate.weight").shape == (64, 32)
    language_model_loss(model, some_batch()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_moe_35m_uses_as_many_parameters_a_token_as_the_dense_35m() -> None:
    def parameters(name: str) -> int:
        shape = DecoderShape(**SIZES[name], vocab=32_768)  # type: ignore[arg-type]
        size = shape.width * shape.mlp * 3 * shape.layers
        matrices = 4 * shape.width**2 * shape.layers + shape.vocab * shape.width
        return int(matrices + size * (shape.top_k if shape.experts else 1))

    assert parameters("moe_35M") == pytest.approx(parameters("35M"), rel=0.01)


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"top_k": 1}, "key model.numbers.top_k = 1 of model.numbers.experts = 4: must be 2 to the number of experts"),
        ({"top_k": 5}, "key model.numbers.top_k = 5 of model.numbers.experts = 4: must be 2 to the number of experts"),
        ({"mlp": 20}, "key model.numbers.mlp = 20: must be a multiple of 8 in a model with experts"),
        ({"balance": -0.5}, "key model.numbers.balance = -0.5: must be at least 0"),
        ({"balance": True}, "key model.numbers.balance = True: must be a number"),
        ({"experts": -1}, "key model.numbers.experts = -1: must be at least 0"),
        ({"experts": 2.0}, "key model.numbers.experts = 2.0: must be a whole number"),
        ({"experts": 0, "top_k": 3}, "key model.numbers.top_k = 3: is for a model with experts, and model.numbers.experts is 0;"),
        ({"experts": 0, "shared": 1}, "key model.numbers.shared = 1: is for a model with experts"),
        ({"experts": 0, "balance": 0.0}, "key model.numbers.balance = 0.0: is for a model with experts"),
    ],
)
def test_wrong_numbers_of_experts_are_refused(numbers: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model("decoder", dict(SIZES["moe_nano"], vocab=40) | numbers, 0)
    assert str(caught.value).startswith(sentence)


def test_usual_numbers_of_experts_do_no_harm_in_a_dense_model() -> None:
    build_model("decoder", dict(SIZES["moe_nano"], vocab=40) | {"experts": 0, "shared": 0, "balance": 0.01}, 0)


@pytest.mark.parametrize(("pattern", "fragments"), [("sub_tensor", 24), ("balanced", 12), ("layer", 3), ("tensor", 10)])
def test_fragments_cover_every_row_of_every_expert_once(pattern: str, fragments: int) -> None:
    config = load(RECIPE, assignments=[f"protocol.fragmentation={pattern}", f"protocol.fragments={fragments}"])
    model = build_model("decoder", dict(config.model.numbers, vocab=257), 0)
    seen: dict[str, list[int]] = {}
    for fragment in layout_for(config, model).fragments:
        for slot in fragment.params:
            seen.setdefault(slot.name, []).extend(range(slot.row_start, slot.row_stop))
    assert {name: sorted(rows) for name, rows in seen.items()} == {
        name: list(range(p.shape[0])) for name, p in model.named_parameters()
    }
    assert sorted(seen["blocks.3.mlp.down"]) == [0, 1, 2, 3], "four experts"


def test_recipe_trains_decoupled_and_merges_work_on_every_expert(tmp_path: Path) -> None:
    """Without weight decay a weight that was sent no token has no reason to move."""
    changes = ["total_steps=36", "learners=2", "model.numbers.layers=2", "data.max_bytes=300000", "data.heldout_batches=4"]
    config = load(RECIPE, assignments=[*changes, "inner.learning_rate=0.01", "inner.weight_decay=0"])
    run = run_virtual(config, ChaosPlan(), tmp_path, tensors=True)
    assert run.loss_first is not None and run.loss_final is not None
    assert run.loss_final < 0.75 * run.loss_first
    theta = dict(open_trained(tmp_path).model.named_parameters())
    first = dict(build_model("decoder", dict(config.model.numbers, vocab=257, context=32), config.seed).named_parameters())
    for name, weight in theta.items():
        if weight.dim() == 3:
            moved = (weight - first[name]).abs().flatten(1).amax(dim=1)
            assert moved.shape == (4,) and (moved > 1e-4).all(), name
