"""The DiLoCo contract of docs/reference/arithmetic.md: every clause is at least one test that states it."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import tiny
import torch
import torch.nn.functional as F
from tiny import Run, batch_at, batch_norm_mlp, mlp, tensors_in, tiny_config, tiny_task
from torch import Tensor, nn

from atoll.chaos import ChaosPlan, Kill
from atoll.codecs import Packet, codec
from atoll.config import load, warnings
from atoll.errors import ConfigError
from atoll.executor.learner import TensorLearner
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import (
    Adopt,
    Contribution,
    Finished,
    InnerStep,
    Merge,
    Report,
    StateTransfer,
    StepDone,
    Store,
)  # fmt: skip
from atoll.workload.data.stream import Stream, TokenData

PRESETS = ["diloco", "fedavg", "async_diloco", "streaming", "decoupled", "ddp"]


def config_of(preset: str, **more):  # type: ignore[no-untyped-def]
    protocol = more.pop("protocol", {})
    protocol |= {"overlap": 4} if preset == "async_diloco" else {}
    protocol |= {"local_steps_per_round": 1} if preset == "ddp" else {}
    if preset in ("streaming", "decoupled"):
        protocol = {"fragmentation": "balanced", "fragments": 2, "overlap": 1} | protocol
    return tiny_config(preset, protocol=protocol, **more)


def inner_steps_taken(run: Run, learner: int) -> int:
    """By the optimiser's own count."""
    (count,) = {int(s["step"]) for s in run.executor.learners[learner].optimizer.state.values()}
    return count


# ---------------------------------------------------------------- H


def test_h_counts_optimiser_steps_and_not_accumulation_micro_batches() -> None:
    """H counts completed optimiser steps: not epochs, not batches, not accumulation micro-batches."""
    run = Run(tiny_config("diloco", inner={"accumulate": 3}))
    pulled = [s.body.local_step for s in run.contributions() if s.envelope.sender == 0]
    assert pulled == [4, 8, 12]
    assert inner_steps_taken(run, 0) == 12
    tokens = [e.tokens for _, w, e, _ in run.log if w == 0 and isinstance(e, StepDone)]
    assert tokens == [3 * 8 * 4] * 12  # three micro-batches of eight rows in each of twelve steps


def test_accumulated_micro_batches_are_consecutive_positions_of_the_stream() -> None:
    """Raw batches that do not trigger optimizer.step() do not increment H: but they are drawn, and never twice."""
    drawn: list[int] = []
    config = tiny_config("diloco", learners=1, total_steps=4, inner={"accumulate": 3})
    task = tiny_task(config)
    learner = TensorLearner(
        type(task)(**{**task.__dict__, "batch": lambda m, s, n: drawn.append(n) or batch_at(0, s, n, 8)}), 0
    )
    for step in range(4):
        learner.execute(InnerStep(step + 1, 0, step, 0), None)
    assert drawn == list(range(12))


def stream_of(tokens: int, seed: int, batch_size: int, seq_len: int) -> Stream:
    text = (torch.arange(tokens) * 7919 % 251).to(torch.int16)
    return Stream(TokenData(text, text[:100], 257, "made up"), seed, 2, batch_size, seq_len)


def test_learner_stops_after_exactly_h_in_mid_epoch() -> None:
    """A learner stops after exactly H, also in mid-epoch."""
    stream = stream_of(161, 0, batch_size=1, seq_len=16)  # ten windows for two learners: an epoch is five batches
    run = Run(tiny_config("diloco"))
    ends = [s.body.local_step for s in run.contributions() if s.envelope.sender == 0]
    assert ends == [4, 8, 12]
    for end in ends:  # the batches before and after the round's end are of one epoch
        assert stream.epoch_of(end - 1) == stream.epoch_of(end)
    assert stream.epoch_of(11) == 2


