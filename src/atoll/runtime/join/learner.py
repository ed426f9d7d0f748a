"""`atoll.join`: a training loop of anybody's own becomes a learner. Three lines of it change.

    with atoll.join("syncer.example:7077", model, optimizer) as learner:
        for batch in learner.shard(dataset):
            loss = compute(model, batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)

The loop stays the user's: model, optimiser, precision, schedule and data. Weights and buffers are changed in place, and only
inside `step` (and once inside `with`, when Theta is taken over). What happens there is what happens at every learner's
step boundary: the same machine decides, the same hands carry it out, in the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from atoll.config import Config, from_builtins
from atoll.errors import AtollError, ConfigError, DataError, RunFailed, UserError
from atoll.executor.environment import code_version, cpu_capability
from atoll.executor.learner import TensorLearner
from atoll.ids import SECOND, LearnerId, OuterStep
from atoll.protocol.vocabulary import InnerStep, StepDone
from atoll.runtime.join import checks
from atoll.runtime.join.executor import UserExecutor, task_of
from atoll.runtime.join.upload import agree_on_model
from atoll.runtime.learner.address import Address, address_of, ask_for_place, own_directory
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.learner.snapshots import LearnerSnapshots
from atoll.runtime.loop import LoopThread
from atoll.runtime.syncer.places import Placement
from atoll.tape.format import Header, TapeWriter
from atoll.tasks.task import layout_for
from atoll.tensors.access import named_tensors
from atoll.tensors.inventory import frozen_digest, frozen_parameters
from atoll.workload.data.deal import Deal

log = logging.getLogger("atoll.learner")

SKIPS_MAX: Final = 100
"""Optimiser steps in a row that a gradient scaler may skip. It halves its scale each time: so many are no overflow any more."""


def join(
    syncer: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, token: str | Path | None = None,
    keys: str | Path | None = None, name: str | None = None, run: str = "", wants: int = -1, out: str | Path | None = None,
    listen: str = "127.0.0.1:0", advertise: str = "", insecure: bool = False,
) -> Learner:  # fmt: skip
    """A learner of the run at `syncer`, to be entered by `with`. Raises UserError where this loop cannot be one.

    `token`: the join token, or the Path of a file that holds it; by default the one in `keys`, else ATOLL_TOKEN.
    `keys`: folder with certificates, made by `atoll keys`; by default ATOLL_KEYS. `name`: whose certificate of it.
    `run`: join only this run. `wants`: the learner id to ask for. `out`: where tape and snapshots go.
    `listen`: where peers that recover are served, "" serves nobody; `advertise`: what they are told to dial.
    `insecure`: talk in the clear to another machine.
    """
    plain = checks.unwrapped_model(model)
    inner = checks.unwrapped_optimizer(optimizer)
    checks.refuse_many_ranks(plain)
    tensors = named_tensors(plain)
    checks.device_of(tensors)
    checks.refuse_strange_optimizer(plain, tensors, inner)
    folder = Path(keys) if keys is not None else None
    address = address_of(syncer, token, folder, name, run, listen, advertise, insecure)
    return Learner(address, plain, inner, wants=wants, out=Path(out) if out is not None else None)


class Learner:
    """Made by `join`, alive inside `with`. All of it is for the one thread that trains."""

    def __init__(
        self, address: Address, model: nn.Module, optimizer: torch.optim.Optimizer, *, wants: int = -1, out: Path | None = None
    ) -> None:
        self._address = address
        self._model = model
        self._optimizer = optimizer
        self._wants = wants
        self._out = out
        self._tensors: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}
        self._device: torch.device
        self._at_exit = contextlib.ExitStack()
        self._live: LiveLearner
        self.config: Config
        self._current: InnerStep | None = None
        self._outer_step: OuterStep = 0
        self._began = 0
        self._step_nanos = 0
        self._completed = 0
        self._inside = 0
        self._skipped = 0
        self._attached = False
        self._checked = False
        self._counted = _Counted()

    # ------------------------------------------------------------ where the run stands

    @property
    def over(self) -> bool:
        """The run has ended, or this learner has left it."""
        return self._current is None or self._live.over

    @property
    def outer_step(self) -> OuterStep:
        """The run's, as far as this learner had heard of it at its last step."""
        return self._outer_step

    @property
    def progress(self) -> float:
        """0 to 1: how much of the run is done. A schedule that follows it is the same for all learners, fast or slow, and
        for one that comes late."""
        return 1.0 if self._current is None else min(1.0, self._outer_step / self.config.total_steps)

    @property
    def id(self) -> LearnerId:
        return self._live.placement.learner

    # ------------------------------------------------------------ steps

    def step(self, tokens: int = 0, loss: Tensor | float | None = None, samples: int | None = None) -> bool:
        """Call it after every `optimizer.step()`, or `scaler.step(optimizer)`. Weights may change in here.

        `tokens` and `samples` are what the step was taken over: a learner weighs in a merge by them. True: it counted. False:
        the scaler skipped the step (its gradients overflowed), so nothing was trained and nothing is reported, or the run
        is over.
        """
        if self._attached:
            raise UserError("learner.step: this learner is attached, its optimiser reports by itself; call learner.count instead")
        self.count(tokens, loss, samples)
        return self._boundary()

    def count(self, tokens: int = 0, loss: Tensor | float | None = None, samples: int | None = None) -> None:
        """Adds to what the next completed step is reported with: for micro-batches, and for loops that are not yours."""
        if tokens < 0 or (samples or 0) < 0:
            raise UserError(f"learner.count: tokens = {tokens}, samples = {samples}: neither can be negative")
        self._counted.add(int(tokens), loss, samples)

    def attach(self) -> None:
        """From now on every completed optimiser step reports itself, with what was `count`ed: for trainers that own the loop.
        Weights then change at the end of `optimizer.step()`, which a trainer's loop cannot tell from the step itself."""
        self._attached = True

    def leave(self, reason: str = "asked to leave") -> None:
        """Go on until what was trained is merged (at most limits.leave_seconds), then be `over`. Asked twice: at once. May be
        called by a signal handler."""
        self._live.leave(reason)

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._inside += 1

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A scaler that finds Inf does not call the optimiser at all; a fused one is called, and skips by this flag. An
        optimiser that calls its parent's step brings us here twice: the step is done when the outermost is."""
        self._inside -= 1
        if self._inside > 0:
            return
        found = getattr(optimizer, "found_inf", None)
        if found is None or not bool(found):
            self._completed += 1
        if self._attached:
            self._boundary()

    def _boundary(self) -> bool:
        completed, self._completed, self._inside = self._completed, 0, 0
        counted, self._counted = self._counted, _Counted()
        if self.over:
            self._current = None
            return False
        if completed > 1:
            raise UserError(f"optimizer.step() was called {completed} times since learner.step(): call it after each")
        if completed == 0:
            self._skip()
            return False
        self._skipped = 0
        if not self._checked:
            self._check_first_step()
        self._refuse_unfrozen()
        self._step_nanos = time.monotonic_ns() - self._began
        self._live.step_done(StepDone(counted.tokens, counted.samples, self._step_nanos, counted.mean_loss()))
        self._take_next()
        return True

    def _take_next(self) -> None:
        """Waits only where the preset is defined to; that is not this step's time."""
        self._current = self._live.next_step()
        self._began = time.monotonic_ns()
        if self._current is not None:
            self._outer_step = self._current.outer_step

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped > SKIPS_MAX:
            raise RunFailed(
                f"no optimiser step completed in {SKIPS_MAX} tries: either optimizer.step() is not called before "
                f"learner.step(), or the gradients hold NaN or Inf whatever the scale"
            )

    def _check_first_step(self) -> None:
        """What could not be seen at the door: optimisers make their state in the first step, and trainers move models."""
        self._checked = True
        checks.refuse_untransferable(self._optimizer)
        now, device = named_tensors(self._model), self._device
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor or tensor.device != device:
                raise ConfigError(
                    f"{name} was replaced or moved after atoll.join: bring the model to its device and dtype first, then join"
                )

    def _refuse_unfrozen(self) -> None:
        """Fragments were cut at the door. What was frozen then is in none: it would train here and never travel."""
        for name, tensor in self._frozen.items():
            if tensor.requires_grad:
                raise ConfigError(
                    f"parameter {name} was frozen at atoll.join and trains now, which would stay on this learner: unfreeze it "
                    f"before atoll.join, on every learner, or leave it frozen"
                )

    # ------------------------------------------------------------ data

    def shard(
        self, dataset: Any, batch_size: int | None = None, collate: Callable[[list[Any]], Any] = default_collate
    ) -> Iterator[Any]:
        """Batches of this learner's share until the run is over: no other learner is given the same, and a learner that is
        lost has its share given to others. `inner.accumulate` of the recipe is how many batches make one step. A step that
        a scaler skipped is tried again with the same batches."""
        deal, size = self._deal(dataset), batch_size or self.config.data.batch_size
        if size < 1:
            raise UserError(f"learner.shard: batch_size = {batch_size}: must be at least 1")
        return self._batches(dataset, deal, size, collate)

    def subset(self, dataset: Any) -> Subset[Any]:
        """This learner's share as a dataset, for data loaders with workers and trainers that bring their own: disjoint from
        the shares of others with ids below the recipe's `learners`, but fixed, whoever comes and goes."""
        return Subset(dataset, self._deal(dataset).hand(self.id, 0).tolist())

    def _deal(self, dataset: Any) -> Deal:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"a {type(dataset).__name__} has no length and no [index], so its samples cannot be dealt out: shard it yourself "
                f"by learner.id and loop `while not learner.over`"
            )
        return Deal(len(dataset), self.config.seed, self.config.learners)

    def _batches(self, dataset: Any, deal: Deal, size: int, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
        count = self.config.inner.accumulate
        while not self.over and (step := self._current) is not None:
            skipped = self._skipped
            for micro in range(count):
                indices = deal.batch(step.stream, step.batch * count + micro, size)
                self._counted.dealt += len(indices)
                yield collate([dataset[i] for i in indices])
                if self._current is not step and micro + 1 < count and not self.over:
                    raise UserError(
                        f"an optimiser step after {micro + 1} batches: the recipe's inner.accumulate = {count} batches make one"
                    )
            if self._current is step and self._attached:
                self._skip()
            elif self._current is step and self._skipped == skipped:
                raise UserError(
                    "another batch was asked for before learner.step(): call it after each optimizer.step(); to accumulate "
                    "gradients over several batches, set inner.accumulate in the syncer's recipe"
                )

    # ------------------------------------------------------------ coming and going

    def __enter__(self) -> Learner:
        """Returns with Theta in the model, ready for the first step: that is joining, not waiting."""
        self._frozen = frozen_parameters(self._model)
        frozen = frozen_digest(self._model)  # before a place is asked for: a big one takes longer than a place is kept free
        with contextlib.ExitStack() as stack:
            loop = LoopThread()
            stack.callback(loop.stop)
            placement: Placement = loop.run(ask_for_place(self._address, self._wants, random.Random()))
            self.config = from_builtins(placement.config)
            checks.refuse_unfit_run(self.config)
            layout = layout_for(self.config, self._model)
            self._tensors = named_tensors(self._model)
            self._device = checks.device_of(self._tensors)
            loop.run(agree_on_model(self._address, placement, layout, self._tensors, frozen))
            directory = own_directory(self._out, placement)
            snapshots = LearnerSnapshots(directory, placement.run, self.config)
            stack.callback(snapshots.close)
            inner = TensorLearner(
                task_of(self.config, layout), placement.learner, snapshots, model=self._model,
                optimizer=self._optimizer, device=self._device,
            )  # fmt: skip
            stack.callback(inner.close)
            executor = UserExecutor(inner, self._tensors)
            tape = _new_tape(directory, placement, self.config, self._device)
            self._live = LiveLearner(self._address, placement, executor, tape=tape, loop=loop.loop)
            self._live.start()
            stack.callback(self._live.close)
            stack.push(self._go)
            log.info("learner %d, incarnation %d, of run %s", placement.learner, placement.incarnation, placement.run)
            self._take_next()
            stack.callback(self._optimizer.register_step_pre_hook(self._step_begins).remove)
            stack.callback(self._optimizer.register_step_post_hook(self._step_ended).remove)
            self._at_exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._at_exit.__exit__(kind, error, trace)

    def _go(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an exception at once: nobody knows what the weights are now. Else what is staged may still be pulled; but no
        step boundary comes any more, so there is nothing to wait for beyond the rounds that are in flight."""
        live, self._current = self._live, None
        if live.over:
            return
        if kind is not None:
            live.leave(f"its loop ended by {kind.__name__}")
            live.leave(f"its loop ended by {kind.__name__}")
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
            log.warning("left without a goodbye: %s", failed)
        finally:
            again.cancel()
            again.join()


class _Counted:
    """What is known of the step that is being trained."""

    def __init__(self) -> None:
        self.tokens = 0
        self.dealt = 0
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
        return self.dealt if self._samples is None else self._samples

    def mean_loss(self) -> float | None:
        """Read from the device only here, once a step. NaN is no number to report: the weights will tell, and be refused."""
        if not self._losses:
            return None
        mean = sum(float(loss) for loss in self._losses) / len(self._losses)
        return mean if math.isfinite(mean) else None


def _new_tape(directory: Path, placement: Placement, config: Config, device: torch.device) -> TapeWriter:
    """Without tensors: a loop of the user's own replays its decisions only."""
    header = Header(
        config=msgspec.to_builtins(config), code_version=code_version(), data_fingerprint="",
        threads=torch.get_num_threads(), dtype=config.model.dtype, device=str(device), torch_version=str(torch.__version__),
        cpu_capability=cpu_capability(), tensors=False, run=placement.run, worker=placement.learner, epoch=placement.epoch,
    )  # fmt: skip
    return TapeWriter.create(directory / f"{placement.incarnation}.tape", header, flush_each=True)
