"""A tiny task to train for real in virtual time, and executors that keep what they sent. Also a script: prints a run's digest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER, Incarnation, Nanos, WorkerId
from atoll.protocol.interface import Executor, Finding, Payload
from atoll.protocol.vocabulary import Effect, Event, Lane, Message, Send
from atoll.sim.cluster import VirtualCluster
from atoll.tasks.task import Task, layout_for
from atoll.workload.data.seeds import generator
from atoll.workload.models.mlp import BatchNormMlp, Mlp

Build = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return Mlp(3, inputs=4, hidden=5, outputs=2)


def batch_norm_mlp() -> nn.Module:
    return BatchNormMlp(3, inputs=4, hidden=5, outputs=2)


def tiny_config(preset: str = "diloco", *, learners: int = 2, total_steps: int = 12, **sections: Any) -> Config:
    protocol = {"local_steps_per_round": 4} | sections.pop("protocol", {})
    inner = {"learning_rate": 0.05, "warmup_share": 0.0, "schedule": "constant"} | sections.pop("inner", {})
    top = {"learners": learners, "total_steps": total_steps, "protocol": protocol, "inner": inner}
    return load(preset_name=preset, overrides=top | sections)


def batch_at(seed: int, stream: int, position: int, rows: int) -> tuple[Tensor, Tensor]:
    chance = generator("tiny data", seed, stream, position)
    x = torch.randn(rows, 4, generator=chance)
    return x, torch.stack([x.sum(1).sin(), (x[:, 0] * x[:, 1]).cos()], dim=1)


def tiny_task(config: Config, build: Build = mlp) -> Task:
    sizes = config.data.samples_by_learner

    def batch(learner: int, stream: int, position: int) -> tuple[Tensor, Tensor]:
        return batch_at(config.seed, stream, position, sizes[learner] if sizes else config.data.batch_size)

    def loss(model: nn.Module, drawn: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(drawn[0]), drawn[1])

    return Task(
        config, build, batch, loss, lambda drawn: (4 * drawn[0].shape[0], drawn[0].shape[0]), lambda model: 0.0,
        layout_for(config, build()), "tiny",
    )  # fmt: skip


class Sent:
    """One message with the bytes beside it."""

    def __init__(self, send: Send, payload: Payload | None) -> None:
        self.envelope, self.body, self.payload = send.envelope, send.envelope.body, payload


class Run:
    """A cluster that trains; everything that was sent and every effect, to read afterwards."""

    def __init__(
        self, config: Config, build: Build = mlp, plan: ChaosPlan | None = None, task: Task | None = None
    ) -> None:
        self.config = config
        self.task = task or tiny_task(config, build)
        self.executor = TensorExecutor(self.task)
        self.sent: list[Sent] = []
        self.log: list[tuple[Nanos, WorkerId, Event, Sequence[Effect]]] = []
        self.cluster = VirtualCluster(config, plan=plan, executor_for=self._executor, observers=[self._watch])
        self.cluster.run(until_seconds=5000)

    def _watch(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        """What has bytes beside it is noted when these are asked for."""
        self.log.append((now, worker, event, tuple(effects)))
        sends = (effect for effect in effects if isinstance(effect, Send))
        self.sent += [Sent(send, None) for send in sends if send.envelope.body.lane is Lane.CONTROL]

    def _executor(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        return _Remembering(self.executor(worker, incarnation), self.sent)

    def effects(self, *kinds: type, of: WorkerId | None = None) -> list[Any]:
        return [e for _, w, _, effects in self.log if of in (None, w) for e in effects if isinstance(e, kinds)]

    def to_syncer(self) -> list[Sent]:
        return [s for s in self.sent if s.envelope.receiver == SYNCER]

    def contributions(self) -> list[Sent]:
        return [s for s in self.to_syncer() if s.payload is not None]

    def digest(self) -> str:
        return self.executor.disk.theta_sha256()


class _Remembering:
    def __init__(self, executor: Executor, sent: list[Sent]) -> None:
        self._executor, self._sent = executor, sent

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        return self._executor.execute(effect, payload)

    def inspect(self, body: Message, payload: Payload) -> Finding:
        return self._executor.inspect(body, payload)

    def payload_for(self, send: Send) -> Payload | None:
        payload = self._executor.payload_for(send)
        self._sent.append(Sent(send, payload))
        return payload


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


if __name__ == "__main__":
    print(Run(tiny_config(sys.argv[1])).digest())
