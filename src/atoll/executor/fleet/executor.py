"""Several learners of one virtual run on one device: their inner steps run as one batched step.

When the machine asks for a learner's step, the step is queued. All queued steps run together when one of their results is first
needed, because in virtual time learners step side by side. `TensorLearner` and `TensorSyncer` do everything else (staging,
encoding, merging, adopting), on tensors that stay on the device.

The loss of a step is reported with the learner's next step: to read it sooner would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.executor.compute import PLAIN, ComputeMode, autocast, use_matrix_precision
from atoll.executor.cuda.transfer import first_samples
from atoll.executor.fleet.optimizer import StackedOptimizer
from atoll.executor.learner import TensorLearner
from atoll.executor.null import batch_size
from atoll.executor.optim.build import turned_names
from atoll.executor.syncer import TensorSyncer
from atoll.ids import SYNCER, FragmentId, Incarnation, LearnerId, OuterStep, WorkerId
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.vocabulary import (
    Effect,
    Event,
    InnerStep,
    Keep,
    Send,
    StateTransfer,
    StepDone,
    Unstage,
)  # fmt: skip
from atoll.rules import Schedule, samples_max
from atoll.store.memory_snapshots import MemorySnapshots
from atoll.store.versions import MemoryVersions
from atoll.tasks.task import Task, initial_versions
from atoll.workload.models.decoder import Decoder
from atoll.workload.models.stacked import stacked_loss


class Fleet:
    """The stacked weights of `learners` learners, [M, ...] each, and the steps queued on them."""

    def __init__(self, task: Task, learners: int, device: torch.device, compute: ComputeMode = PLAIN) -> None:
        template = task.build()
        if not isinstance(template, Decoder):
            raise ConfigError(f"model.name = {task.config.model.name!r}: a fleet runs decoders only")
        self._task, self._device, self._learners = task, device, learners
        self._shape, self._schedule = template.shape, Schedule(task.config)
        self._initial = {name: p.detach().to(device) for name, p in template.named_parameters()}
        self._weights = {name: torch.stack([p] * learners).requires_grad_() for name, p in self._initial.items()}
        self._cos, self._sin = template.cos.to(device), template.sin.to(device)
        turned = turned_names(task.config, task.layout.fragments) if task.config.inner.optimizer == "Muon" else frozenset()
        self._moments = StackedOptimizer(task.config, self._weights, turned, compiled=compute.compiled)
        self._queue: dict[LearnerId, tuple[InnerStep, torch.optim.Optimizer]] = {}
        self._losses: list[float | None] = [None] * learners
        self._pending_losses: tuple[list[LearnerId], Tensor] | None = None
        self._loss: Callable[..., Tensor] = torch.compile(stacked_loss, dynamic=False) if compute.compiled else stacked_loss
        self._compute = compute
        use_matrix_precision(compute, device)

    def module(self, learner: LearnerId) -> nn.Module:
        """A model with the initial weights whose parameters are this learner's slices of the stacked ones."""
        self._queue.pop(learner, None)
        model = self._task.build()
        own = {id(p): self._slice(name, learner) for name, p in model.named_parameters()}
        for part in model.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:  # tied parameters stay tied
                    part._parameters[name] = own[id(parameter)]
        return model

    def _slice(self, name: str, learner: LearnerId) -> nn.Parameter:
        stacked = self._weights[name].detach()[learner]
        stacked.copy_(self._initial[name])
        return nn.Parameter(stacked)

    # ------------------------------------------------------------ stepping

    def queue(self, learner: LearnerId, step: InnerStep, optimizer: torch.optim.Optimizer) -> float | None:
        """Returns the loss of an earlier step, once it is known."""
        if learner in self._queue:
            self.flush()
        self._queue[learner] = (step, optimizer)
        return self._losses[learner]

    def synchronize(self, learner: LearnerId) -> None:
        """Runs the queue if this learner has a step in it: the caller needs its weights after that step."""
        if learner in self._queue:
            self.flush()

    def flush(self) -> None:
        queued, self._queue = self._queue, {}
        self._read_losses()
        config = self._task.config
        rows = {m: self._rows(m, step) for m, (step, _) in queued.items()}
        total, grads = torch.zeros(self._learners, device=self._device), None
        for micro in range(config.inner.accumulate):
            batch, samples, shares = self._batch(rows, micro)
            with autocast(self._compute, self._device):
                losses = self._loss(self._shape, self._weights, batch, samples, self._cos, self._sin)
            scalar = (losses * shares).sum()
            # Not backward(): adding to zeroed gradients would read and write each of them twice more.
            found = torch.autograd.grad(scalar, list(self._weights.values()))
            grads = list(found if grads is None else torch._foreach_add(grads, found))
            total += losses.detach() * shares
        assert grads is not None
        self._pending_losses = (sorted(queued), total)
        stepping = {m: (step.outer_step, optimizer) for m, (step, optimizer) in queued.items()}
        if config.protocol.freeze_not_due:
            self._moments.step_some(stepping, grads, {m: self._due_next(outer_step) for m, (outer_step, _) in stepping.items()})
        elif self._moments.counts_apart:
            self._moments.step_some(stepping, grads, dict.fromkeys(stepping, range(len(grads))))
        else:
            self._moments.step(stepping, grads)

    def _due_next(self, outer_step: OuterStep) -> list[int]:
        """FedPart: the indices of the tensors that are due next; only those train."""
        due = self._schedule.due(self._schedule.next_due(outer_step + 1))
        names = {slot.name for p in due for slot in self._task.layout.fragments[p].params}
        return [at for at, name in enumerate(self._weights) if name in names]

    def _rows(self, m: LearnerId, step: InnerStep) -> list[Tensor]:
        """A learner's micro-batches."""
        count = self._task.config.inner.accumulate
        found = []
        for position in range(step.batch * count, (step.batch + 1) * count):
            row = self._task.batch(m, step.stream, position)
            found.append(first_samples(row, step.share, position) if step.share < 1.0 else row)
        return found

    def _batch(self, rows: Mapping[LearnerId, Sequence[Tensor]], micro: int) -> tuple[Tensor, Tensor, Tensor]:
        """[M, B, T + 1]; how many of the B rows each learner uses, 0 if it does not step; and their share of its step."""
        config = self._task.config
        whole = torch.zeros(self._learners, samples_max(config), config.data.seq_len + 1, dtype=torch.int64)
        samples, shares = [0] * self._learners, [0.0] * self._learners
        for m, own in rows.items():
            samples[m] = len(own[micro])
            shares[m] = samples[m] / sum(map(len, own))
            whole[m, : samples[m]] = own[micro]
        return self._upload(whole), self._upload(torch.tensor(samples)), self._upload(torch.tensor(shares))

    def _upload(self, here: Tensor) -> Tensor:
        """Copies from pinned memory: from pageable memory, a copy would wait for the device."""
        return (here.pin_memory() if self._device.type == "cuda" else here).to(self._device, non_blocking=True)

    def _read_losses(self) -> None:
        if self._pending_losses is not None:
            learners, losses = self._pending_losses
            values = losses.tolist()
            for m in learners:
                self._losses[m] = values[m]
            self._pending_losses = None


