"""Chooses where a virtual run's tensors are: on the host, or all on one device that its learners share.

On a device the learners of a dense decoder step as a fleet: batched products in bf16, with a compiled step. What a fleet does
not support (images, experts, data-parallel, other optimisers) steps one learner after the other, as on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch
from torch import nn

from atoll.config import Config
from atoll.errors import UserError
from atoll.executor.compute import autocast, resolved
from atoll.executor.fleet.executor import FleetExecutor
from atoll.executor.fleet.optimizer import STACKED
from atoll.executor.late import LateContent
from atoll.executor.learner import TensorLearner
from atoll.executor.syncer import TensorSyncer
from atoll.ids import SYNCER, Incarnation, LearnerId, WorkerId
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.vocabulary import Effect, Event, Keep, Send
from atoll.store.memory_snapshots import MemorySnapshots
from atoll.store.versions import MemoryVersions
from atoll.tasks.task import Task, initial_versions

REASON_MAX = 120
"""Characters; a longer message of torch lists its backends."""


def checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # read back: the meta device, which has shapes only, fails here
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), "")
        why = f" ({reason})" if 0 < len(reason) <= REASON_MAX else ""
        raise UserError(f"--device {name}: cannot be used here{why}; available: {', '.join(devices_here())}") from None
    return device


def devices_here() -> list[str]:
    other = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if other is None else ["cpu", *(f"{other.type}:{i}" for i in range(torch.accelerator.device_count()))]


def evaluated_on(task: Task, device: torch.device) -> Task:
    """The same task with its held-out set evaluated on `device`, in the precision that a learner there has."""
    compute = resolved(task.config, device)
    if device.type == "cpu" and compute.precision == "fp32":
        return task

    def there(measure: Callable[[nn.Module], float]) -> Callable[[nn.Module], float]:
        def measured(model: nn.Module) -> float:
            with autocast(compute, device):
                return measure(model.to(device))

        return measured

    accuracy = None if task.accuracy is None else there(task.accuracy)
    scratch = cache(lambda: task.build().to(device))  # initial weights of a large model take seconds to draw
    return dataclasses.replace(task, evaluate=there(task.evaluate), accuracy=accuracy, scratch=scratch)


STATE_BYTES: Final = 16
"""Of a parameter on a learner's device: weight, gradient and two moments, fp32 each. Activations come on top."""


def refuse_too_many(task: Task, device: torch.device, learners: int) -> None:
    """Before any of them is started, and not after the last of them ran out of memory."""
    if device.type != "cuda":
        return
    parameters = sum(fragment.numel for fragment in task.layout.fragments)
    each, (free, _) = STATE_BYTES * parameters, torch.cuda.mem_get_info(device)
    if learners * each > free:
        needs = f"a learner needs {each / 1e9:.1f} GB for weights, gradients and moments, and {free / 1e9:.1f} GB are free"
        raise UserError(f"--device {device}: {learners} learners do not fit: {needs}, so at most {int(free // each)} fit")


def is_fleet(config: Config) -> bool:
    """Whether the learners of such a run step as a fleet. Those with experts could, but nobody has measured it on a GPU yet:
    `bench/quality` alone does it."""
    dense = config.model.name == "decoder" and not config.model.numbers.get("experts", 0)
    plain = not config.model.checkpoint_activations and config.protocol.contribution == "weights"
    return dense and plain and config.inner.optimizer in STACKED


class TensorExecutor:
    """Makes the executor of every worker of one virtual run. Versions and snapshots outlive the workers. `device`: where all
    tensors are, the syncer's too; by default the host. `hosted`: the syncer's stay on the host, as those of a live run."""

    def __init__(
        self, task: Task, disk: MemoryVersions | None = None, snapshots: MemorySnapshots | None = None,
        device: torch.device | None = None, *, hosted: bool = False,
    ) -> None:
        self.task, self._device, self._hosted = task, device, hosted
        self.disk = disk or MemoryVersions(initial_versions(task, device))
        self.snapshots = snapshots or MemorySnapshots(self.disk)
        self.learners: dict[LearnerId, TensorLearner] = {}
        self.in_blocks = True
        """How the run digests its versions; a replay sets it as the tape says."""

    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        if worker == SYNCER:
            fragments = self.task.layout.fragments
            return TensorSyncer(self.task.config, fragments, self.disk, self.snapshots, in_blocks=self.in_blocks)
        if worker in self.learners:
            self.learners[worker].close()  # an earlier incarnation; on a GPU its memory is needed
        if self._hosted:
            learner: TensorLearner = HostedLearner(self.task, worker, self.snapshots, device=self._device)
        else:
            resident = self._device is not None
            learner = TensorLearner(self.task, worker, self.snapshots, device=self._device, resident=resident)
        self.learners[worker] = learner
        return learner


class HostedLearner(TensorLearner):
    """A live learner's executor on its device, in one process with a syncer on the host: what it sends is complete when it is
    sent, because no thread waits for the device here."""

    def payload_for(self, send: Send) -> Payload | None:
        payload = super().payload_for(send)
        if payload is None or not isinstance(payload.content, LateContent):
            return payload
        found = payload.content.resolve()
        if found is None:
            return Payload(payload.kind, 0, None)
        packet, buffers = found  # copies: the memory is used again for later packets
        scales = None if packet.scales is None else packet.scales.clone()
        own = dataclasses.replace(packet, codes=packet.codes.clone(), scales=scales)
        return Payload(payload.kind, payload.nbytes, (own, buffers.clone()))

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, Keep) and payload is not None and self._cuda is not None:
            payload = self._cuda.arriving(payload)
        return super().execute(effect, payload)


def executor_on(task: Task, device: torch.device, learners: int) -> TensorExecutor | FleetExecutor:
    """`learners`: the declared ones and those that a chaos plan adds. A device other than the host holds all tensors."""
    if device.type == "cpu":
        return TensorExecutor(task)
    if is_fleet(task.config):
        return FleetExecutor(task, device, learners=learners, compute=resolved(task.config, device))
    return TensorExecutor(task, device=device)
