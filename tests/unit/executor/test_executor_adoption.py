"""What a learner holds after adoption: the announced version byte for byte, its cast, its buffers, and nothing frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_runs import HIDDEN, Run, batch_norm_mlp, configured, draw, mlp, run, small_task_for
from torch import Tensor, nn

from atoll.codecs import codec
from atoll.executor.learner import TensorLearner
from atoll.ids import WorkerId
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import DUE
from atoll.protocol.vocabulary import NO_VERSION, Adopt, Effect, Keep
from atoll.tasks.task import Task, initial_versions
from atoll.tensors.access import cast_like, named_tensors, read_buffers, read_params


class Watched(Run):
    """Reads a learner right after each of its adoptions, while the version is still on the syncer's disk."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.adoptions: list[tuple[WorkerId, int, int]] = []
        self.unlike: list[str] = []

    def carried_out(self, worker: WorkerId, effect: Effect) -> None:
        if not isinstance(effect, Adopt):
            return
        p, v = effect.fragment, effect.version
        version, fragment = self.executor.disk.versions[p][v], self.executor.task.layout.fragments[p]
        learner = self.executor.learners[worker]
        tensors = named_tensors(learner.model)
        self.adoptions.append((worker, p, v))
        equal = {
            "anchor": torch.equal(learner.anchors[p], version.announced),
            "weights": torch.equal(read_params(tensors, fragment), cast_like(fragment, version.announced)),
            "buffers": torch.equal(read_buffers(tensors, fragment), version.buffers),
        }
        self.unlike += [f"{what} of learner {worker}, fragment {p}, version {v}" for what in equal if not equal[what]]


def assert_adoptions_are_exact(run: Watched) -> None:
    run.go()
    assert {(m, p) for m, p, v in run.adoptions if v > 0} == {(m, p) for m in range(3) for p in range(2)}
    assert run.unlike == []


@pytest.mark.parametrize("down", ["fp32", "bf16", "int8", "int4", "e3m0"])
def test_adoption_under_any_down_codec_leaves_the_anchor_equal_to_the_announced(down: str) -> None:
    config = configured(total_steps=20, protocol={"codec_down": down})
    watched = Watched(small_task_for(config, batch_norm_mlp))
    assert_adoptions_are_exact(watched)
    for version in watched.executor.disk.newest():
        assert torch.equal(version.announced, version.theta) == (down == "fp32")


@pytest.mark.parametrize("down", ["bf16", "int8", "int2"])
def test_announced_version_under_a_lossy_down_codec_errs_by_one_difference_only(
    down: str,
) -> None:
    """The next difference is taken to what was announced, not to Theta: errors do not add up over versions."""
    found = run(configured(total_steps=24, protocol={"codec_down": down}))
    wire = codec(down)
    for versions in found.executor.disk.versions:
        before, newest = (versions[v] for v in sorted(versions)[-2:])
        assert not torch.equal(before.announced, before.theta), "there must be a residual to keep"
        difference = newest.theta - before.announced
        assert torch.equal(newest.announced, before.announced + wire.decode(wire.encode(difference)))
        assert ((newest.announced - newest.theta).abs() <= wire.error_bound(difference) + 1e-6).all()


@pytest.mark.parametrize("down", ["fp32", "int8"])
def test_bf16_weights_after_adoption_are_the_cast_of_an_fp32_anchor(down: str) -> None:
    config = configured(total_steps=20, protocol={"codec_down": down})
    watched = Watched(small_task_for(config, lambda: mlp().to(torch.bfloat16)))
    assert_adoptions_are_exact(watched)
    for version in watched.executor.disk.newest():
        assert version.theta.dtype == torch.float32 and version.outer.momentum.dtype == torch.float32
        assert not torch.equal(version.theta, version.theta.bfloat16().float()), "the outer state keeps what bf16 cannot hold"
    for learner in watched.executor.learners.values():
        assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}


def test_bf16_learner_that_has_not_trained_since_adoption_sends_zeros() -> None:
    """Differences are taken against the cast: rounding to bf16 must not travel as if it had been learnt."""
    config = configured("diloco")
    executor = run(config, build=lambda: mlp().to(torch.bfloat16)).executor
    assert not torch.equal(executor.learners[0].anchors[0], executor.learners[0].anchors[0].bfloat16().float())
    assert executor.learners[0]._difference(0).count_nonzero() == 0


