"""What Atoll and the oracles share: a model, data, a loss. No algorithm.

All sizes are multiples of 32: Atoll steps a fragment as one flat vector and the oracles step tensor by tensor, and torch
may fuse a multiplication and an addition in its vector loop but not in the scalar tail. Without tails bits can agree on
any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.executor.virtual_run import TensorExecutor
from atoll.sim.cluster import VirtualCluster
from atoll.tasks.task import Task, layout_for

WIDTH = 32
CLIP = 0.5
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
LEARNING_RATE = 0.01

Batch = tuple[Tensor, Tensor]


def _chance(*words: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


class Net(nn.Module):
    """Four residual blocks between an entry and a head: enough for fragments of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        chance = _chance("net")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


FRAGMENTS = [
    ["blocks.0.weight", "blocks.0.bias", "blocks.2.weight", "blocks.2.bias"],
    ["blocks.1.weight", "blocks.1.bias", "blocks.3.weight", "blocks.3.bias"],
    ["entry.weight", "entry.bias", "head.weight", "head.bias"],
]
"""Two blocks a fragment, strided; what is no block is the last fragment."""


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batches(seed: int = 0, sizes: tuple[int, ...] = ()) -> Callable[[int, int], Batch]:
    """(learner, position) -> a batch. Learners see different tasks, so that they drift apart."""

    def batch(learner: int, position: int) -> Batch:
        size = sizes[learner] if sizes else 4
        chance = _chance("batch", seed, learner, position)
        x = torch.randn(size, WIDTH, generator=chance)
        return x, torch.sin(x.roll(1 + learner, dims=1)) + 0.1 * torch.randn(size, WIDTH, generator=chance)

    return batch


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def configured(preset: str, *, seed: int = 0, learners: int = 3, **sections: Any) -> Config:
    """The preset with this task's inner optimiser, on a slow and noisy network unless told otherwise."""
    inner = {"learning_rate": LEARNING_RATE, "clip_norm": CLIP, "weight_decay": WEIGHT_DECAY, "betas": list(BETAS)}
    cluster = {"latency_seconds": 0.3, "step_noise": 0.4, "up_gbit": 0.001, "down_gbit": 0.002}
    overrides = {"seed": seed, "learners": learners, **sections}
    overrides["inner"] = inner | sections.get("inner", {})
    overrides["cluster"] = cluster | sections.get("cluster", {})
    return load(preset_name=preset, overrides=overrides)


def task_module(config: Config) -> Task:
    draw = batches(config.seed, config.data.samples_by_learner)
    return Task(
        config, Net, lambda learner, stream, position: draw(stream, position), loss,
        lambda batch: (len(batch[0]), len(batch[0])), lambda model: 0.0, layout_for(config, Net()), "synthetic",
    )  # fmt: skip


def atoll_run(config: Config, plan: ChaosPlan | None = None) -> TensorExecutor:
    executor = TensorExecutor(task_module(config))
    VirtualCluster(config, executor_for=executor, plan=plan).run(until_seconds=2_000.0)
    return executor


def theta(executor: TensorExecutor) -> dict[str, Tensor]:
    return executor.task.model_of(*executor.disk.theta()).state_dict()


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"differs by {relative(found, expected):.3g} in {different}"


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The length of the difference in units of the length of what is expected."""
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5
