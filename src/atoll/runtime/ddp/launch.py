"""Data-parallel training by torch itself: the baseline, with the same launcher, data and report as the other presets.

`DistributedDataParallel`, one process per rank, rank r on stream r. It computes what the virtual `ddp` preset computes (mean
gradient over ranks, clipping of the merged gradient, the inner optimiser's step); only the order of summation differs.

The parent and a rank communicate through the rank's pipes. A rank writes one JSON line per step and one at the end to its
stdout. Its stdin delivers one byte when every rank is done, so no rank closes a socket that another still reads. Its stdin
closes when the parent dies in any way, and then the rank exits.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from atoll.config import Config, to_toml
from atoll.errors import AtollError, ConfigError, RunFailed, UserError
from atoll.executor.compute import resolved
from atoll.executor.environment import tape_header
from atoll.ids import LearnerId
from atoll.runtime.clock import wall
from atoll.runtime.ddp.rank import main
from atoll.runtime.ddp.report import DdpOutcome, HeldoutReport, Job, RankFailed, RankReport, StepFold, Stepped, outcome_of
from atoll.runtime.ddp.tape import DdpTape
from atoll.store.lock import lock_directory
from atoll.tape.folder import refuse_used
from atoll.tape.format import Header
from atoll.tape.heldout import HeldoutPoint, append_point, points_in

STDERR_BYTES = 4096
STDERR_LINES = 3

Progress = Callable[[int, float | None], None]



def run_ddp(
    config: Config, directory: Path, *, threads: int, device: str = "cpu", allowed: Sequence[str] = (),
    progress: Progress | None = None, on_point: Callable[[HeldoutPoint], None] = lambda point: None,
    data_fingerprint: str = "", say: Callable[[str], None] = lambda text: None,
) -> DdpOutcome:  # fmt: skip
    """Trains `config` with one process per learner and returns when all have ended. `progress(steps done, mean train loss)`.
    `data_fingerprint` goes into the tape's header."""
    check_supported(config)
    devices, backend = devices_for(device, config.learners)
    _prepare(directory, config, Job(threads, backend, devices, tuple(allowed)))
    fold = StepFold(config.learners)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_directory(directory, "run", "--out"))  # who watches it sees by the lock that it is live
        header = _header(config, device=devices[0], data_fingerprint=data_fingerprint)
        tape = stack.enter_context(DdpTape(directory, header, config.total_steps, say))

        def stepped(loss: float) -> None:
            tape.append(fold.completed)
            if progress is not None:
                progress(fold.steps, loss)

        ranks = [stack.enter_context(_started(directory, rank)) for rank in range(config.learners)]
        reports = _follow(ranks, directory, fold, stepped, on_point)
    (directory / "rendezvous").unlink(missing_ok=True)
    if len({report.theta_sha256 for report in reports}) > 1:
        raise RunFailed("ddp: the ranks ended with different models, so an all-reduce failed")
    return outcome_of(config, backend, fold, reports, points_in(directory))


def check_supported(config: Config) -> None:
    """Refuses, by key, what the virtual preset supports and DistributedDataParallel does not."""
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
    """Each rank's device. `cuda` assigns the GPUs in turn; ranks that share one cannot use nccl and use gloo."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return ("cpu",) * count, "gloo"
    if kind != "cuda" or not (device == "cuda" or index.isdecimal()):
        raise UserError(f"device {device!r}: must be cpu, cuda or cuda:N")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available <= (int(index) if index else 0):
        raise UserError(f"device {device!r}: torch {torch.__version__} finds {available} CUDA devices on this machine")
    devices = tuple(device if index else f"cuda:{rank % available}" for rank in range(count))
    return devices, "nccl" if len(set(devices)) == count else "gloo"


def _header(config: Config, *, device: str, data_fingerprint: str) -> Header:
    compute = str(resolved(config, torch.device(device)))
    return tape_header(
        config, data_fingerprint=data_fingerprint, tensors=True, compute=compute, device=device, epoch=wall(), derivable=False
    )


def _prepare(directory: Path, config: Config, job: Job) -> None:
    refuse_used(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "ddp.json").open("xb") as file:  # of two that start at once, one fails here
            file.write(msgspec.json.encode(job))
        (directory / "config.toml").write_text(to_toml(config), encoding="utf8")
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def _started(directory: Path, rank: LearnerId) -> Iterator[subprocess.Popen[bytes]]:
    """A rank in its own process group: Ctrl-C reaches only the parent, which ends the ranks itself."""
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
    ranks: Sequence[subprocess.Popen[bytes]], directory: Path, fold: StepFold, stepped: Callable[[float], None],
    on_point: Callable[[HeldoutPoint], None],
) -> list[RankReport]:  # fmt: skip
    """Reads the ranks' lines until all have ended successfully; the first failure ends the run."""
    rests = [b""] * len(ranks)
    reports: dict[LearnerId, RankReport] = {}
    failures: dict[LearnerId, RankFailed] = {}
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            failed: list[tuple[bool, int, LearnerId]] = []
            for key, _ in selector.select():
                rank = key.data
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                    if code := ranks[rank].wait() or (rank not in reports):
                        failed.append((not (rank in failures and failures[rank].users_fault), code, rank))
                    continue
                *lines, rests[rank] = (rests[rank] + chunk).split(b"\n")
                for line in lines:
                    report = msgspec.json.decode(line, type=Stepped | HeldoutReport | RankFailed | RankReport)
                    if isinstance(report, RankReport):
                        reports[rank] = report
                    elif isinstance(report, RankFailed):
                        failures[rank] = report
                    elif isinstance(report, HeldoutReport):
                        append_point(directory, report.point)
                        on_point(report.point)
                    elif (loss := fold.add(report)) is not None:
                        stepped(loss)
                if len(reports) == len(ranks) and rank in reports:
                    _release(ranks)
            if failed:  # a refusal or a signal is a cause; another error may be the echo of a lost peer
                _, code, rank = min(failed)
                raise _failure(directory, code, rank, failures.get(rank))
    return [reports[rank] for rank in sorted(reports)]


def _release(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died just now; its closed stdout will show that
            process.stdin.write(b".")


def _failure(directory: Path, code: int, rank: LearnerId, reported: RankFailed | None) -> AtollError:
    if reported is not None and reported.users_fault:
        return UserError(reported.message)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    why = f": {reported.message}" if reported is not None else _last_lines(directory / f"rank-{rank}.err")
    return RunFailed(f"ddp: rank {rank} {how}, and data-parallel training cannot go on without it{why}")


def _last_lines(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_BYTES))
        lines = [line.strip() for line in file.read().decode("utf8", "replace").splitlines() if line.strip()]
    return f"; {path} ends: {' | '.join(lines[-STDERR_LINES:])}" if lines else ""


if __name__ == "__main__":
    sys.exit(main())
