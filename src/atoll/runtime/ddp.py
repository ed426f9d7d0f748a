"""Data-parallel training by torch itself: the baseline, under the same launcher, data and report as everything else.

`DistributedDataParallel`, one process a rank, rank r on stream r. What it trains is what the virtual `ddp` preset trains
(gradient mean over ranks, the merged gradient clipped, the inner optimiser's step); only the order of summation differs.

The parent and a rank talk through the rank's own pipes. Up its stdout come one JSON line a step and one at the end. Its
stdin brings one byte when every rank is done, so nobody closes a socket that another still reads; and it ends when the
parent dies, however that dies, and the rank with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from atoll.config import Config, load, to_toml
from atoll.errors import AtollError, ConfigError, NotFinite, RunFailed, UserError
from atoll.executor.cuda_learner import to_device
from atoll.executor.environment import use_threads
from atoll.executor.inner import build_optimizer, divisors, optimizer_step
from atoll.executor.kept_text import keep_text
from atoll.executor.syncer import digest
from atoll.executor.tasks import workbench_for
from atoll.executor.weights import save_weights
from atoll.executor.workbench import Workbench
from atoll.ids import LearnerId, Nanos, seconds
from atoll.tape.folder import refuse_used
from atoll.tape.looks import Look, add_look, looks_in
from atoll.tensors.access import named_tensors, read_buffers, read_params, write_buffers
from atoll.tensors.merge import merge_buffers
from atoll.views.run import Summary, Tokens
from atoll.workload.seeds import generator

PATIENCE = timedelta(minutes=30)
"""A dead rank is noticed by the parent at once; this ends a run whose ranks live and do not move."""
USERS_FAULT = 2
STDERR_BYTES = 4096
STDERR_LINES = 3

Progress = Callable[[int, float | None], None]


class Job(msgspec.Struct, frozen=True):
    """What a rank needs beside the config; `ddp.json` in the run's folder, so a run says how it was run."""

    threads: int
    backend: str
    devices: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    """Code of the user's own that may be imported as the model."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One step of one rank, by the machine's monotonic clock, which all its processes share."""

    step: int
    began: Nanos
    ready: Nanos
    """The rank's last gradients went to the all-reduce; from here to `reduced` it had nothing left to compute."""
    reduced: Nanos
    ended: Nanos
    loss: float


class Looked(msgspec.Struct, frozen=True, tag=True):
    """Rank 0, on the way."""

    look: Look


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """The last line of a rank, and its `rank-N.json`."""

    rank: LearnerId
    device: str
    steps: int
    tokens: int
    stepping_seconds: float
    waited_seconds: float
    bytes_sent: int
    """By a ring: 2(M-1)/M of the gradients' bytes each step, and as many received. Initial weights are not counted."""
    theta_sha256: str
    loss_first: float | None
    loss_final: float | None
    accuracy: float | None = None


@dataclass(frozen=True)
class DdpOutcome:
    """Goodput: the share of the ranks' time in which they did not wait. Uptime: of time in which not all of them did.

    Waiting is the time from a rank's own last gradient to the all-reduce's result: for slower ranks and for the wire,
    less what the backward pass hid. On CUDA it is taken on the GPU's stream.
    """

    goodput: float
    uptime: float
    waited_seconds: float
    participants: dict[str, int]
    tokens: int
    bytes_up: int
    bytes_down: int
    loss_first: float | None
    loss_final: float | None
    theta_sha256: str
    seconds: float
    """From the first step's begin to the last one's end; building, evaluating and saving are outside."""
    backend: str
    ranks: tuple[RankReport, ...]
    looks: tuple[Look, ...] = ()


# ---------------------------------------------------------------- the parent


def run_ddp(
    config: Config, directory: Path, *, threads: int, device: str = "cpu", allowed: Sequence[str] = (),
    progress: Progress | None = None, looked: Callable[[Look], None] = lambda look: None,
) -> DdpOutcome:  # fmt: skip
    """Train `config` by one process a learner and return when all have ended. `progress(steps done, mean train loss)`."""
    check(config)
    devices, backend = devices_for(device, config.learners)
    _prepare(directory, config, Job(threads, backend, devices, tuple(allowed)))
    fold = _Fold(config.learners)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_started(directory, rank)) for rank in range(config.learners)]
        reports = _follow(ranks, directory, fold, progress, looked)
    (directory / "rendezvous").unlink(missing_ok=True)
    if len({report.theta_sha256 for report in reports}) > 1:
        raise RunFailed("ddp: the ranks ended with different models, so an all-reduce did not do its work")
    return _outcome(config, backend, fold, reports, looks_in(directory))