class Tied(nn.Module):
    """A word model whose head is its embedding, with one frozen parameter and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(10, 8, generator=chance) * 0.3, freeze=False)
        self.middle = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8, generator=chance), requires_grad=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.middle.weight.copy_(torch.randn(8, 8, generator=chance) * 0.3)
            self.middle.bias.zero_()

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(words) * self.scale)))


def words(learner: int, stream: int, position: int) -> tuple[Tensor, Tensor]:
    start = torch.arange(6) + position + 3 * stream
    return start % 10, (start * 7 + 1) % 10


def test_tied_and_frozen_tensors_after_training_are_one_tensor_and_untouched() -> None:
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    found = run(configured(total_steps=20), build=Tied, batch=words, loss=loss)
    before = Tied().state_dict()
    slots = [slot.name for fragment in found.executor.task.layout.fragments for slot in fragment.params]
    assert sorted(slots) == ["embedding.weight", "middle.bias", "middle.weight"]
    for state in [found.theta(), *(m.model.state_dict() for m in found.executor.learners.values())]:
        assert torch.equal(state["scale"], before["scale"])
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        assert not torch.equal(state["embedding.weight"], before["embedding.weight"])
    for learner in found.executor.learners.values():
        assert learner.model.head.weight is learner.model.embedding.weight
        assert len(learner.optimizer.state) == 3, "the tied tensor is stepped once, the frozen one never"


# ---------------------------------------------------------------- buffers


def uneven(learner: int, stream: int, position: int) -> tuple[Tensor, Tensor]:
    """Learners whose batch statistics differ."""
    x, y = draw(learner, stream, position)
    return x * (1.0 + stream) + stream, y


def test_batch_norm_buffers_after_each_round_are_the_plain_mean_on_every_learner() -> None:
    """No momentum: the outer optimiser has some, and in the second round it would show."""
    found = run(configured("diloco", total_steps=8), build=batch_norm_mlp, batch=uneven)
    (slots,) = (fragment.buffers for fragment in found.executor.task.layout.fragments)
    assert [slot.name for slot in slots] == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    sent = [payload.content[1] for envelope, payload in found.packets if envelope.body.outer_step == 8]
    assert len(sent) == 3 and not torch.equal(sent[0][:-1], sent[1][:-1]), "learners must differ for a mean to say anything"
    expected = ((sent[0] + sent[1]) + sent[2]) / 3
    assert torch.equal(found.executor.disk.theta()[1][0][:-1], expected[:-1])
    for learner in found.executor.learners.values():
        norm = learner.model.norm
        assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), expected[: 2 * HIDDEN])
        assert norm.num_batches_tracked == 8 and norm.num_batches_tracked.dtype == torch.int64


class Counting(nn.Module):
    """Counts its batches by a stride that learners do not share, so that the mean of counts is no integer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += int(x[0, 0] > 0)
            self.scratch += 1.0
        return self.body(x)


def signed(learner: int, stream: int, position: int) -> tuple[Tensor, Tensor]:
    """The first learner counts every batch, the second every one but the last of four, the third none."""
    x, y = draw(learner, stream, position)
    positive = stream == 0 or (stream == 1 and position % 4 != 3)
    x[0, 0] = 1.0 if positive else -1.0
    return x, y


def test_integer_buffer_after_a_round_is_the_mean_rounded_and_a_transient_one_stays() -> None:
    found = run(configured("diloco", total_steps=4), build=Counting, batch=signed)  # counts 4, 3, 0: mean 2.33
    for learner in found.executor.learners.values():
        assert learner.model.count == 2 and learner.model.count.dtype == torch.int64
        assert learner.model.scratch == 4.0
    assert found.theta()["count"] == 2


class Mastered(torch.optim.SGD):
    """As optimisers of 16-bit models do: the truth is an fp32 copy in the state, and weights are its cast."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p].setdefault("master", p.float().clone()))


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_adoption_reaches_the_master_weights_which_the_next_step_casts(alpha: float) -> None:
    task = small_task_for(configured(), lambda: mlp().bfloat16())
    model = task.build()
    optimizer = Mastered(model.parameters(), lr=0.0)
    optimizer.step()
    learner = TensorLearner(task, 0, model=model, optimizer=optimizer)
    before = {name: tensor.detach().float().clone() for name, tensor in model.named_parameters()}
    for p, version in enumerate(initial_versions(task)):
        learner.execute(Keep(p, 1, NO_VERSION), Payload("fragment", 0, (version.announced + 1.0, version.buffers)))
        learner.execute(Adopt(p, 1, alpha, False, DUE), None)
    optimizer.step()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach().float(), before[name] + (1 - alpha), rtol=0.01, atol=0.01)