def test_no_extra_final_step_and_the_end_is_reported_stored_and_finished() -> None:
    """Normal clean-up, persistence, callbacks and reporting still run; no extra final optimiser step."""
    run = Run(tiny_config("diloco"))
    for m in (0, 1):
        assert inner_steps_taken(run, m) == 12
        reports = [s.body for s in run.to_syncer() if s.envelope.sender == m and isinstance(s.body, Report)]
        assert max(r.local_step for r in reports) == 12
        assert len(run.effects(Finished, of=m)) == 1
    assert [s.outer_step for s in run.effects(Store)] == [4, 8, 12]
    assert max(run.executor.disk.versions[0]) == 12


@pytest.mark.parametrize("preset", ["diloco", "fedavg", "streaming", "async_diloco"])
def test_every_interval_of_every_learner_is_exactly_h_steps(preset: str) -> None:
    """The client-local inner optimizer trains for exactly H local optimizer steps between synchronizations."""
    run = Run(config_of(preset))
    for m in (0, 1):
        for fragment in range(run.config.protocol.fragments):
            pulled = [s.body.local_step for s in run.contributions() if s.envelope.sender == m and s.body.fragment == fragment]
            assert len(pulled) >= 2
            assert {b - a for a, b in pairwise(pulled)} == {4}


# ---------------------------------------------------------------- data


def test_small_h_never_replays_the_first_batches() -> None:
    """Small H must not replay the same first batches: position advances across rounds."""
    run = Run(tiny_config("diloco", protocol={"local_steps_per_round": 2}))
    for m in (0, 1):
        drawn = [(s.stream, s.batch) for s in run.effects(InnerStep, of=m)]
        assert drawn == [(m, n) for n in range(12)]


def test_position_advances_across_restarts() -> None:
    """Its position advances across rounds and restarts."""
    run = Run(tiny_config("diloco", total_steps=24), plan=ChaosPlan((Kill(9.5, 1, 3.0),)))
    starts = [i for i, (_, w, e, _) in enumerate(run.log) if w == 1 and type(e).__name__ == "Started"]
    assert len(starts) == 2
    before = {(f.stream, f.batch) for _, w, _, fx in run.log[: starts[1]] if w == 1 for f in fx if isinstance(f, InnerStep)}
    after = [(f.stream, f.batch) for _, w, _, fx in run.log[starts[1] :] if w == 1 for f in fx if isinstance(f, InnerStep)]
    merged = {(1, n) for n in range(8)}  # rounds 4 and 8 were stored when it died at 9.5 s
    assert merged <= before
    assert not merged & set(after) and len(set(after)) == len(after) > 4


def test_data_is_a_function_of_seed_learner_and_position() -> None:
    """Each logical learner's data stream is a function of (seed, learner, position)."""
    first, again, other = (stream_of(2000, seed, 4, 16) for seed in (1, 1, 2))
    for position in (7, 0, 3):  # in any order
        assert torch.equal(first.batch(0, position), again.batch(0, position))
        assert not torch.equal(first.batch(0, position), first.batch(1, position))
        assert not torch.equal(first.batch(0, position), first.batch(0, position + 1))
        assert not torch.equal(first.batch(0, position), other.batch(0, position))


# ---------------------------------------------------------------- inner state


def reference_diloco(rounds: int, h: int, learners: int, *, persist: bool = True) -> Tensor:
    """The algorithm as a dumb loop over plain torch, with one AdamW per learner and torch's own Nesterov outside."""
    theta = nn.utils.parameters_to_vector(mlp().parameters()).detach().clone().requires_grad_()
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    models = [mlp() for _ in range(learners)]
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.01)  # noqa: E731
    inner = [make(m) for m in models]
    for r in range(rounds):
        deltas = []
        for m, model in enumerate(models):
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            inner[m] = inner[m] if persist else make(model)
            for step in range(h):
                x, y = batch_at(0, m, r * h + step, 8)
                F.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner[m].step()
                inner[m].zero_grad(set_to_none=True)
            deltas.append(theta.detach() - nn.utils.parameters_to_vector(model.parameters()).detach())
        theta.grad = torch.stack(deltas).mean(0)
        outer.step()
    return theta.detach()