def check(config: Config) -> None:
    """Whatever the virtual preset can do and torch's data-parallel cannot is refused by its key."""
    p, sizes = config.protocol, config.data.samples_by_learner
    for key, value, right, sentence in (
        ("protocol.contribution", p.contribution, "gradient", "DistributedDataParallel averages gradients; use --preset ddp"),
        ("protocol.fragments", p.fragments, 1, "DistributedDataParallel moves and clips the model as a whole; use 1"),
        ("protocol.codec_up", p.codec_up, "fp32", "the all-reduce moves gradients as they are; use 'fp32'"),
        ("protocol.codec_down", p.codec_down, "fp32", "the all-reduce moves gradients as they are; use 'fp32'"),
        ("protocol.aggregation_weighting", p.aggregation_weighting, "uniform", "ranks are averaged plainly; use 'uniform'"),
        ("protocol.elastic", p.elastic, False, "a dead rank ends a DistributedDataParallel run; use false"),
        ("protocol.snapshot_interval", p.snapshot_interval, 0, "DistributedDataParallel takes no snapshots; use 0"),
        ("data.samples_by_learner", sizes, sizes[:1] * len(sizes), "ranks are averaged plainly, so their batches must be equal"),
    ):
        if value != right:
            raise ConfigError(f"key {key} = {value!r}: {sentence}")


def devices_for(device: str, count: int) -> tuple[tuple[str, ...], str]:
    """Each rank's device. `cuda` goes round the GPUs; ranks that share one cannot talk by nccl, and use gloo."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return ("cpu",) * count, "gloo"
    if kind != "cuda" or not (device == "cuda" or index.isdecimal()):
        raise UserError(f"device {device!r}: must be cpu, cuda or cuda:N")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there <= (int(index) if index else 0):
        raise UserError(f"device {device!r}: torch {torch.__version__} finds {there} CUDA devices on this machine")
    devices = tuple(device if index else f"cuda:{rank % there}" for rank in range(count))
    return devices, "nccl" if len(set(devices)) == count else "gloo"


def _prepare(directory: Path, config: Config, job: Job) -> None:
    refuse_used(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "ddp.json").open("xb") as file:  # of two that start together one is told, here
            file.write(msgspec.json.encode(job))
        (directory / "config.toml").write_text(to_toml(config), encoding="utf8")
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def _started(directory: Path, rank: LearnerId) -> Iterator[subprocess.Popen[bytes]]:
    """A rank in a process group of its own: Ctrl-C reaches the parent alone, which ends the ranks itself."""
    command = [sys.executable, "-m", __spec__.name, str(directory), str(rank)]
    try:
        with (directory / f"rank-{rank}.err").open("wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0, bufsize=0
            )
    except OSError as error:
        raise RunFailed(f"ddp: rank {rank} could not be started ({error.strerror})") from None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _follow(
    ranks: Sequence[subprocess.Popen[bytes]], directory: Path, fold: _Fold, progress: Progress | None,
    looked: Callable[[Look], None],
) -> list[RankReport]:  # fmt: skip
    """Read what the ranks say until all have ended well; the first that does not ends the run."""
    rests = [b""] * len(ranks)
    reports: dict[LearnerId, RankReport] = {}
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            failed: list[tuple[int, LearnerId]] = []
            for key, _ in selector.select():
                rank = key.data
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                    if code := ranks[rank].wait() or (rank not in reports):
                        failed.append((code, rank))
                    continue
                *lines, rests[rank] = (rests[rank] + chunk).split(b"\n")
                for line in lines:
                    said = msgspec.json.decode(line, type=Stepped | Looked | RankReport)
                    if isinstance(said, RankReport):
                        reports[rank] = said
                    elif isinstance(said, Looked):
                        add_look(directory, said.look)
                        looked(said.look)
                    elif (loss := fold.add(said)) is not None and progress is not None:
                        progress(fold.steps, loss)
                if len(reports) == len(ranks) and rank in reports:
                    _release(ranks)
            if failed:  # killed by a signal is a cause; an error in Python may be a lost peer's echo
                raise _failure(directory, *min(failed))
    return [reports[rank] for rank in sorted(reports)]


def _release(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died in this moment, and its stdout will say so
            process.stdin.write(b".")


def _failure(directory: Path, code: int, rank: LearnerId) -> AtollError:
    with (directory / f"rank-{rank}.err").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_BYTES))
        said = [line.strip() for line in file.read().decode("utf8", "replace").splitlines() if line.strip()]
    if code == USERS_FAULT and said:
        return UserError(said[-1])
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last = f"; its last words: {' | '.join(said[-STDERR_LINES:])}" if said else " without a word"
    return RunFailed(f"ddp: rank {rank} {how}, and data-parallel training cannot go on without it{last}")


class _Fold:
    """Steps of all ranks, as they come in. Ranks are never further apart than one step: an all-reduce needs everybody."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, list[Stepped]] = {}
        self.steps = 0
        self.first: Nanos | None = None
        self.last: Nanos = 0
        self.all_waiting: Nanos = 0

    def add(self, said: Stepped) -> float | None:
        """The mean train loss of a step that this line completes."""
        self.first = said.began if self.first is None else min(self.first, said.began)
        self.last = max(self.last, said.ended)
        steps = self._open.setdefault(said.step, [])
        steps.append(said)
        if len(steps) < self._count:
            return None
        del self._open[said.step]
        self.steps += 1
        # Waits of different steps cannot overlap: nobody begins to wait for the next before this one's end.
        self.all_waiting += max(0, min(s.reduced for s in steps) - max(s.ready for s in steps))
        return sum(s.loss for s in steps) / self._count