class FleetLearner(TensorLearner):
    def __init__(self, task: Task, learner: LearnerId, fleet: Fleet, snapshots: MemorySnapshots, device: torch.device) -> None:
        super().__init__(task, learner, snapshots, model=fleet.module(learner), device=device, resident=True)
        self._fleet = fleet

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if not isinstance(effect, InnerStep | Keep | Send | Unstage):  # these do not touch the weights
            self._fleet.synchronize(self._learner)
        return super().execute(effect, payload)

    def payload_for(self, send: Send) -> Payload | None:
        if isinstance(send.envelope.body, StateTransfer):
            self._fleet.synchronize(self._learner)
        return super().payload_for(send)

    def _poison(self, p: FragmentId, difference: Tensor, buffers: Tensor) -> str:
        """No check here: it would wait for the device. Encoding finds NaN and Inf; then there is nothing to send, and the syncer
        makes this learner recover."""
        return ""

    def _inner_step(self, effect: InnerStep) -> StepDone:
        tokens, samples = batch_size(self._config, self._learner, effect.batch, effect.share)
        return StepDone(tokens, samples, 0, self._fleet.queue(self._learner, effect, self.optimizer))


class FleetExecutor:
    """Makes the executor of every worker of a virtual run whose learners share a device."""

    def __init__(
        self, task: Task, device: torch.device, *, learners: int | None = None, compute: ComputeMode = PLAIN
    ) -> None:
        if task.config.protocol.contribution == "gradient":
            raise ConfigError("preset ddp: a fleet cannot run it; train one learner with the whole batch, which is the same")
        self.task, self._device = task, device
        self.fleet = Fleet(task, learners or task.config.learners, device, compute)
        self.disk = MemoryVersions(initial_versions(task, device))
        self.snapshots = MemorySnapshots(self.disk)
        self.learners: dict[LearnerId, FleetLearner] = {}

    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        if worker == SYNCER:
            return TensorSyncer(self.task.config, self.task.layout.fragments, self.disk, self.snapshots)
        self.learners[worker] = FleetLearner(self.task, worker, self.fleet, self.snapshots, self._device)
        return self.learners[worker]
