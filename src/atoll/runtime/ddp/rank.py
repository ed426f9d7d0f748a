"""One rank of data-parallel training: a process with torch's own DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from atoll.config import load
from atoll.errors import AtollError, NotFinite, UserError
from atoll.executor.compute import compiling, loss_of, resolved
from atoll.executor.cuda.transfer import to_device
from atoll.executor.environment import use_threads
from atoll.executor.optim.build import build_optimizer, divisors, optimizer_step
from atoll.executor.virtual_run import evaluated_on
from atoll.ids import LearnerId, Nanos, seconds
from atoll.runtime.ddp.report import HeldoutReport, Job, RankFailed, RankReport, Stepped
from atoll.store.tokenizer_file import write_tokenizer_file
from atoll.store.versions import digest
from atoll.store.weights import THETA_FILE, save_weights
from atoll.tape.heldout import HeldoutPoint
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task, initial_model
from atoll.tensors.access import named_tensors, read_buffers, read_params, write_buffers
from atoll.tensors.merge import merge_buffers
from atoll.workload.data.seeds import generator

TIMEOUT = timedelta(minutes=30)
"""The parent notices a dead rank at once; this ends a run whose ranks are alive and make no progress."""


class _Clock:
    """A rank's clock. It is paused while rank 0 evaluates the held-out loss and the others wait: that is not training time."""

    def __init__(self) -> None:
        self._paused: Nanos = 0

    def now(self) -> Nanos:
        return time.monotonic_ns() - self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic_ns()
        yield
        self._paused += time.monotonic_ns() - began


class _AllReduce:
    """Torch's all-reduce, timed. On CUDA the host runs ahead, so the times come from events on the stream."""

    def __init__(self, device: torch.device, clock: _Clock) -> None:
        self._clock = clock
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._gradients_ready: Nanos = 0
        self.gradient_bytes = 0

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        assert dist.group.WORLD is not None
        self.gradient_bytes += bucket.buffer().nbytes
        self._gradients_ready = self._clock.now()  # buckets come in order, so the last one's time remains
        if self._events:
            self._events[0].record()
        return allreduce_hook(dist.group.WORLD, bucket)

    def finish(self) -> tuple[Nanos, Nanos]:
        """After the backward pass: when this rank's gradients were ready, and when the all-reduce was done."""
        if not self._events:
            return self._gradients_ready, self._clock.now()
        self._events[1].record()
        self._events[1].synchronize()
        now = self._clock.now()
        return now - round(1e6 * self._events[0].elapsed_time(self._events[1])), now


