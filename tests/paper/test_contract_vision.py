"""The contract's clauses on buffers and optimiser state, on a model full of them: a small ResNet on scikit-learn's digits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Run, Sent, tensors_in
from torch import Tensor, nn

from atoll.chaos import ChaosPlan, Kill
from atoll.codecs import codec
from atoll.config import Config, load
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import InnerStep, StateTransfer, StepDone
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task
from atoll.tensors.access import named_tensors

ROUND = 3


def config_of(preset: str, *, learners: int = 2, total_steps: int = 3 * ROUND, **sections: Any) -> Config:
    protocol = {"local_steps_per_round": 1 if preset == "ddp" else ROUND} | sections.pop("protocol", {})
    if preset == "decoupled":
        protocol = {"fragments": 4, "overlap": 1} | protocol
    if preset == "streaming":
        protocol = {"layers_per_fragment": 2, "fragments": 3, "overlap": 1} | protocol
    inner = {"learning_rate": 0.01, "warmup_share": 0.0, "schedule": "constant"} | sections.pop("inner", {})
    data = {"corpus": "digits", "batch_size": 8, "heldout_batches": 4} | sections.pop("data", {})
    model = {"name": "resnet18", "numbers": {"width": 4, "depth": 1}}
    top = {"learners": learners, "total_steps": total_steps, "protocol": protocol, "inner": inner, "data": data, "model": model}
    return load(preset_name=preset, overrides=top | sections)


def run_of(preset: str, plan: ChaosPlan | None = None, **sections: Any) -> Run:
    config = config_of(preset, **sections)
    return Run(config, plan=plan, task=task_for(config))


def params_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def reference(task: Task, rounds: int, learners: int) -> nn.Module:
    """DiLoCo as a dumb loop over plain torch. Buffers are the round's plain mean; the outer optimiser never sees them."""
    theta_model = task.build()
    theta = params_of(theta_model).requires_grad_()
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    models = [task.build() for _ in range(learners)]
    inner = [torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01) for m in models]
    for r in range(rounds):
        deltas = []
        for m, model in enumerate(models):
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            for name, buffer in model.named_buffers():
                buffer.copy_(dict(theta_model.named_buffers())[name])
            model.train()
            for step in range(ROUND):
                images, labels = task.batch(m, m, r * ROUND + step)
                F.cross_entropy(model(images), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner[m].step()
                inner[m].zero_grad(set_to_none=True)
            deltas.append(theta.detach() - params_of(model))
        theta.grad = torch.stack(deltas).mean(0)
        outer.step()
        for name, buffer in theta_model.named_buffers():
            mean = torch.stack([dict(m.named_buffers())[name].double() for m in models]).mean(0)
            buffer.copy_(mean.round() if not buffer.is_floating_point() else mean)
    nn.utils.vector_to_parameters(theta.detach(), theta_model.parameters())
    return theta_model


def theta_of(run: Run) -> nn.Module:
    return run.task.model_of(*run.executor.disk.theta())


def test_whole_run_is_that_of_a_plain_loop_with_convolutions_and_batch_norm() -> None:
    """Inner optimiser state persists per logical learner; floating buffers are merged without momentum."""
    run = run_of("diloco")
    found, expected = theta_of(run), reference(run.task, 3, 2)
    torch.testing.assert_close(params_of(found), params_of(expected), rtol=1e-4, atol=1e-5)
    for name, buffer in buffers_of(expected).items():
        torch.testing.assert_close(buffers_of(found)[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
    assert any("running_var" in name for name in buffers_of(found))


def last_sent(run: Run) -> list[Sent]:
    return sorted((s for s in run.contributions() if s.body.outer_step == 3 * ROUND), key=lambda s: s.envelope.sender)


@pytest.mark.parametrize("preset", ["diloco", "fedavg"])
def test_matched_runs_merge_buffers_alike_whatever_the_outer_optimiser(preset: str) -> None:
    """Floating buffers (batch-norm statistics) are merged with the same weights but no momentum."""
    run = run_of(preset, protocol={"aggregation_weighting": "num_samples"}, data={"samples_by_learner": [4, 12]})
    (fragment,) = run.task.layout.fragments
    one, two = (s.payload.content[1] for s in last_sent(run))
    merged = run.executor.disk.newest()[0].buffers
    for slot in fragment.buffers:
        part = slice(slot.offset, slot.offset + slot.numel)
        if slot.kind == "float_buffer":
            torch.testing.assert_close(merged[part], 0.25 * one[part] + 0.75 * two[part], msg=slot.name)
        else:
            assert slot.name.endswith("num_batches_tracked") and int(merged[slot.offset]) == 3 * ROUND
    assert all(bool((v > 0).all()) for name, v in buffers_of(theta_of(run)).items() if "running_var" in name)


def test_matched_fedavg_and_diloco_have_the_same_steps_data_and_rounds() -> None:
    """With lr 1.0 and the same weights this is FedAvg: the two recipes differ in the outer step alone."""
    runs = [run_of(preset) for preset in ("fedavg", "diloco")]
    drawn = [[(e.stream, e.batch) for e in run.effects(InnerStep)] for run in runs]
    assert sorted(drawn[0]) == sorted(drawn[1])
    assert [len(run.contributions()) for run in runs] == [6, 6]
    firsts = [[s.payload.content[0] for s in run.contributions() if s.body.outer_step == ROUND] for run in runs]
    for one, other in zip(*firsts, strict=True):
        assert torch.equal(codec("fp32").decode(one), codec("fp32").decode(other))  # until then nothing differs
    assert runs[0].digest() != runs[1].digest()


def test_accumulated_micro_batches_move_the_statistics_and_do_not_count_towards_h() -> None:
    """H counts completed optimiser steps, not accumulation micro-batches; batch norm sees each of those."""
    run = run_of("diloco", inner={"accumulate": 2})
    learner = run.executor.learners[0]
    (steps,) = {int(s["step"]) for s in learner.optimizer.state.values()}
    assert steps == 3 * ROUND
    assert int(learner.model.stem_norm.num_batches_tracked) == 2 * 3 * ROUND  # type: ignore[union-attr, arg-type]
    assert [s.body.local_step for s in run.contributions() if s.envelope.sender == 0] == [3, 6, 9]


@pytest.mark.parametrize("preset", ["diloco", "fedavg", "streaming", "decoupled", "ddp"])
def test_statistics_travel_in_fp32_and_nothing_of_the_inner_optimiser_does(preset: str) -> None:
    """Inner optimiser state never appears in a message to the syncer; buffers travel in fp32 with their module's fragment."""
    run = run_of(preset, ChaosPlan((Kill(3.4, 1, 2.0),)), learners=3)
    for fragment in run.task.layout.fragments:
        owners = {slot.name.rpartition(".")[0] for slot in fragment.params}
        assert {slot.name.rpartition(".")[0] for slot in fragment.buffers} <= owners
    assert sum(f.buffer_numel for f in run.task.layout.fragments) == sum(b.numel() for b in theta_of(run).buffers())
    up = codec(run.config.protocol.codec_up)
    assert len(run.contributions()) >= 3
    for s in run.to_syncer():
        if s.payload is not None:
            fragment = run.task.layout.fragments[s.body.fragment]
            packet, buffers = s.payload.content
            assert buffers.dtype == torch.float32 and buffers.numel() == fragment.buffer_numel
            assert s.payload.nbytes == up.nbytes(fragment.numel) + 4 * buffers.numel()
            assert packet.nbytes == up.nbytes(fragment.numel)
    assert all(s.envelope.receiver != SYNCER for s in run.sent if isinstance(s.body, StateTransfer))


def test_recovery_brings_moments_of_convolutions_and_statistics_from_a_peer() -> None:
    """... except learner to learner in recovery (invariant 4)."""
    run = run_of("decoupled", ChaosPlan((Kill(4.4, 2, 2.0),)), learners=3, total_steps=24)
    (transfer,) = [s for s in run.sent if isinstance(s.body, StateTransfer)]
    content = transfer.payload.content
    assert any(moment.dim() == 4 for moment in tensors_in(content["optimizer"]))
    assert content["tensors"].keys() == named_tensors(run.task.build()).keys()
    assert int(content["tensors"]["stem_norm.num_batches_tracked"]) > 0


def test_learners_that_take_turns_in_one_process_keep_their_own_statistics() -> None:
    """... also when logical learners outnumber processes and take turns: the order of turns changes nothing."""
    clusters = ({"step_noise": 0.0}, {"step_noise": 0.3, "slow_share": 0.5, "slow_factor": 2.0})
    even, uneven = (run_of("diloco", learners=5, total_steps=2 * ROUND, cluster=cluster) for cluster in clusters)
    turns = [[w for _, w, e, _ in run.log if isinstance(e, StepDone)] for run in (even, uneven)]
    assert turns[0] != turns[1] and even.digest() == uneven.digest()
    states = [tensors_in(run.executor.learners[m].state()["optimizer"]) for m in range(5) for run in (even, uneven)]
    for one, other in zip(states[::2], states[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(not torch.equal(a[1], b[1]) for a, b in pairwise(states[::2]))


def test_evaluation_uses_the_merged_statistics_and_changes_none() -> None:
    """Held-out loss is that of Theta: its buffers are as the syncer merged them, before and after."""
    run = run_of("diloco")
    model = theta_of(run)
    before, measured = buffers_of(model), run.task.evaluate(model)
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers_of(model).items())
    assert measured == run.task.evaluate_theta(*run.executor.disk.theta())
    fresh = run.task.build()
    nn.utils.vector_to_parameters(params_of(model), fresh.parameters())
    assert run.task.evaluate(fresh) != measured  # the statistics are part of the model