def theta_of(run: Run) -> Tensor:
    model = run.task.model_of(*run.executor.disk.theta())
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_whole_run_is_that_of_a_plain_loop_with_one_persistent_optimiser_per_learner() -> None:
    """Inner optimiser and scheduler state persist per logical learner."""
    found = theta_of(Run(tiny_config("diloco")))
    torch.testing.assert_close(found, reference_diloco(3, 4, 2), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, reference_diloco(3, 4, 2, persist=False), rtol=1e-3, atol=1e-4)


def test_state_not_preserved_is_that_of_a_plain_loop_with_a_new_optimiser_each_round() -> None:
    """preserve_optimizer_state = true (default); false is allowed and not faithful."""
    found = theta_of(Run(tiny_config("diloco", inner={"preserve_optimizer_state": False})))
    torch.testing.assert_close(found, reference_diloco(3, 4, 2, persist=False), rtol=1e-5, atol=1e-6)


def test_scheduler_goes_on_across_rounds() -> None:
    """Inner ... scheduler state persist: the rate is a function of the global outer step and is not restarted by a round."""
    run = Run(tiny_config("diloco", inner={"schedule": "cosine", "final_share": 0.0}))
    rates = [run.executor.learners[m].optimizer.param_groups[0]["lr"] for m in (0, 1)]
    assert rates[0] == rates[1] < 0.01 * 0.05 * 12
    steps = [s.outer_step for s in run.effects(InnerStep, of=0)]
    assert steps == list(range(12))


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_of_the_inner_optimiser_is_ever_sent_to_the_syncer(preset: str) -> None:
    """Inner optimiser and scheduler state ... never appear in a message to the syncer."""
    run = Run(config_of(preset, learners=3, total_steps=24), batch_norm_mlp, ChaosPlan((Kill(6.4, 2, 2.0),)))
    transfers = [s for s in run.sent if isinstance(s.body, StateTransfer)]
    assert all(s.envelope.receiver != SYNCER for s in transfers)
    up = codec(run.config.protocol.codec_up)
    assert len(run.contributions()) > 4
    for s in run.to_syncer():
        if not isinstance(s.body, Contribution):
            assert s.payload is None
            continue
        fragment = run.task.layout.fragments[s.body.fragment]
        packet, buffers = s.payload.content
        assert isinstance(packet, Packet) and packet.nbytes == up.nbytes(fragment.numel)
        assert buffers.numel() == fragment.buffer_numel
        assert s.payload.nbytes == packet.nbytes + 4 * buffers.numel()  # and not a byte more


def test_inner_optimiser_state_does_travel_from_learner_to_learner_in_recovery() -> None:
    """... except learner to learner in recovery (invariant 4)."""
    run = Run(config_of("decoupled", learners=3, total_steps=40), plan=ChaosPlan((Kill(6.4, 2, 2.0),)))
    (transfer,) = [s for s in run.sent if isinstance(s.body, StateTransfer)]
    assert transfer.envelope.receiver == 2
    moments = tensors_in(transfer.payload.content["optimizer"])
    assert len(moments) == 3 * 4  # step, exp_avg and exp_avg_sq of four parameters
    assert not {"residuals", "position", "rng", "batch"} & transfer.payload.content.keys()


def test_run_in_a_subprocess_is_the_same_to_the_bit() -> None:
    """... also when learners run in subprocesses."""
    here = Run(tiny_config("diloco")).digest()
    command, env = [sys.executable, tiny.__file__, "diloco"], {"PYTHONPATH": ":".join(sys.path)}
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert there.stdout.strip() == here


def test_logical_learners_that_take_turns_in_one_process_keep_their_own_state() -> None:
    """... and also when logical learners outnumber processes and take turns: the order of turns changes nothing."""
    even = Run(tiny_config("diloco", learners=4, cluster={"step_noise": 0.0}))
    uneven = Run(tiny_config("diloco", learners=4, cluster={"step_noise": 0.3, "slow_share": 0.5, "slow_factor": 2.0}))
    turns = [[w for _, w, e, _ in run.log if isinstance(e, StepDone)] for run in (even, uneven)]
    assert turns[0] != turns[1]
    assert even.digest() == uneven.digest()
    states = [run.executor.learners[m].optimizer.state_dict()["state"] for run in (even, uneven) for m in range(4)]
    for m in range(4):
        assert all(torch.equal(a, b) for a, b in zip(tensors_in(states[m]), tensors_in(states[4 + m]), strict=True))
    assert not torch.equal(tensors_in(states[0])[1], tensors_in(states[1])[1])