def _outcome(
    config: Config, backend: str, fold: _Fold, reports: Sequence[RankReport], looks: Sequence[Look]
) -> DdpOutcome:
    assert fold.first is not None
    clock, moved = seconds(fold.last - fold.first), sum(report.bytes_sent for report in reports)
    return DdpOutcome(
        goodput=sum(report.stepping_seconds for report in reports) / (config.learners * clock),
        uptime=1 - seconds(fold.all_waiting) / clock, waited_seconds=sum(report.waited_seconds for report in reports),
        participants={str(config.learners): fold.steps}, tokens=sum(report.tokens for report in reports),
        bytes_up=moved, bytes_down=moved, loss_first=reports[0].loss_first, loss_final=reports[0].loss_final,
        theta_sha256=reports[0].theta_sha256, seconds=clock, backend=backend, ranks=tuple(reports), looks=tuple(looks),
    )  # fmt: skip


def summary_of(config: Config, outcome: DdpOutcome, run_dir: Path) -> Summary:
    """What a rank computed is merged in the same step: nothing is discarded and nothing is in flight at the end."""
    return Summary(
        preset=config.preset, learners=config.learners, seed=config.seed, outer_steps=config.outer_steps,
        goodput=round(outcome.goodput, 6), uptime=round(outcome.uptime, 6), waited_seconds=round(outcome.waited_seconds, 6),
        participants=outcome.participants, tokens=Tokens(outcome.tokens, outcome.tokens, 0, 0, {}), recoveries=[],
        bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, loss_first=outcome.loss_first,
        loss_final=outcome.loss_final, theta_sha256=outcome.theta_sha256, tape=None, run_dir=str(run_dir),
        clock="wall", seconds=round(outcome.seconds, 6), fragments=1, accuracy=outcome.ranks[0].accuracy,
        heldout=list(outcome.looks),
    )  # fmt: skip


# ---------------------------------------------------------------- one rank


class _Clock:
    """Of a rank. It stands still while rank 0 looks at the held-out loss and the others wait: that is no part of training."""

    def __init__(self) -> None:
        self._aside: Nanos = 0

    def now(self) -> Nanos:
        return time.monotonic_ns() - self._aside

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        began = time.monotonic_ns()
        yield
        self._aside += time.monotonic_ns() - began


class _AllReduce:
    """Torch's own all-reduce, with a clock on it. On CUDA the host runs ahead, so the stream's events are asked."""

    def __init__(self, device: torch.device, clock: _Clock) -> None:
        self._clock = clock
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._handed: Nanos = 0
        self.gradient_bytes = 0

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        assert dist.group.WORLD is not None
        self.gradient_bytes += bucket.buffer().nbytes
        self._handed = self._clock.now()  # buckets come in order: the last one's time stays
        if self._events:
            self._events[0].record()
        return allreduce_hook(dist.group.WORLD, bucket)

    def settle(self) -> tuple[Nanos, Nanos]:
        """After the backward pass: when this rank's gradients were ready, and when everybody's were reduced."""
        if not self._events:
            return self._handed, self._clock.now()
        self._events[1].record()
        self._events[1].synchronize()
        now = self._clock.now()
        return now - round(1e6 * self._events[0].elapsed_time(self._events[1])), now


