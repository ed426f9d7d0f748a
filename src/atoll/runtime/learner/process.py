"""A learner's process: requests a place and the whole config from the syncer, builds the task, and trains."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from atoll.chaos import Hostile
from atoll.config import CUSTOM, Config, from_builtins
from atoll.errors import PlaceLost, UserError
from atoll.executor.compute import ComputeMode, resolved
from atoll.executor.environment import device_words, tape_header, use_threads
from atoll.executor.learner import TensorLearner
from atoll.executor.peer_state import state_bytes_max
from atoll.executor.virtual_run import checked_device
from atoll.ids import SECOND
from atoll.protocol.vocabulary import Resumed, StepDone
from atoll.runtime.learner.address import Address, open_tape, request_place
from atoll.runtime.learner.leaving import LEAVE_FILE, LeaveRequests
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.learner.place import kept_place, moved_out, own_directory
from atoll.runtime.learner.snapshots import LearnerSnapshots, learner_state_of
from atoll.runtime.loop import LoopThread
from atoll.runtime.metrics import MetricsAt, learner_metrics
from atoll.runtime.syncer.places import Placement
from atoll.store.tokenizer_file import tokenizer_setting
from atoll.tape.format import Header
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task
from atoll.workload.data.allowed import allowed_folders, refuse_outside

log = logging.getLogger("atoll.learner")

LOG_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerOptions:
    address: Address
    wants: int = -1
    out: Path | None = None
    device: str = "cpu"
    threads: int = 1
    allowed: Collection[str] = ()
    resume: Path | None = None
    """This learner's part of a snapshot."""
    data_folders: Sequence[Path] = ()
    """The folders that it reads data from; empty: the working directory."""
    leave_seconds: float | None = None
    """How long it has to leave when it is asked to; None: as the run's limits say."""
    leave_file: Path | None = None
    """A file that asks it to leave by appearing."""
    obey_stdin: bool = False
    """A launcher holds the other end: it sends `slow FACTOR` and `attack JSON`; the learner leaves when the pipe closes."""
    metrics: MetricsAt | None = None


def run_worker(options: WorkerOptions) -> bool:
    """Returns when the run is over, or, with True, when this learner was asked to leave and has left before."""
    leaving = LeaveRequests(
        options.leave_seconds, [options.leave_file] if options.leave_file is not None else [], returns=options.out is not None
    )
    leaving.listen_to_signals()
    use_threads(options.threads)
    device = checked_device(options.device)
    folders = allowed_folders(options.data_folders)
    loop = LoopThread()
    try:
        placement: Placement = loop.run(request_place(options.address, options.wants, random.Random(), kept_place(options.out)))
        config = from_builtins(placement.config)
        refuse_outside(config.data, folders)
        task = task_for_placement(config, placement, options.allowed)
        launcher = Launcher(options.obey_stdin)
        while isinstance(lost := _train_at(placement, options, task, device, loop, launcher, leaving), PlaceLost):
            if leaving.asked:
                return True
            log.warning("%s; this process asks for another place", lost)
            before, address = placement, replace(options.address, run=placement.run)
            placement = loop.run(request_place(address, -1, random.Random()))
            options = replace(options, address=address, out=moved_out(options.out, before, placement), resume=None)
        return lost
    finally:
        loop.stop()


