"""`atoll.join`: a user's training loop becomes a learner. Three lines of it change.

    with atoll.join("syncer.example:7077", model, optimizer) as learner:
        for batch in learner.shard(dataset):
            loss = compute(model, batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)

Model, optimiser, precision, schedule and data stay the user's. Weights and buffers are changed in place, and only inside `step`
(and once inside `with`, when Theta is loaded). `step` does what every learner does at a step boundary: the same machine decides
and the same executor acts, in the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from atoll.config import Config, from_builtins
from atoll.errors import AtollError, ConfigError, DataError, PlaceLost, RunFailed, UserError
from atoll.executor.cuda.losses import LateLosses
from atoll.executor.environment import tape_header
from atoll.executor.learner import TensorLearner
from atoll.executor.peer_state import state_bytes_max
from atoll.ids import SECOND, LearnerId, OuterStep
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.vocabulary import InnerStep, Message, Resumed, StepDone
from atoll.runtime.join import checks
from atoll.runtime.join.executor import UserExecutor, task_of
from atoll.runtime.join.upload import OwnWeights, agree_on_model
from atoll.runtime.learner.address import Address, open_tape, request_place
from atoll.runtime.learner.leaving import LEAVE_FILE, LeaveRequests
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.learner.place import kept_place, moved_out, own_directory
from atoll.runtime.learner.snapshots import LearnerSnapshots, learner_state_of
from atoll.runtime.loop import LoopThread
from atoll.runtime.metrics import MetricsAt, learner_metrics
from atoll.runtime.syncer.places import Placement
from atoll.tape.format import TapeWriter
from atoll.tasks.task import Task, layout_for
from atoll.tensors.access import named_tensors
from atoll.tensors.inventory import frozen_digest, frozen_parameters
from atoll.workload.data.deal import Deal

log = logging.getLogger("atoll.learner")

SKIPS_MAX: Final = 100
"""Optimiser steps in a row that a gradient scaler may skip. It halves its scale each time, so more are not due to overflow."""


class StepDriver(Protocol):
    """What takes a loop from step to step: a `LiveLearner`, or a rank's part of one."""

    @property
    def placement(self) -> Placement: ...

    @property
    def over(self) -> bool: ...

    def next_step(self) -> InnerStep | None: ...

    def step_done(self, done: StepDone) -> Any: ...

    def leave(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None: ...


class Learner:
    """Made by `join`, usable inside `with`. Only the training thread may call it."""

    def __init__(
        self, address: Address, model: nn.Module, optimizer: torch.optim.Optimizer, *, wants: int = -1, out: Path | None = None,
        metrics: MetricsAt | None = None, leaving: LeaveRequests | None = None, resume: Path | None = None,
    ) -> None:  # fmt: skip
        self._address = address
        self._resume = resume
        self._leaving = leaving or LeaveRequests()
        self._model = model
        self._optimizer = optimizer
        self._wants = wants
        self._out = out
        self._metrics = metrics
        self._tensors: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}
        self._device: torch.device
        self._at_exit = contextlib.ExitStack()
        self._place = contextlib.ExitStack()
        self._loop: LoopThread
        self._task: Task
        self._live: StepDriver
        self.rank = 0
        self.ranks = 1
        self.config: Config
        self._current: InnerStep | None = None
        self._outer_step: OuterStep = 0
        self._began = 0
        self._step_nanos = 0
        self._completed = 0
        self._nesting = 0
        self._skipped = 0
        self._attached = False
        self._checked = False
        self._counts = _StepCounts()
        self._late = LateLosses()

    # ------------------------------------------------------------ progress of the run

    @property
    def over(self) -> bool:
        """The run has ended, or this learner has left it."""
        return self._current is None or self._live.over

    @property
    def outer_step(self) -> OuterStep:
        """The run's outer step, as this learner knew it at its last step."""
        return self._outer_step

    @property
    def progress(self) -> float:
        """The share of the run that is done, 0 to 1. A schedule that follows it is the same for fast, slow and late learners."""
        return 1.0 if self._current is None else min(1.0, self._outer_step / self.config.total_steps)

    @property
    def id(self) -> LearnerId:
        return self._live.placement.learner

    # ------------------------------------------------------------ steps

    def step(self, tokens: int = 0, loss: Tensor | float | None = None, samples: int | None = None) -> bool:
        """Call it after every `optimizer.step()`, or `scaler.step(optimizer)`. It may change weights.

        `tokens` and `samples` are the data of this step; a learner's weight in a merge follows from them. Every rank of a learner
        calls it, with its own data and loss: they are added up, and the loss is the mean over tokens. A loss on a GPU is told
        one step late, so that nothing waits for this step. Returns True if the step counted. False: the scaler skipped the step
        (its gradients overflowed), so nothing was trained or reported; or the run is over.
        """
        if self._attached:
            raise UserError("learner.step: this learner is attached, so its optimiser reports steps; call learner.count instead")
        self.count(tokens, loss, samples)
        return self._boundary()

    def count(self, tokens: int = 0, loss: Tensor | float | None = None, samples: int | None = None) -> None:
        """Adds to the counts of the next completed step: for micro-batches, and for trainers that own the loop."""
        if tokens < 0 or (samples or 0) < 0:
            raise UserError(f"learner.count: tokens = {tokens}, samples = {samples}: neither can be negative")
        self._counts.add(int(tokens), loss, samples)

    def attach(self) -> None:
        """From now on every completed optimiser step is reported automatically, with the counts of `count`: for trainers that
        own the loop. Weights then change at the end of `optimizer.step()`; to a trainer's loop this is part of the step."""
        self._attached = True

    def leave(self, reason: str = "asked to leave", within_seconds: float | None = None) -> None:
        """Trains on until its work is merged, at most so long (by default limits.leave_seconds), then is `over`. A second call
        leaves at once. A signal handler may call it. With `out` its place is kept for a return."""
        self._live.leave(reason, within_seconds, returns=self._out is not None)

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._nesting += 1

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A scaler that finds Inf does not call the optimiser; a fused optimiser is called and skips by this flag. An optimiser
        that calls its parent's `step` runs this hook twice: the step is done when the outermost call is."""
        self._nesting -= 1
        if self._nesting > 0:
            return
        found = getattr(optimizer, "found_inf", None)
        if found is None or not bool(found):
            self._completed += 1
        if self._attached:
            self._boundary()

    def _boundary(self) -> bool:
        completed, self._completed, self._nesting = self._completed, 0, 0
        counts, self._counts = self._counts, _StepCounts()
        if self.over:
            self._current = None
            return False
        if completed > 1:
            raise UserError(f"optimizer.step() was called {completed} times since learner.step(): call it after each")
        if not self._report(self._step_done(counts) if completed else None):
            self._skip()
            return False
        self._skipped = 0
        self._take_next()
        return True

    def _step_done(self, counts: _StepCounts) -> StepDone:
        if not self._checked:
            self._check_first_step()
        self._refuse_unfrozen()
        counts.tell_late(self._late)
        self._step_nanos = time.monotonic_ns() - self._began
        return StepDone(counts.tokens, counts.samples, self._step_nanos, counts.mean_loss())

    def _forget_counts(self) -> None:
        """Of a step that is begun anew."""
        self._counts = _StepCounts()

    def _report(self, done: StepDone | None) -> bool:
        """None: the step was skipped."""
        if done is not None:
            self._live.step_done(done)
        return done is not None

    def _take_next(self) -> None:
        """Waits only if the preset requires it; that time is not part of the step."""
        try:
            self._current = self._live.next_step()
        except PlaceLost as lost:
            self._rejoin(lost)
            self._current = self._live.next_step()
        self._began = time.monotonic_ns()
        if self._current is not None:
            self._outer_step = self._current.outer_step

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped > SKIPS_MAX:
            raise RunFailed(
                f"no optimiser step completed in {SKIPS_MAX} attempts: either optimizer.step() is not called before "
                f"learner.step(), or the gradients are NaN or Inf at every scale"
            )

    def _check_first_step(self) -> None:
        """Checks that `join` could not make: optimisers create their state in the first step, and trainers move models."""
        self._checked = True
        checks.refuse_untransferable(self._optimizer)
        now, device = named_tensors(self._model), self._device
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor or tensor.device != device:
                raise ConfigError(
                    f"{name} was replaced or moved after atoll.join: move the model to its device and dtype first, then join"
                )

    def _refuse_unfrozen(self) -> None:
        """Fragments were cut in `join`, without the frozen parameters: one that is unfrozen later would train here only."""
        for name, tensor in self._frozen.items():
            if tensor.requires_grad:
                raise ConfigError(
                    f"parameter {name} was frozen in atoll.join and trains now, but is not exchanged: unfreeze it before "
                    f"atoll.join, on every learner, or leave it frozen"
                )

    # ------------------------------------------------------------ data

    def shard(
        self, dataset: Any, batch_size: int | None = None, collate: Callable[[list[Any]], Any] = default_collate
    ) -> Iterator[Any]:
        """Batches of this learner's share until the run is over. No other learner gets the same batches, and the share of a lost
        learner goes to others. One step takes `inner.accumulate` batches. A step that a scaler skipped is repeated with the same
        batches. Each rank of a learner gets batches of its own, of `batch_size` samples."""
        deal, size = self._deal(dataset), batch_size or self.config.data.batch_size
        if size < 1:
            raise UserError(f"learner.shard: batch_size = {batch_size}: must be at least 1")
        return self._batches(dataset, deal, size, collate)

    def subset(self, dataset: Any) -> Subset[Any]:
        """This learner's share as a dataset, for data loaders with workers and for trainers with their own loaders. It is
        disjoint from the shares of the other ids below the recipe's `learners`, and fixed: it does not follow the membership."""
        return Subset(dataset, self._deal(dataset).epoch_order(self.id, 0).tolist())

    def _deal(self, dataset: Any) -> Deal:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"a {type(dataset).__name__} has no length and no [index], so its samples cannot be divided: shard it by "
                f"learner.id and loop `while not learner.over`"
            )
        return Deal(len(dataset), self.config.seed, self.config.learners)

    def _batches(self, dataset: Any, deal: Deal, size: int, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
        count = self.config.inner.accumulate
        while not self.over and (step := self._current) is not None:
            skipped = self._skipped
            for micro in range(count):
                together = deal.batch(step.stream, step.batch * count + micro, size * self.ranks)
                indices = together[self.rank * size : (self.rank + 1) * size]
                self._counts.drawn += len(indices)
                yield collate([dataset[i] for i in indices])
                if self._current is not step and micro + 1 < count and not self.over:
                    raise UserError(
                        f"an optimiser step after {micro + 1} batches: one step is inner.accumulate = {count} batches"
                    )
            if self._current is step and self._attached:
                self._skip()
            elif self._current is step and self._skipped == skipped:
                raise UserError(
                    "the loop took another batch before learner.step(): call it after each optimizer.step(); to accumulate "
                    "gradients over several batches, set inner.accumulate in the syncer's recipe"
                )

    # ------------------------------------------------------------ joining and leaving

    def __enter__(self) -> Learner:
        """Returns with Theta in the model, ready for the first step."""
        self._frozen = frozen_parameters(self._model)
        with contextlib.ExitStack() as stack:
            self._connect(stack)
            stack.push(self._leave_on_exit)
            self._take_next()
            stack.callback(self._optimizer.register_step_pre_hook(self._step_begins).remove)
            stack.callback(self._optimizer.register_step_post_hook(self._step_ended).remove)
            self._at_exit = stack.pop_all()
        return self

    def _connect(self, stack: contextlib.ExitStack) -> None:
        frozen = frozen_digest(self._model)  # before the request: a large model takes longer than a place stays reserved
        self._loop = LoopThread()
        stack.callback(self._loop.stop)
        placement = self._request_place()
        self._take_place(placement)
        weights = OwnWeights(self._tensors, self._task.layout.fragments)
        self._loop.run(agree_on_model(self._address, placement, self._task.layout, weights, frozen))
        stack.callback(lambda: self._place.close())
        self._begin(placement)

    def _request_place(self) -> Placement:
        kept = kept_place(self._out)
        placement: Placement = self._loop.run(request_place(self._address, self._wants, random.Random(), kept))
        return placement

    def _take_place(self, placement: Placement) -> None:
        self.config = from_builtins(placement.config)
        self._task = self._task_for(placement)
        self._tensors = named_tensors(self._model)
        self._device = checks.device_of(self._tensors)

    def _task_for(self, placement: Placement) -> Task:
        checks.refuse_unfit_run(self.config)
        return task_of(self.config, layout_for(self.config, self._model))

    def _begin(self, placement: Placement) -> None:
        """Connects as this learner, for as long as it has the place."""
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(own_directory(self._out, placement))
            snapshots = LearnerSnapshots(directory, placement.run, self.config, self._resume)
            stack.callback(snapshots.close)
            executor, arriving = self._executor(placement, snapshots, stack)
            tape = _new_tape(directory, placement, self.config, self._device)
            metrics = stack.enter_context(learner_metrics(self._metrics, self.config, placement.learner, directory))
            live = LiveLearner(
                self._address, placement, executor, tape=tape, loop=self._loop.loop,
                resumed=Resumed(*learner_state_of(self._resume)) if self._resume is not None else None,
                state_bytes_max=state_bytes_max(self._task.layout.fragments), arriving=arriving, metrics=metrics,
                spool=self._spool(directory), largest_fragment=self._largest_fragment(), reads_into=self._reads_into(),
            )  # fmt: skip
            snapshots.on_written, live.on_kept = live.dispatch, snapshots.keep
            self._started(live)
            live.start()
            stack.callback(live.close)
            self._leaving.look_for(directory / LEAVE_FILE)
            stack.enter_context(self._leaving.told_to(live.leave))
            self._place = stack.pop_all()
        log.info("this is learner %d, incarnation %d, of run %s", placement.learner, placement.incarnation, placement.run)

    def _largest_fragment(self) -> int:
        return max(fragment.numel for fragment in self._task.layout.fragments)

    def _executor(
        self, placement: Placement, snapshots: LearnerSnapshots, stack: contextlib.ExitStack
    ) -> tuple[Executor, Callable[[Message, Payload], Payload] | None]:
        inner = TensorLearner(
            self._task, placement.learner, snapshots, model=self._model, optimizer=self._optimizer, device=self._device
        )
        stack.callback(inner.close)
        return UserExecutor(inner), inner.arriving

    def _spool(self, directory: Path) -> Path | None:
        """Where a peer's state is kept on its way, if not in memory."""
        return None

    def _reads_into(self) -> Tensor | None:
        """Memory for one fragment that the syncer announces, if it is not to be new for each."""
        return None

    def _started(self, live: LiveLearner) -> None:
        self._live = live

    def _rejoin(self, lost: PlaceLost) -> None:
        """Another process was given this learner's place while it was away: it goes on in a new one, from a peer's state."""
        log.warning("%s; this loop asks for another place", lost)
        before = self._live.placement
        self._place.close()
        self._address = replace(self._address, run=before.run)
        placement: Placement = self._loop.run(request_place(self._address, -1, random.Random()))
        self._out = moved_out(self._out, before, placement)
        self._begin(placement)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._at_exit.__exit__(kind, error, trace)

    def _leave_on_exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an exception it leaves at once, because the weights may be in any state. Otherwise staged copies may still be
        pulled; but no step boundary follows, so it waits no longer than for the rounds in flight."""
        live, self._current = self._live, None
        if live.over:
            return
        if kind is not None:
            # A sentence of our own says more than its type; what a user's exception says may be private.
            reason = str(error) if isinstance(error, AtollError) else f"its loop ended by {kind.__name__}"
            live.leave(reason)
            live.leave(reason)
            return
        rounds = self.config.protocol.overlap + 1
        seconds = min(self.config.limits.leave_seconds, max(0.5, 2 * rounds * self._step_nanos / SECOND))
        again = threading.Timer(seconds, live.leave, ("its loop ended",))
        again.daemon = True
        again.start()
        try:
            live.leave("its loop ended")
            live.next_step()
        except AtollError as failed:
            log.warning("the learner left without telling the syncer: %s", failed)
        finally:
            again.cancel()
            again.join()


class _StepCounts:
    """Counts and losses of the current step."""

    def __init__(self) -> None:
        self.tokens = 0
        self.drawn = 0
        self._samples: int | None = None
        self._losses: list[Tensor | float] = []

    def add(self, tokens: int, loss: Tensor | float | None, samples: int | None) -> None:
        self.tokens += tokens
        if samples is not None:
            self._samples = (self._samples or 0) + int(samples)
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    @property
    def samples(self) -> int:
        return self.drawn if self._samples is None else self._samples

    def tell_late(self, late: LateLosses) -> None:
        """On a GPU the losses are those of the step before."""
        if any(isinstance(loss, Tensor) and loss.is_cuda for loss in self._losses):
            self._losses = late.following(self._losses)

    def mean_loss(self) -> float | None:
        """Reads from the device only here, once per step. NaN is not reported: the weights show it, and are refused."""
        if not self._losses:
            return None
        mean = sum(float(loss) for loss in self._losses) / len(self._losses)
        return mean if math.isfinite(mean) else None


def _new_tape(directory: Path, placement: Placement, config: Config, device: torch.device) -> TapeWriter:
    """Without tensors: for a user's own loop only the decisions can be replayed."""
    header = tape_header(
        config, data_fingerprint="", tensors=False, device=str(device), run=placement.run, worker=placement.learner,
        epoch=placement.epoch,
    )  # fmt: skip
    return open_tape(directory, placement, header)