def _train(bench: Workbench, rank: LearnerId, device: torch.device, channel: BinaryIO) -> tuple[RankReport, nn.Module]:
    config, count = bench.config, bench.config.inner.accumulate
    model = bench.build().to(device)
    loss_first = bench.evaluate(model) if rank == 0 else None
    tensors = named_tensors(model)
    # As the syncer of the virtual preset does, the optimiser steps on fp32; bf16 weights are the cast of it.
    masters = {n: nn.Parameter(t.detach().float()) for n, t in tensors.items() if t.requires_grad and t.dtype != torch.float32}
    theta = tensors | masters
    optimizer = build_optimizer(config, {n: t for n, t in theta.items() if t.requires_grad}, bench.layout.fragments)
    clock = _Clock()
    reduction = _AllReduce(device, clock)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # its new name is not in torch 2.11
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
    parallel.register_comm_hook(reduction, lambda state, bucket: state.start(bucket))
    tokens, waited, gathered = 0, 0, 0
    _meet(device)  # the clock starts for all alike
    first = ended = clock.now()
    for step in range(config.outer_steps):
        began, total = ended, 0.0
        torch.manual_seed(generator("inner step", config.seed, rank, step).initial_seed())
        batches = [bench.batch(rank, rank, step * count + micro) for micro in range(count)]
        counts = [bench.count(batch)[0] for batch in batches]
        tokens += sum(counts)
        for micro, (batch, part) in enumerate(zip(batches, divisors(counts), strict=True)):
            with parallel.no_sync() if micro + 1 < count else contextlib.nullcontext():
                loss = bench.loss(parallel, to_device(batch, device))
                (loss / part if count > 1 else loss).backward()
            total += float(loss.detach()) / part
        ready, reduced = reduction.settle()
        if not math.isfinite(total):
            raise NotFinite(f"the train loss of rank {rank} in step {step + 1}")
        for name, master in masters.items():
            grad, tensors[name].grad = tensors[name].grad, None
            master.grad = None if grad is None else grad.float()
        optimizer_step(config, optimizer, step)
        with torch.no_grad():
            for name, master in masters.items():
                tensors[name].copy_(master)
        gathered += _merge_buffers(bench, tensors)
        waited, ended = waited + reduced - ready, clock.now()
        _say(channel, Stepped(step, began, ready, reduced, ended, total))
        if config.data.heldout_every and (step + 1) % config.data.heldout_every == 0 and step + 1 < config.outer_steps:
            with clock.standing():
                if rank == 0:
                    _say(channel, Looked(Look(step + 1, bench.evaluate(model))))
                _meet(device)
    params = [read_params(theta, fragment).cpu() for fragment in bench.layout.fragments]
    buffers = [read_buffers(theta, fragment).cpu() for fragment in bench.layout.fragments]
    sent = round(reduction.gradient_bytes * 2 * (config.learners - 1) / config.learners) + gathered
    return RankReport(
        rank, str(device), config.outer_steps, tokens, seconds(ended - first - waited), seconds(waited), sent,
        digest(params + buffers), loss_first, bench.evaluate(model) if rank == 0 else None,
        bench.accuracy(model) if rank == 0 and bench.accuracy is not None else None,
    ), model  # fmt: skip


def _meet(device: torch.device) -> None:
    """Everybody is here when it returns, on the GPU too."""
    dist.all_reduce(meeting := torch.zeros(1, device=device))
    meeting.item()


def _merge_buffers(bench: Workbench, tensors: Mapping[str, Tensor]) -> int:
    """Statistics of batch norm, merged after each step as the syncer of the virtual preset does. Returns the bytes sent."""
    ranks, sent = bench.config.learners, 0
    for fragment in bench.layout.fragments:
        if fragment.buffers:
            own = read_buffers(tensors, fragment)
            everybodys = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(everybodys, own)
            write_buffers(tensors, fragment, merge_buffers(everybodys, [1.0] * ranks, fragment))
            sent += own.numel() * own.element_size() * (ranks - 1)
    return sent


def _say(channel: BinaryIO, word: Stepped | Looked | RankReport) -> None:
    channel.write(msgspec.json.encode(word) + b"\n")


def _rank(directory: Path, rank: LearnerId, channel: BinaryIO) -> None:
    job = msgspec.json.decode((directory / "ddp.json").read_bytes(), type=Job)
    use_threads(job.threads)
    config, device = load(directory / "config.toml"), torch.device(job.devices[rank])
    bench = workbench_for(config, job.allowed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # All ranks are of this machine: the loopback needs no name to resolve. A file needs no port that is free.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = dist.FileStore(str(directory / "rendezvous"), config.learners)  # type: ignore[attr-defined]
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=config.learners, timeout=PATIENCE,
        device_id=device if job.backend == "nccl" else None,
    )  # fmt: skip
    report, model = _train(bench, rank, device, channel)
    if rank == 0:
        keep_text(directory, bench)
        save_weights(directory / "theta.safetensors", named_tensors(model))
    (directory / f"rank-{rank}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _say(channel, report)


def main() -> int:
    """`python -m atoll.runtime.ddp RUN_DIR RANK`, for the parent alone."""
    released = threading.Event()

    def watch() -> None:
        if not os.read(0, 1):
            os._exit(1)
        released.set()

    threading.Thread(target=watch, daemon=True).start()
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints belongs to the words for people
    try:
        _rank(Path(sys.argv[1]), int(sys.argv[2]), channel)
    except (AtollError, OSError) as error:  # a full disk is told by its file: these are the last words that are passed on
        sys.stderr.write(f"{error}\n")
        return USERS_FAULT if isinstance(error, UserError) else 1
    released.wait()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
