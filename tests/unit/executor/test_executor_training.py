"""Inner steps, what goes up the wire, and how it is merged: every choice of the config runs and does what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from small_runs import Batch, Run, configured, draw, finite, mlp, run, same, small_task_for, squared_error
from torch import Tensor

from atoll.codecs import encode_with_feedback
from atoll.config import load
from atoll.errors import ConfigError
from atoll.executor.learner import TensorLearner
from atoll.executor.null import batch_size
from atoll.ids import SYNCER, WorkerId
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import DUE
from atoll.protocol.vocabulary import NO_VERSION, Adopt, Effect, InnerStep, Keep, Stage, StepDone
from atoll.rules import Schedule, tokens_per_step_max
from atoll.store.versions import MemoryVersions
from atoll.tasks.task import initial_versions, language_task
from atoll.tensors.access import named_tensors, read_params

# ---------------------------------------------------------------- inner steps


def test_accumulation_counts_optimiser_steps_and_draws_every_micro_batch_once() -> None:
    drawn: Counter[tuple[int, int, int]] = Counter()

    def counted(learner: int, stream: int, position: int) -> Batch:
        drawn[learner, stream, position] += 1
        return draw(learner, stream, position)

    found = run(configured("diloco", total_steps=8, inner={"accumulate": 3}), batch=counted)
    assert drawn == {(m, m, position): 1 for m in range(3) for position in range(24)}
    for learner in found.executor.learners.values():
        assert {int(state["step"]) for state in learner.optimizer.state.values()} == {8}
    assert [e.body.c_steps for e, _ in found.packets] == [4] * 6, "H counts optimiser steps"
    assert [e.body.c_samples for e, _ in found.packets] == [4 * 3 * 4] * 6


def test_accumulation_of_micro_batches_is_one_step_on_their_mean_loss() -> None:
    config = configured("diloco", inner={"accumulate": 2})
    learner = alone(config)
    (done,) = learner.execute(InnerStep(1, 0, 3, 0), None)
    model = mlp()
    halves = [squared_error(model, draw(0, 0, position)) for position in (6, 7)]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    ((halves[0] / 2) + (halves[1] / 2)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = 3e-3 * (1 / (0.05 * 12 + 1))
    optimizer.step()
    assert isinstance(done, StepDone) and (done.tokens, done.samples) == (8, 8)
    assert done.loss == pytest.approx(float((halves[0] + halves[1]).detach()) / 2)
    for name, value in learner.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-6, atol=1e-8), name


def test_accumulation_weighs_every_token_alike_where_micro_batches_differ_in_size() -> None:
    """Three samples of four in the first, one in the second: the step is that on the mean over all four."""
    def uneven(learner: int, stream: int, position: int) -> Batch:
        x, y = draw(learner, stream, position)
        return (x[:3], y[:3]) if position % 2 == 0 else (x[:1], y[:1])

    learner = alone(configured("diloco", inner={"accumulate": 2, "clip_norm": 0.0}), uneven)
    (done,) = learner.execute(InnerStep(1, 0, 3, 0), None)
    model = mlp()
    whole = tuple(torch.cat(parts) for parts in zip(uneven(0, 0, 6), uneven(0, 0, 7), strict=True))
    loss = squared_error(model, (whole[0], whole[1]))
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * (1 / (0.05 * 12 + 1)), betas=(0.9, 0.95), weight_decay=0.01)
    optimizer.step()
    assert isinstance(done, StepDone) and (done.tokens, done.samples) == (4, 4)
    assert done.loss == pytest.approx(float(loss.detach()))
    for name, value in learner.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-5, atol=1e-7), name


def test_learner_beyond_the_listed_ones_has_the_batch_that_its_books_say() -> None:
    for sizes in ([2, 2, 3], [8, 4, 4]):
        config = load(preset_name="decoupled", overrides={
            "learners": 3, "data": {"samples_by_learner": sizes, "batch_size": 4, "seq_len": 8, "max_bytes": 100_000},
        })  # fmt: skip
        task = language_task(config)
        for m in range(5):
            assert task.count(task.batch(m, 0, 7)) == batch_size(config, m)
            assert batch_size(config, m)[0] <= tokens_per_step_max(config)


def alone(config: Any, batch: Any = draw) -> TensorLearner:
    task = small_task_for(config, batch=batch)
    learner = TensorLearner(task, 0)
    for p, version in enumerate(MemoryVersions(initial_versions(task)).newest()):
        learner.execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced, version.buffers)))
        learner.execute(Adopt(p, 0, 0.0, False, DUE), None)
    return learner


@pytest.mark.parametrize("preserve", [True, False])
def test_adoption_keeps_or_resets_the_moments_of_its_fragment_and_of_no_other(preserve: bool) -> None:
    learner = alone(configured(inner={"preserve_optimizer_state": preserve}))
    tensors = named_tensors(learner.model)
    for step in (1, 2):
        learner.execute(InnerStep(step, 0, step, 0), None)
    names = [{slot.name for slot in fragment.params} for fragment in learner._fragments]
    before = {name: learner.optimizer.state[tensor]["exp_avg"].clone() for name, tensor in tensors.items()}
    learner.execute(Keep(1, 4, NO_VERSION), Payload("fragment", 0, (learner.anchors[1], torch.empty(0))))
    learner.execute(Adopt(1, 4, 0.0, True, DUE), None)
    kept = {name for name, tensor in tensors.items() if tensor in learner.optimizer.state}
    assert kept == (names[0] | names[1] if preserve else names[0])
    assert all(torch.equal(learner.optimizer.state[tensors[name]]["exp_avg"], before[name]) for name in kept)
    learner.execute(InnerStep(3, 0, 3, 0), None)
    counts = {name: int(learner.optimizer.state[tensor]["step"]) for name, tensor in tensors.items()}
    assert counts == {name: 3 if preserve or name in names[0] else 1 for name in counts}


# ---------------------------------------------------------------- the wire

UP = ["fp32", "bf16", "int8", "int4", "int2", "int1", "e3m0", "top_k:0.1", "random_drop:0.5"]


@pytest.mark.parametrize("up", UP)
def test_run_with_any_codec_up_trains_and_sends_the_bytes_the_codec_promises(up: str) -> None:
    found = run(configured(protocol={"codec_up": up}, total_steps=16))
    assert finite(found.theta()) and not same(found.theta(), mlp().state_dict())
    sizes = {(e.body.fragment, payload.nbytes) for e, payload in found.packets}
    coder = found.executor.learners[0]._codec
    assert sizes == {(p, coder.nbytes(f.numel)) for p, f in enumerate(found.executor.task.layout.fragments)}


def theta_with_rounding(seed: int, up: str) -> str:
    config = configured("diloco", seed=seed, protocol={"codec_up": up, "stochastic_rounding": True})
    return run(config).executor.disk.theta_sha256()


def test_only_what_is_pulled_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step boundary copies; the loop encodes while the next step runs."""
    encoded: list[int] = []

    def watched(c: Any, x: Tensor, residual: Tensor | None, **more: Any) -> Any:
        encoded.append(x.numel())
        return encode_with_feedback(c, x, residual, **more)

    monkeypatch.setattr("atoll.executor.learner.encode_with_feedback", watched)
    found = run(configured(total_steps=30, protocol={"error_feedback": True, "codec_up": "bf16", "fragments": 4}))
    assert 0 < len(encoded) == len(found.packets) < len(found.effects(Stage))


