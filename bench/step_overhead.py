"""How much longer does a learner's step take while it synchronises?

    python bench/step_overhead.py [--steps 200] [--block 10] [--milliseconds 100] [--floor]

There are three processes: a syncer, a learner in this process, built as `atoll learner` builds it (one torch thread, tape on),
and a scripted learner (bench/scripted.py), so that every merge has two learners. P = H = 24 over loopback: in every step a
fragment is pulled, merged and adopted. A synchronising step lasts from its request to its report, including everything that is
adopted, staged, taped and sent at its boundary. A step alone is the same inner step of the same model and optimiser without a
report.

Blocks of both alternate, because machines are noisy. The scripted learner steps when this one reports, so the cluster is idle
during a block alone: nothing is sent or received. The first steps of each block do not count, so that rounds of the previous
block have ended and those of this block have begun. The batch size is chosen at start for steps of about --milliseconds of CPU.
The target is a ratio of medians of at most 1.03, and 1.10 for steps below 40 ms, which a smaller
model takes. The table also has the ratio of means, which includes stalls, and ratios of
the training thread's CPU time, which are valid on a busy machine but do not include waits for the interpreter's lock. The last
line is one JSON object.

--floor measures what is left if a learner's network and machine cost its training process nothing: the training process belongs
to no run, and a second scripted learner takes its place. What a step then takes longer is the price of the cores that the other
processes use.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from scripted import Cluster, load_average

from atoll.config import Config, load
from atoll.executor.environment import code_version, cpu_capability, use_threads
from atoll.executor.learner import TensorLearner
from atoll.protocol.vocabulary import FixParticipants, InnerStep, StepDone, Stored
from atoll.runtime.learner.address import Address, request_place
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.learner.snapshots import LearnerSnapshots
from atoll.runtime.loop import LoopThread
from atoll.tape.format import Header, Tape, TapeWriter
from atoll.tasks.task import language_task
from atoll.transport.keys import read_token
from atoll.views.worker_metrics import LearnerMetrics

TARGET, SHORT_TARGET = 1.03, 1.10
SETTLING = 3
"""First steps of each block that do not count: tau + 1."""
WARM_UP = 30


SMALL_BELOW = 40.0
"""Milliseconds: shorter steps need a smaller model, because one sequence through the usual one takes longer."""
USUAL = {"width": 128, "layers": 8, "heads": 4, "mlp": 384}
SMALL = {"width": 64, "layers": 2, "heads": 2, "mlp": 192}


def settings(batch_size: int, numbers: dict[str, int] = USUAL) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": 2,
        "total_steps": 1_000_000,
        "data": {"max_bytes": 500_000, "seq_len": 64, "batch_size": batch_size, "heldout_batches": 1},
        "model": {"numbers": numbers},
        # No learner may be declared silent or lost while a block runs alone.
        "limits": {"silence_steps": 1e6},
    })  # fmt: skip


def cost_of(job: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of this thread's CPU time."""
    began, busy = time.perf_counter(), time.thread_time()
    job()
    return time.perf_counter() - began, time.thread_time() - busy


def fitting_batch(milliseconds: float, numbers: dict[str, int] = USUAL) -> int:
    """The size whose steps come closest to this many milliseconds. Their cost is nearly, but not exactly, proportional."""
    size = 4
    for _ in range(3):
        executor = TensorLearner(language_task(settings(size, numbers)), 0)
        took = [cost_of(partial(executor.execute, InnerStep(i, 0, i, 0), None))[1] for i in range(8)]
        size = max(1, round(size * milliseconds / 1e3 / statistics.median(took[2:])))
    return size


class Bench:
    """One learner of a run, and its two kinds of steps."""

    def __init__(
        self, cluster: Cluster, folder: Path, batch_size: int, metrics: LearnerMetrics | None = None,
        numbers: dict[str, int] = USUAL,
    ) -> None:  # fmt: skip
        use_threads(1)
        self._cluster = cluster
        address = Address(syncer=cluster.address, token=read_token(cluster.token).reveal(), listen="127.0.0.1:0")
        self._loop = LoopThread()
        placement = self._loop.run(request_place(address, 0, random.Random(0)))
        config = settings(batch_size, numbers)
        task = language_task(config)
        self._snapshots = LearnerSnapshots(folder, placement.run, config)
        self.executor = TensorLearner(task, placement.learner, self._snapshots)
        header = Header(
            config=placement.config, code_version=code_version(), data_fingerprint=task.fingerprint,
            threads=torch.get_num_threads(), torch_version=str(torch.__version__),
            cpu_capability=cpu_capability(), tensors=True, run=placement.run, worker=placement.learner,
            epoch=placement.epoch,
        )  # fmt: skip
        tape = TapeWriter.create(folder / "learner.tape", header, flush_each=True)
        self.live = LiveLearner(
            address, placement, self.executor, tape=tape, loop=self._loop.loop, arriving=self.executor.arriving, metrics=metrics
        )
        self._partner = cluster.learners(1, 1, "--follow")
        self.live.start()
        self._batch = 0

    def synchronising(self) -> None:
        """As in `runtime/learner/live.py`. The partner ends its step when this learner has reported."""
        step = self.live.next_step()
        assert step is not None
        began = time.monotonic_ns()
        (done,) = self.executor.execute(step, None)
        assert isinstance(done, StepDone)
        nanos = time.monotonic_ns() - began
        self.live.step_done(msgspec.structs.replace(done, nanos=nanos))
        self._nanos = nanos

    def let_partner_step(self) -> None:
        """Not part of a measured step: only this benchmark does it."""
        self._partner.send(str(self._nanos))

    def alone(self) -> None:
        self._batch += 1
        self.executor.execute(InnerStep(self._batch, 0, self._batch, 0), None)

    def close(self) -> None:
        self.live.close()
        self._snapshots.close()
        self._loop.stop()


