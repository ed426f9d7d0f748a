"""Small runs of the tensor executors: tiny models on synthetic batches, and a list of everything that happened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.chaos import ChaosPlan, Fault
from atoll.config import Config, load
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import Incarnation, Nanos, WorkerId
from atoll.protocol.interface import Executor, Finding, Payload
from atoll.protocol.vocabulary import Contribution, Effect, Envelope, Event, Message, Send
from atoll.sim.cluster import VirtualCluster
from atoll.tasks.task import Task, layout_for
from atoll.workload.models.mlp import BatchNormMlp, Mlp

INPUTS, HIDDEN, OUTPUTS = 12, 20, 5
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return Mlp(0, inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS)


def batch_norm_mlp() -> nn.Module:
    return BatchNormMlp(0, inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS)


def draw(learner: int, stream: int, position: int) -> Batch:
    digest = hashlib.sha256(f"{stream}/{position}".encode()).digest()
    chance = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    x = torch.randn(4, INPUTS, generator=chance)
    return x, torch.sin(x[:, :OUTPUTS] * (1 + stream))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(batch[0].to(dtype)), batch[1].to(dtype))


def configured(preset: str = "decoupled", *, seed: int = 0, learners: int = 3, total_steps: int = 12, **sections: Any) -> Config:
    """Two fragments every four steps unless the preset or the caller says otherwise."""
    protocol: dict[str, Any] = {} if preset == "ddp" else {"local_steps_per_round": 4}
    if preset.startswith("decoupled"):
        protocol["fragments"] = 2
    overrides = {"seed": seed, "learners": learners, "total_steps": total_steps, **sections}
    overrides["protocol"] = protocol | sections.get("protocol", {})
    overrides["model"] = {"precision": "fp32", "compile": "off"} | sections.get("model", {})  # the same bits on every device
    return load(preset_name=preset, overrides=overrides)


def small_task_for(
    config: Config,
    build: Callable[[], nn.Module] = mlp,
    batch: Callable[[int, int, int], Any] = draw,
    loss: Callable[[nn.Module, Any], Tensor] = squared_error,
) -> Task:
    return Task(
        config, build, batch, loss, lambda b: (len(b[0]), len(b[0])), lambda model: 0.0, layout_for(config, build()), "tiny"
    )  # fmt: skip


class _Tapped:
    """An executor that reports every effect it carried out and every message's payload."""

    def __init__(self, run: Run, worker: WorkerId, executor: Executor) -> None:
        self._run, self._worker, self._executor = run, worker, executor

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        happened = self._executor.execute(effect, payload)
        self._run.carried_out(self._worker, effect)
        return happened

    def inspect(self, body: Message, payload: Payload) -> Finding:
        return self._executor.inspect(body, payload)

    def payload_for(self, send: Send) -> Payload | None:
        payload = self._executor.payload_for(send)
        self._run.sent(send.envelope, payload)
        return payload


class Run:
    """A cluster with tensors. `seen` holds (now, worker, event, effects), `packets` what learners sent, in order."""

    def __init__(self, task: Task, faults: Sequence[Fault] = ()) -> None:
        self.executor = TensorExecutor(task)
        self.seen: list[tuple[Nanos, WorkerId, Event, Sequence[Effect]]] = []
        self.packets: list[tuple[Envelope, Payload]] = []
        plan = ChaosPlan(tuple(faults))
        self.cluster = VirtualCluster(task.config, executor_for=self._tapped, plan=plan, observers=[self._saw])

    def _tapped(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        return _Tapped(self, worker, self.executor(worker, incarnation))

    def _saw(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self.seen.append((now, worker, event, tuple(effects)))

    def carried_out(self, worker: WorkerId, effect: Effect) -> None:
        """For a test to read the worker's tensors at this moment."""

    def sent(self, envelope: Envelope, payload: Payload | None) -> None:
        if isinstance(envelope.body, Contribution) and payload is not None:
            self.packets.append((envelope, payload))

    def go(self) -> Run:
        self.cluster.run(until_seconds=600.0)
        return self

    def events(self, kind: type, worker: WorkerId | None = None) -> list[Any]:
        return [e for _, w, e, _ in self.seen if isinstance(e, kind) and worker in (None, w)]

    def effects(self, kind: type, worker: WorkerId | None = None, since: int = 0) -> list[Any]:
        """Those decided from the `since`-th event on."""
        return [e for _, w, _, found in self.seen[since:] for e in found if isinstance(e, kind) and worker in (None, w)]

    def theta(self) -> dict[str, Tensor]:
        return self.executor.task.model_of(*self.executor.disk.theta()).state_dict()


def run(config: Config, faults: Sequence[Fault] = (), **task: Any) -> Run:
    return Run(small_task_for(config, **task), faults).go()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def finite(state: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.values())