# ---------------------------------------------------------------- outer step


def test_outer_gradient_is_before_minus_after() -> None:
    """delta_m = theta_before - theta_after (before minus after; the sign matters, and a test states it)."""
    run = Run(tiny_config("diloco", learners=1, total_steps=4))
    (contribution,) = run.contributions()
    sent = codec("fp32").decode(contribution.payload.content[0])
    alone = mlp()
    before = nn.utils.parameters_to_vector(alone.parameters()).detach().clone()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.01)
    for position in range(4):
        x, y = batch_at(0, 0, position, 8)
        F.mse_loss(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = nn.utils.parameters_to_vector(alone.parameters()).detach()
    torch.testing.assert_close(sent, before - after, rtol=1e-5, atol=1e-6)


def test_outer_sgd_with_rate_one_is_federated_averaging() -> None:
    """SGD: Theta -= lr * delta. With lr 1.0 and the same weights this is FedAvg up to rounding."""
    config = tiny_config("fedavg", total_steps=4, data={"samples_by_learner": [4, 12]})
    run = Run(config)
    start = nn.utils.parameters_to_vector(mlp().parameters()).detach()
    sent = sorted(run.contributions(), key=lambda s: s.envelope.sender)
    after = [start - codec("fp32").decode(s.payload.content[0]) for s in sent]
    (merge,) = run.effects(Merge)
    assert [share.weight for share in merge.shares] == [16.0, 48.0]
    torch.testing.assert_close(theta_of(run), 0.25 * after[0] + 0.75 * after[1], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- parameters and buffers


def buffers_sent(run: Run, outer_step: int) -> list[Tensor]:
    chosen = [s for s in run.contributions() if s.body.outer_step == outer_step]
    return [s.payload.content[1] for s in sorted(chosen, key=lambda s: s.envelope.sender)]


def test_floating_buffers_are_merged_with_the_same_weights_and_without_momentum() -> None:
    """Floating buffers (batch-norm statistics) are merged with the same weights but no momentum."""
    config = tiny_config("diloco", protocol={"aggregation_weighting": "num_samples"}, data={"samples_by_learner": [4, 12]})
    run = Run(config, batch_norm_mlp)
    (fragment,) = run.task.layout.fragments
    found = run.executor.disk.newest()[0].buffers
    one, two = buffers_sent(run, 12)  # the last round's alone: nothing of the rounds before
    for slot in fragment.buffers:
        if slot.kind == "float_buffer":
            part = slice(slot.offset, slot.offset + slot.numel)
            torch.testing.assert_close(found[part], 0.25 * one[part] + 0.75 * two[part])
    assert {s.kind for s in fragment.buffers} == {"float_buffer", "other_buffer"}


class Odd(nn.Module):
    """A counter, a flag and a scratch value that is not persistent, each different on every learner."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        self.flag |= x[:3, 0] > 0.5
        self.scratch += x.sum()
        return self.inside(x)


def test_other_persistent_buffers_are_meaned_rounded_half_to_even_and_cast_back() -> None:
    """Other persistent buffers: mean, rounded half to even, cast back."""
    run = Run(tiny_config("diloco", total_steps=4, data={"samples_by_learner": [5, 8]}), Odd)
    (slot,) = [s for s in run.task.layout.fragments[0].buffers if s.name == "seen"]
    assert [int(b[slot.offset]) for b in buffers_sent(run, 4)] == [20, 32]
    assert int(run.executor.disk.newest()[0].buffers[slot.offset]) == 26
    assert run.executor.learners[0].model.seen.dtype == torch.int64  # type: ignore[union-attr]
    every = tiny_config("diloco", total_steps=4, protocol={"local_steps_per_round": 1}, data={"samples_by_learner": [4, 5]})
    half = Run(every, Odd)
    # 4 and 5: 4.5 goes to 4; then 8 and 9: 8.5 to 8; then 12 and 13: 12.5 to 12
    merged = [int(half.executor.disk.versions[0][t].buffers[slot.offset]) for t in sorted(half.executor.disk.versions[0]) if t]
    assert merged[-1] == 16 and all(v % 2 == 0 for v in merged)


def test_bool_buffers_go_by_majority() -> None:
    """... bool by majority."""
    run = Run(tiny_config("diloco", learners=3, total_steps=4), Odd)
    (slot,) = [s for s in run.task.layout.fragments[0].buffers if s.name == "flag"]
    part = slice(slot.offset, slot.offset + slot.numel)
    votes = torch.stack([b[part] for b in buffers_sent(run, 4)])
    assert 0 < votes.sum() < votes.numel()
    assert torch.equal(run.executor.disk.newest()[0].buffers[part], (votes.sum(0) >= 2).float())


def test_non_persistent_buffers_are_left_alone() -> None:
    """Non-persistent buffers are left alone."""
    run = Run(tiny_config("diloco"), Odd)
    assert all(slot.name != "scratch" for f in run.task.layout.fragments for slot in f.buffers)
    own = [
        sum(batch_at(0, m, n, 8)[0].sum() for n in range(12)) for m in (0, 1)
    ]
    for m in (0, 1):
        torch.testing.assert_close(run.executor.learners[m].model.scratch, own[m].reshape(1))  # type: ignore[union-attr]


def test_buffers_travel_in_fp32_whatever_the_codec_with_their_modules_fragment() -> None:
    """Buffers travel in fp32 with their module's fragment."""
    run = Run(config_of("decoupled", total_steps=16, protocol={"fragments": 3}), batch_norm_mlp)
    by_module = {f.id: ({s.name.split(".")[0] for s in f.params}, {s.name.split(".")[0] for s in f.buffers})
                 for f in run.task.layout.fragments}  # fmt: skip
    (home,) = [p for p, (_, buffers) in by_module.items() if buffers]
    assert by_module[home][1] == {"norm"} and "norm" in by_module[home][0]
    for s in run.contributions():
        assert s.payload.content[1].dtype == torch.float32
        assert s.payload.content[1].numel() == (11 if s.body.fragment == home else 0)


def test_outer_optimiser_applies_to_trainable_floating_parameters_only() -> None:
    """The outer optimiser applies to trainable floating parameters."""
    frozen = mlp()
    frozen.first.weight.requires_grad_(False)  # type: ignore[union-attr]
    layout = tiny.layout_for(tiny_config("diloco"), frozen)
    assert [s.name for s in layout.fragments[0].params] == ["first.bias", "second.weight", "second.bias"]


def test_outer_optimiser_on_all_floating_is_an_experiment_and_warns() -> None:
    """apply_outer_optimizer_to = "all_floating" is an experiment and warns."""
    config = tiny_config("diloco", outer={"apply_outer_optimizer_to": "all_floating"})
    assert len(warnings(config)) == 1 and "experiment" in warnings(config)[0]
    names = [s.name for s in tiny.layout_for(config, batch_norm_mlp()).fragments[0].params]
    assert "norm.running_mean" in names and "norm.num_batches_tracked" not in names


def test_tied_tensors_are_handled_once() -> None:
    """Tied tensors are handled once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    (fragment,) = tiny.layout_for(tiny_config("diloco"), Tied()).fragments
    assert [(s.name, s.embedding) for s in fragment.params] == [("embed.weight", True)]
    assert fragment.numel == 24


# ---------------------------------------------------------------- names, defaults, refusals


def test_names_and_defaults_are_those_of_the_contract() -> None:
    """Names and defaults."""
    config = load(preset_name="diloco", assignments=["protocol.local_steps_per_round=30"])
    assert config.protocol.local_steps_per_round == 30
    assert config.inner.preserve_optimizer_state is True
    assert config.inner.optimizer == "AdamW"
    assert config.outer.outer_optimizer == "nesterov"
    assert config.outer.outer_learning_rate == 0.7
    assert config.outer.outer_momentum == 0.9
    assert config.protocol.aggregation_weighting == "uniform"
    assert config.outer.apply_outer_optimizer_to == "parameters"


@pytest.mark.parametrize("weighting", ["uniform", "num_samples", "tokens"])
def test_weighting_may_be_any_of_the_three(weighting: str) -> None:
    """aggregation_weighting = "uniform" or "num_samples" or "tokens"."""
    protocol, data = {"aggregation_weighting": weighting}, {"samples_by_learner": [2, 4]}
    run = Run(tiny_config("diloco", total_steps=4, protocol=protocol, data=data))
    (merge,) = run.effects(Merge)
    expected = {"uniform": [1.0, 1.0], "num_samples": [8.0, 16.0], "tokens": [32 * 8.0, 64 * 16.0]}
    assert [share.weight for share in merge.shares] == expected[weighting]


@pytest.mark.parametrize(
    ("preset", "protocol"),
    [
        ("diloco", {"quorum": 1}),
        ("diloco", {"fragmentation": "balanced", "fragments": 99}),
        ("diloco", {"fragmentation": "layer", "fragments": 2}),
        ("diloco", {"codec_up": "int3"}),
        ("decoupled", {"overlap": 0}),
    ],
)
def test_unsupported_modes_fail_at_start_and_never_fall_back(preset: str, protocol: dict[str, object]) -> None:
    """Unsupported modes fail at start with a clear sentence and never fall back."""
    with pytest.raises(ConfigError) as caught:
        Run(tiny_config(preset, protocol=protocol))
    assert len(str(caught.value)) > 20 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("inner", "preserve_optimizer_state", False),
        ("inner", "optimizer", "SGD"),
        ("outer", "apply_outer_optimizer_to", "all_floating"),
    ],
)  # fmt: skip
def test_allowed_but_unfaithful_combinations_warn_and_run(section: str, key: str, value: object) -> None:
    """Allowed but unfaithful combinations warn."""
    config = tiny_config("diloco", **{section: {key: value}})
    (sentence,) = warnings(config)
    assert key in sentence or str(value) in sentence
    assert Run(config).cluster.syncer.outer_step == 12


# ---------------------------------------------------------------- Async DiLoCo


def reference_async(rounds: int, h: int, learners: int) -> Tensor:
    """delta_r: weights at the start of round r minus those at its end; its merge is applied at the end of round r + 1."""
    theta = nn.utils.parameters_to_vector(mlp().parameters()).detach().clone().requires_grad_()
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    models = [mlp() for _ in range(learners)]
    inner = [torch.optim.AdamW(m.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.01) for m in models]
    pending: Tensor | None = None
    for r in range(rounds):
        deltas = []
        for m, model in enumerate(models):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            for step in range(h):
                x, y = batch_at(0, m, r * h + step, 8)
                F.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner[m].step()
                inner[m].zero_grad(set_to_none=True)
            deltas.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())
        if pending is not None:  # what round r - 1 gave, computed while round r trained
            for model in models:
                nn.utils.vector_to_parameters(pending.clone(), model.parameters())
        theta.grad = torch.stack(deltas).mean(0)
        outer.step()
        pending = theta.detach().clone()
    return theta.detach()


def test_async_run_is_that_of_a_plain_loop_with_a_one_round_delay() -> None:
    """The merge of round r runs while round r+1 trains; its result is applied at the end of round r+1."""
    found = theta_of(Run(config_of("async_diloco", total_steps=16)))
    torch.testing.assert_close(found, reference_async(4, 4, 2), rtol=1e-4, atol=1e-5)


def test_async_after_the_first_round_nothing_is_applied() -> None:
    """After round 1 nothing is applied and learners go on from their own weights."""
    run = Run(config_of("async_diloco", total_steps=16))
    taken = []
    local_step = 0
    for _, worker, event, effects in run.log:
        if worker != 0:
            continue
        local_step += isinstance(event, StepDone)
        taken += [(e.version, local_step) for e in effects if isinstance(e, Adopt) and e.version > 0]
    assert taken == [(4, 8), (8, 12), (12, 16)]