class Bystander:
    """Trains beside a run that it has no part in, and in which two scripted learners step when it does."""

    def __init__(self, cluster: Cluster, batch_size: int, numbers: dict[str, int]) -> None:
        use_threads(1)
        self.executor = TensorLearner(language_task(settings(batch_size, numbers)), 0)
        self._learners = [cluster.learners(first, 1, "--follow") for first in (0, 1)]
        self._batch, self._nanos = 0, 0

    def alone(self) -> None:
        self._batch += 1
        began = time.monotonic_ns()
        self.executor.execute(InnerStep(self._batch, 0, self._batch, 0), None)
        self._nanos = time.monotonic_ns() - began

    synchronising = alone

    def let_partner_step(self) -> None:
        for process in self._learners:
            process.send(str(self._nanos))

    def close(self) -> None:
        """The cluster ends its processes."""


Costs = list[tuple[float, float]]


def measure(bench: Bench | Bystander, steps: int, block: int) -> tuple[Costs, Costs]:
    alone: Costs = []
    synchronising: Costs = []
    for _ in range(WARM_UP):
        bench.synchronising()
        bench.let_partner_step()
    while len(alone) < steps:
        for _ in range(SETTLING):
            bench.alone()
        alone += [cost_of(bench.alone) for _ in range(block)]
        for turn in range(SETTLING + block):
            took = cost_of(bench.synchronising)
            bench.let_partner_step()
            if turn >= SETTLING:
                synchronising.append(took)
    return alone[:steps], synchronising[:steps]


def figures_of(costs: Costs) -> dict[str, float]:
    wall, busy = [wall for wall, _ in costs], [busy for _, busy in costs]
    return {
        "median": statistics.median(wall), "mean": statistics.mean(wall), "p90": sorted(wall)[int(0.9 * len(wall))],
        "median CPU": statistics.median(busy), "mean CPU": statistics.mean(busy),
    }  # fmt: skip


def rounds_of(tape: Path) -> tuple[int, float]:
    """Stored rounds and their mean number of learners, to show that the learner did synchronise."""
    stored, participants = 0, []
    for record in Tape(tape).records():
        stored += isinstance(record.event, Stored)
        participants += [len(e.participants) for e in record.effects if isinstance(e, FixParticipants)]
    return stored, statistics.mean(participants)


def row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--milliseconds", type=float, default=100.0)
    parser.add_argument("--floor", action="store_true", help="without a network in the training process: see above")
    options = parser.parse_args()
    use_threads(1)
    short = options.milliseconds < SMALL_BELOW
    numbers, target = (SMALL, SHORT_TARGET) if short else (USUAL, TARGET)
    batch_size = fitting_batch(options.milliseconds, numbers)
    with Cluster(settings(batch_size, numbers)) as cluster:
        bench: Bench | Bystander
        if options.floor:
            bench = Bystander(cluster, batch_size, numbers)
        else:
            bench = Bench(cluster, cluster.folder, batch_size, numbers=numbers)
        parameters = sum(p.numel() for p in bench.executor.model.parameters())
        alone, synchronising = measure(bench, options.steps, options.block)
        busy = load_average()
        bench.close()
        stored, participants = rounds_of(cluster.tape)
    figures = {"alone": figures_of(alone), "synchronising": figures_of(synchronising)}
    ratios = {key: figures["synchronising"][key] / value for key, value in figures["alone"].items()}
    print(f"{parameters:,} parameters, batches of {batch_size}, {len(alone)} steps of each kind, load average {busy}")
    print(f"{stored} rounds stored, of {participants:.2f} learners each")
    print(row("milliseconds", list(ratios)))
    for name, values in figures.items():
        print(row(name, [f"{1e3 * value:.1f}" for value in values.values()]))
    print(row("ratio", [f"{value:.3f}" for value in ratios.values()]))
    passed, which = ratios["median"] <= target, "step_overhead_floor" if options.floor else "step_overhead"
    if options.floor:
        print(f"a step beside a run takes {ratios['median']:.3f} of one alone")
    else:
        verdict = "PASS" if passed else "FAIL"
        print(f"{verdict} a step that synchronises takes {ratios['median']:.3f} of one alone (at most {target})")
    print(json.dumps({
        "bench": which, "parameters": parameters, "batch_size": batch_size, "steps": len(alone), "rounds": stored,
        "participants": participants, "load_average": busy, "seconds": figures, "ratios": ratios,
    }))  # fmt: skip
    return 0 if passed or options.floor else 1


if __name__ == "__main__":
    sys.exit(main())
