"""A fleet trains as its learners would one by one: the same course, the same losses up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mostly_soak

from atoll.chaos import ChaosPlan, Kill
from atoll.config import Config, load
from atoll.config.models import DecoderShape
from atoll.errors import ConfigError
from atoll.executor.fleet.executor import FleetExecutor
from atoll.executor.virtual_run import TensorExecutor
from atoll.protocol.vocabulary import FixParticipants, StepDone
from atoll.sim.cluster import VirtualCluster
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.slices import SliceHardware
from atoll.tasks.task import initial_versions, language_task
from atoll.workload.models.decoder import build_decoder, language_model_loss
from atoll.workload.models.stacked import stacked_loss

CPU = torch.device("cpu")


def settings(preset: str = "decoupled", **sections: Any) -> Config:
    data = {"seq_len": 16, "batch_size": 4, "max_bytes": 200_000, "heldout_batches": 2} | sections.pop("data", {})
    protocol = {"fragments": 6, "local_steps_per_round": 6} | sections.pop("protocol", {})
    model = {"numbers": {"width": 16, "layers": 2, "heads": 2, "mlp": 32} | sections.pop("model", {}).get("numbers", {})}
    top = {"learners": 3, "total_steps": 12, "data": data, "protocol": protocol, "model": model}
    return load(preset_name=preset, overrides=top | sections)


DENSE = {"mlp": 24}
EXPERTS = {"mlp": 16, "experts": 4, "top_k": 2, "balance": 0.5}


@pytest.mark.parametrize("numbers", [
    DENSE, DENSE | {"tied": True}, EXPERTS, EXPERTS | {"shared": 1, "top_k": 3, "tied": True},
])  # fmt: skip
def test_stacked_decoder_is_the_decoder_learner_by_learner(numbers: dict[str, Any]) -> None:
    shape = DecoderShape(vocab=40, width=16, layers=2, heads=2, context=12, **numbers)
    models = [build_decoder(shape, seed) for seed in range(3)]
    batch = torch.randint(0, 40, (3, 5, 9), generator=torch.Generator().manual_seed(0))
    samples = torch.tensor([5, 3, 0])
    weights = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models]).requires_grad_()
        for name, _ in models[0].named_parameters()
    }
    losses = stacked_loss(shape, weights, batch, samples, models[0].cos, models[0].sin)
    assert losses[2] == 0, "who has no samples has no loss"
    for m, (model, count) in enumerate(zip(models[:2], (5, 3), strict=True)):
        alone = language_model_loss(model, batch[m, :count])
        assert losses[m].item() == pytest.approx(alone.item(), rel=1e-5)
        alone.backward()
    losses[:2].sum().backward()
    for name, weight in weights.items():
        for m in range(2):
            own = dict(models[m].named_parameters())[name].grad
            assert own is not None and weight.grad is not None
            torch.testing.assert_close(weight.grad[m], own, rtol=1e-4, atol=1e-6)


def both(config: Config, plan: ChaosPlan | None = None, chips: int = 0) -> tuple[list[object], list[object], float, float]:
    """The same virtual run with learners one by one and as a fleet: (rounds, rounds, loss, loss)."""
    task = language_task(config)
    found: list[tuple[list[object], float]] = []
    for executor in (TensorExecutor(task), FleetExecutor(task, CPU)):
        seen: list[object] = []

        def watch(now: int, worker: int, event: object, effects: object, seen: list[object] = seen) -> None:
            seen.extend(e for e in effects if isinstance(e, FixParticipants))  # type: ignore[attr-defined]
            if isinstance(event, StepDone):
                seen.append((worker, event.tokens, event.samples))

        hardware = SliceHardware(config, chips, FailureModel(mtbi_seconds=4e5, slice_chips=8), 1) if chips else None
        VirtualCluster(config, plan=plan, executor_for=executor, observers=[watch], hardware=hardware).run(until_seconds=1e5)
        found.append((seen, task.evaluate_theta(*executor.disk.theta())))
    return found[0][0], found[1][0], found[0][1], found[1][1]


UNEVEN_EXPERTS = {
    "model": {"numbers": {"mlp": 16, "experts": 4, "top_k": 2}}, "inner": {"optimizer": "Muon"},
    "data": {"samples_by_learner": [4, 2, 3]},
}  # fmt: skip


@pytest.mark.parametrize(
    "sections", mostly_soak([{}, {"inner": {"accumulate": 2}}, {"cluster": {"slow_share": 0.34, "slow_factor": 2.0}},
                 {"data": {"samples_by_learner": [4, 2, 3]}}, {"protocol": {"freeze_not_due": True}},
                 {"protocol": {"codec_up": "random_drop:0.3"}}, {"inner": {"optimizer": "Muon"}},
                 {"inner": {"optimizer": "Muon"}, "protocol": {"freeze_not_due": True}}, UNEVEN_EXPERTS],
                keep=[{}, {"inner": {"accumulate": 2}}, {"data": {"samples_by_learner": [4, 2, 3]}}, UNEVEN_EXPERTS])
)  # fmt: skip
def test_fleet_takes_the_same_course_to_the_same_loss(sections: dict[str, dict[str, object]]) -> None:
    alone, together, loss, fleet_loss = both(settings(**sections))
    assert alone == together
    assert fleet_loss == pytest.approx(loss, rel=2e-3)


@pytest.mark.parametrize("preset, protocol", [
    ("diloco", {}), ("async_diloco", {"overlap": 6}), ("streaming", {"fragments": 0}), ("decoupled_ramp", {"ramp": 0.4}),
    ("decoupled", {"quorum": "all", "adopt": "exact", "overlap_by_learner": [1, 2, 4]}),
])  # fmt: skip
def test_fleet_takes_the_course_of_every_preset(preset: str, protocol: dict[str, object]) -> None:
    alone, together, loss, fleet_loss = both(settings(preset, protocol=protocol))
    assert alone == together
    assert fleet_loss == pytest.approx(loss, rel=2e-3)


def apart(config: Config) -> float:
    """How far the two Thetas lie apart, as a share of the way that either has come."""
    task = language_task(config)
    ends = []
    for executor in (TensorExecutor(task), FleetExecutor(task, CPU)):
        VirtualCluster(config, executor_for=executor).run(until_seconds=1e5)
        ends.append(torch.cat(list(executor.disk.theta()[0])))
    start = torch.cat([version.theta for version in initial_versions(task)])
    return float((ends[0] - ends[1]).norm() / (ends[0] - start).norm())


@pytest.mark.parametrize("preset, sections", mostly_soak([
    ("decoupled", {}), ("decoupled", {"inner": {"preserve_optimizer_state": False}}),
    ("decoupled", {"inner": {"preserve_optimizer_state": False, "optimizer": "Muon", "adam_rate": 2.5}}),
    ("decoupled", {"inner": {"optimizer": "Muon", "adam_rate": 2.5}}),
    ("diloco", {"protocol": {"fragments": 1}, "inner": {"preserve_optimizer_state": False}}),
    ("decoupled", {"protocol": {"error_feedback": True, "codec_up": "int2"}}),
    ("async_diloco", {"protocol": {"overlap": 6, "error_feedback": True, "codec_up": "int2", "fragments": 1}}),
], keep=[
    ("decoupled", {"inner": {"preserve_optimizer_state": False, "optimizer": "Muon", "adam_rate": 2.5}}),
    ("decoupled", {"protocol": {"error_feedback": True, "codec_up": "int2"}}),
]))  # fmt: skip
def test_fleet_ends_with_the_same_theta(preset: str, sections: dict[str, dict[str, object]]) -> None:
    """A loss hardly tells a moment that should have been emptied, or a residual that was taken too late; the weights do."""
    assert apart(settings(preset, **sections)) < 0.01


def test_micro_batches_of_unequal_size_weigh_in_a_fleet_as_one_by_one() -> None:
    config = settings(data={"batch_size": 3}, inner={"accumulate": 2, "learning_rate": 0.01})
    _, together, loss, fleet_loss = both(config, chips=3 * 64)
    assert {row[2] for row in together if isinstance(row, tuple)} >= {5, 6}, "some pairs are of a smaller and a larger batch"
    assert fleet_loss == pytest.approx(loss, rel=1e-3)


def test_fleet_survives_kills_and_recoveries() -> None:
    alone, together, loss, fleet_loss = both(settings(total_steps=24), ChaosPlan((Kill(6.0, 1, 4.0), Kill(12.0, 2, 3.0))))
    assert alone == together
    assert fleet_loss == pytest.approx(loss, rel=5e-3)


def test_fleet_shrinks_batches_with_slices() -> None:
    alone, together, loss, fleet_loss = both(settings(data={"batch_size": 8}), chips=3 * 64)
    assert alone == together
    samples = {row[2] for row in together if isinstance(row, tuple)}
    assert min(samples) < 8, "some batches were smaller"
    assert fleet_loss == pytest.approx(loss, rel=5e-3)


def test_what_a_fleet_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset ddp: a fleet cannot run it"):
        FleetExecutor(language_task(load(preset_name="ddp")), CPU)