def _train(task: Task, rank: LearnerId, device: torch.device, channel: BinaryIO) -> tuple[RankReport, nn.Module]:
    config, count = task.config, task.config.inner.accumulate
    compute = resolved(config, device)
    task, loss_of_step = evaluated_on(task, device), loss_of(task.loss, compute, device)
    model = initial_model(task).to(device)
    loss_first = task.evaluate(model) if rank == 0 else None
    tensors = named_tensors(model)
    optimizer = build_optimizer(config, {n: t for n, t in tensors.items() if t.requires_grad}, task.layout.fragments)
    clock = _Clock()
    reduction = _AllReduce(device, clock)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.11 lacks the name that it recommends
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
    parallel.register_comm_hook(reduction, lambda state, bucket: state.start(bucket))
    tokens, waited, gathered = 0, 0, 0
    _barrier(device)  # all ranks start their clocks together
    first = ended = clock.now()
    for step in range(config.total_steps):
        began, total = ended, 0.0
        torch.manual_seed(generator("inner step", config.seed, rank, step).initial_seed())
        batches = [task.batch(rank, rank, step * count + micro) for micro in range(count)]
        counted = [task.count(batch) for batch in batches]
        counts = [count_of[0] for count_of in counted]
        tokens += sum(counts)
        for micro, (batch, part) in enumerate(zip(batches, divisors(counts), strict=True)):
            with parallel.no_sync() if micro + 1 < count else contextlib.nullcontext():
                with compiling(config.model.name):
                    loss = loss_of_step(parallel, to_device(batch, device))
                (loss / part if count > 1 else loss).backward()
            total += float(loss.detach()) / part
        ready, reduced = reduction.finish()
        if not math.isfinite(total):
            raise NotFinite(f"the train loss of rank {rank} in step {step + 1}")
        optimizer_step(config, optimizer, step)
        gathered += _merge_buffers(task, tensors)
        waited, ended = waited + reduced - ready, clock.now()
        samples = sum(count_of[1] for count_of in counted)
        _report(channel, Stepped(step, began, ready, reduced, ended, total, rank, sum(counts), samples))
        if config.data.heldout_every and (step + 1) % config.data.heldout_every == 0 and step + 1 < config.total_steps:
            with clock.paused():
                if rank == 0:
                    _report(channel, HeldoutReport(HeldoutPoint(step + 1, task.evaluate(model))))
                _barrier(device)
    params = [read_params(tensors, fragment).cpu() for fragment in task.layout.fragments]
    buffers = [read_buffers(tensors, fragment).cpu() for fragment in task.layout.fragments]
    sent = round(reduction.gradient_bytes * 2 * (config.learners - 1) / config.learners) + gathered
    return RankReport(
        rank, str(device), config.total_steps, tokens, seconds(ended - first - waited), seconds(waited), sent,
        digest(params + buffers), loss_first, task.evaluate(model) if rank == 0 else None,
        task.accuracy(model) if rank == 0 and task.accuracy is not None else None,
    ), model  # fmt: skip


def _barrier(device: torch.device) -> None:
    """Returns when all ranks, and their GPUs, have reached it."""
    dist.all_reduce(token := torch.zeros(1, device=device))
    token.item()


def _merge_buffers(task: Task, tensors: Mapping[str, Tensor]) -> int:
    """Merges batch-norm statistics after each step, as the virtual preset's syncer does. Returns the bytes sent."""
    ranks, sent = task.config.learners, 0
    for fragment in task.layout.fragments:
        if fragment.buffers:
            own = read_buffers(tensors, fragment)
            gathered = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(gathered, own)
            write_buffers(tensors, fragment, merge_buffers(gathered, [1.0] * ranks, fragment))
            sent += own.numel() * own.element_size() * (ranks - 1)
    return sent


def _report(channel: BinaryIO, message: Stepped | HeldoutReport | RankFailed | RankReport) -> None:
    channel.write(msgspec.json.encode(message) + b"\n")


def _rank(directory: Path, rank: LearnerId, channel: BinaryIO) -> None:
    job = msgspec.json.decode((directory / "ddp.json").read_bytes(), type=Job)
    use_threads(job.threads)
    config, device = load(directory / "config.toml"), torch.device(job.devices[rank])
    task = task_for(config, job.allowed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # All ranks are on this machine: the loopback needs no name resolution, and a file store needs no free port.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = dist.FileStore(str(directory / "rendezvous"), config.learners)  # type: ignore[attr-defined]
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=config.learners, timeout=TIMEOUT,
        device_id=device if job.backend == "nccl" else None,
    )  # fmt: skip
    report, model = _train(task, rank, device, channel)
    if rank == 0:
        write_tokenizer_file(directory, task)
        save_weights(directory / THETA_FILE, named_tensors(model))
    (directory / f"rank-{rank}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _report(channel, report)


def main() -> int:
    """`python -m atoll.runtime.ddp.launch RUN_DIR RANK`; only the parent calls it."""
    released = threading.Event()

    def watch() -> None:
        if not os.read(0, 1):
            os._exit(1)
        released.set()

    threading.Thread(target=watch, daemon=True).start()
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library's prints go to stderr
    try:
        _rank(Path(sys.argv[1]), int(sys.argv[2]), channel)
    except (AtollError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        _report(channel, RankFailed(str(error), isinstance(error, UserError)))
        return 1
    released.wait()
    dist.destroy_process_group()
    return 0