def _train_at(
    placement: Placement, options: WorkerOptions, task: Task, device: torch.device, loop: LoopThread, launcher: Launcher,
    leaving: LeaveRequests,
) -> PlaceLost | bool:  # fmt: skip
    """Until the run is over, or this learner has left (True), or another process was given this place while this one was away."""
    log.info("this is learner %d, incarnation %d, of run %s", placement.learner, placement.incarnation, placement.run)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(own_directory(options.out, placement))
        leaving.look_for(directory / LEAVE_FILE)
        snapshots = LearnerSnapshots(directory, placement.run, task.config, options.resume)
        stack.callback(snapshots.close)
        executor = TensorLearner(task, placement.learner, snapshots, device=device)
        stack.callback(executor.close)
        if resolved(task.config, device).compiled:
            log.info("torch.compile builds the step: this takes up to a minute, and none of it is step time")
        compute = executor.prepare()
        log.info("inner steps run on %s in %s", device, compute)
        tape = open_tape(directory, placement, _header(placement, task.config, task, device, compute))
        metrics = stack.enter_context(learner_metrics(options.metrics, task.config, placement.learner, directory))
        resumed = Resumed(*learner_state_of(options.resume)) if options.resume is not None else None
        live = LiveLearner(
            options.address, placement, executor, tape=tape, resumed=resumed, loop=loop.loop,
            state_bytes_max=state_bytes_max(task.layout.fragments), arriving=executor.arriving, metrics=metrics,
            largest_fragment=max(fragment.numel for fragment in task.layout.fragments),
        )  # fmt: skip
        stack.callback(live.close)
        snapshots.on_written, live.on_kept = live.dispatch, snapshots.keep
        launcher.when_orphaned(lambda: live.leave("its launcher is gone"))
        launcher.when_attacking(live.attack)
        live.start()
        try:
            with leaving.told_to(live.leave):
                _train(live, executor, launcher)
        except PlaceLost as lost:
            return lost
        return leaving.asked and not live.finished


def task_for_placement(config: Config, placement: Placement, allowed: Collection[str]) -> Task:
    if config.model.name == CUSTOM:
        raise UserError("model.name = 'custom': this run trains a user's model; join it from your own loop with atoll.join(...)")
    task = task_for(config, allowed)
    if task.layout.fingerprint != placement.layout:
        raise UserError("the model built here has other tensors than the syncer's; install the same atoll and torch")
    if task.tokenizer is not None and placement.tokenizer not in ("", task.tokenizer.fingerprint):
        raise UserError(
            f"{tokenizer_setting(config.data)} gives another tokenizer here than at the syncer, so the same ids would mean "
            "other tokens; "
            "use the same text or file on both machines"
        )
    if task.fingerprint != placement.data_fingerprint:
        log.warning("the data here is not the syncer's (another Python or corpus): training goes on, replay --weights will fail")
    return task


def _header(placement: Placement, config: Config, task: Task, device: torch.device, compute: ComputeMode) -> Header:
    return tape_header(
        config, data_fingerprint=task.fingerprint, tensors=True, device=device_words(device), run=placement.run,
        worker=placement.learner, epoch=placement.epoch, compute=str(compute),
    )  # fmt: skip


class Launcher:
    """What the launcher's chaos plan asks of a learner: every step takes `factor` times as long, or it attacks the syncer."""

    def __init__(self, obey_stdin: bool) -> None:
        self.factor = 1.0
        self._never = threading.Event()
        self._is_orphaned = threading.Event()
        self._when_orphaned: Callable[[], None] = lambda: None
        self._when_attacking: Callable[[Hostile | None], None] = lambda _: None
        if obey_stdin:
            threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, value = line.partition(" ")
            if word == "slow":
                self.factor = float(value)
            elif word == "attack":
                self._when_attacking(msgspec.json.decode(value, type=Hostile | None))
        self._is_orphaned.set()
        self._when_orphaned()

    def when_orphaned(self, leave: Callable[[], None]) -> None:
        """The launcher is gone, now or later."""
        self._when_orphaned = leave
        if self._is_orphaned.is_set():
            leave()

    def when_attacking(self, attack: Callable[[Hostile | None], None]) -> None:
        self._when_attacking = attack

    def delay(self, nanos: int) -> None:
        if self.factor > 1.0:
            self._never.wait((self.factor - 1.0) * nanos / SECOND)


def _train(live: LiveLearner, executor: TensorLearner, launcher: Launcher) -> None:
    """Report, adopt what is due, inner step, repeat. The machine does the first two between steps."""
    logged_at = time.monotonic()
    while (step := live.next_step()) is not None:
        began = time.monotonic_ns()
        (done,) = executor.execute(step, None)
        assert isinstance(done, StepDone)
        launcher.delay(time.monotonic_ns() - began)
        live.step_done(msgspec.structs.replace(done, nanos=time.monotonic_ns() - began))
        if time.monotonic() - logged_at > LOG_EVERY_SECONDS:
            logged_at = time.monotonic()
            loss = f"loss {done.loss:.4f}" if done.loss is not None else ""
            log.info("local step %d, step %d of the run, %s; %s", step.local_step, step.outer_step, loss, live.rates())