@pytest.mark.parametrize("up", ["int4", "e3m0"])
def test_stochastic_rounding_gives_the_same_theta_for_the_same_seed_only(up: str) -> None:
    """Model and batches do not depend on the seed here: what differs is the rounding."""
    first = theta_with_rounding(1, up)
    assert theta_with_rounding(1, up) == first
    assert theta_with_rounding(2, up) != first
    assert run(configured("diloco", seed=1, protocol={"codec_up": up})).executor.disk.theta_sha256() != first


def test_random_drop_keeps_the_same_elements_for_the_same_seed_only() -> None:
    first, again, other = (
        run(configured("diloco", seed=seed, protocol={"codec_up": "random_drop:0.5"})).executor.disk.theta_sha256()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("up", ["int1", "fp32", "bf16", "top_k:0.1", "random_drop:0.5"])
def test_stochastic_rounding_with_a_codec_that_has_none_is_refused_at_the_border(up: str) -> None:
    """Not in the middle of a run, when the first fragment is staged."""
    with pytest.raises(ConfigError, match="stochastic_rounding"):
        load(preset_name="diloco", overrides={"protocol": {"codec_up": up, "stochastic_rounding": True}})


# ---------------------------------------------------------------- merging


@pytest.mark.parametrize("norm", ["tensor", "row", "fragment"])
def test_run_with_rda_moves_theta_further_than_the_mean_of_nearly_orthogonal_updates(norm: str) -> None:
    """Data that has nothing in common but the model: a mean of three shrinks by about sqrt(3), RDA does not."""

    def noise(learner: int, stream: int, position: int) -> Batch:
        x, y = draw(learner, stream, position)
        return x, y.flip(0) * (1 - stream)

    def moved(merge: str) -> float:
        protocol = {"merge": merge, "merge_norm": norm}
        outer = {"outer_optimizer": "sgd", "outer_learning_rate": 1.0}
        found = run(configured("diloco", total_steps=4, protocol=protocol, outer=outer), batch=noise)
        (theta,), _ = found.executor.disk.theta()
        (start,), _ = MemoryVersions(initial_versions(found.executor.task)).theta()
        return float((theta - start).norm())

    assert moved("rda") > 1.1 * moved("mean")


def test_rda_run_of_one_learner_is_the_mean_run_bit_for_bit() -> None:
    thetas = [run(configured(learners=1, protocol={"merge": merge})).executor.disk.theta_sha256() for merge in ("rda", "mean")]
    assert thetas[0] == thetas[1]


# ---------------------------------------------------------------- FedPart


class Frozen(Run):
    """Compares each fragment of a learner before and after each of its inner steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.schedule = Schedule(self.executor.task.config)
        self.last: dict[WorkerId, list[Tensor]] = {}
        self.changed: list[tuple[set[int], set[int]]] = []

    def carried_out(self, worker: WorkerId, effect: Effect) -> None:
        if worker == SYNCER or not isinstance(effect, InnerStep | Adopt):
            return
        learner = self.executor.learners[worker]
        tensors = named_tensors(learner.model)
        now = [read_params(tensors, fragment) for fragment in learner._fragments]
        if isinstance(effect, InnerStep):
            ahead = next(t for t in range(effect.outer_step + 1, effect.outer_step + 99) if self.schedule.due(t))
            moved = {p for p, (a, b) in enumerate(zip(self.last[worker], now, strict=True)) if not torch.equal(a, b)}
            self.changed.append((moved, set(self.schedule.due(ahead))))
        self.last[worker] = now


@pytest.mark.parametrize("preset", ["streaming", "decoupled"])
def test_inner_step_under_freezing_changes_the_fragment_due_next_and_no_other(preset: str) -> None:
    protocol = {"fragmentation": "tensor", "fragments": 2, "freeze_not_due": True}
    found = Frozen(small_task_for(configured(preset, protocol=protocol, total_steps=16)))
    found.go()
    assert {frozenset(due) for _, due in found.changed} == {frozenset({0}), frozenset({1})}
    assert all(moved == due for moved, due in found.changed)
    assert not same(found.theta(), mlp().state_dict())
