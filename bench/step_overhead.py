"""How much longer does a learner's step take while it synchronises?

    python bench/step_overhead.py [--steps 200] [--block 10] [--milliseconds 100]

A syncer's process, a learner in this one, built as `atoll learner` builds it (one torch thread, tape on), and a scripted
learner (bench/scripted.py) in a third, so that every merge is of two. P = H = 24 over loopback: every step a fragment is
pulled, merged and adopted. A step that synchronises is everything from asking for it to having reported it, with whatever
is adopted, staged, taped and sent at its boundary. A step alone is the same inner step of the same model and optimiser,
not reported.

Blocks of both take turns, because machines are noisy. The scripted learner steps when this one reports, so during a block
alone the cluster is still: nothing is sent, nothing arrives. The first steps of each block are not counted, so that
rounds of the block before have died down and those of this one are under way. The batch size is chosen on the spot for
steps of about --milliseconds of CPU. The target is a ratio of medians of at most 1.03. Beside it stand the ratio of means,
which counts stalls, and ratios of the training thread's own CPU time, which hold on a busy machine too but leave out
what waiting for the interpreter's lock costs. The last line is one JSON object.
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

TARGET = 1.03
SETTLING = 3
"""Steps at the head of each block that do not count: tau, and one."""
WARM_UP = 30


def settings(batch_size: int) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": 2,
        "total_steps": 1_000_000,
        "data": {"max_bytes": 500_000, "seq_len": 64, "batch_size": batch_size, "heldout_batches": 1},
        "model": {"numbers": {"width": 128, "layers": 8, "heads": 4, "mlp": 384}},
        # No learner may be declared silent or lost while a block runs alone.
        "limits": {"silence_steps": 1e6},
    })  # fmt: skip


def cost_of(job: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of this thread's CPU."""
    began, busy = time.perf_counter(), time.thread_time()
    job()
    return time.perf_counter() - began, time.thread_time() - busy


def fitting_batch(milliseconds: float) -> int:
    """The size whose steps come closest to so many milliseconds. Their cost is nearly, but not quite, in proportion."""
    size = 4
    for _ in range(3):
        executor = TensorLearner(language_task(settings(size)), 0)
        took = [cost_of(partial(executor.execute, InnerStep(i, 0, i, 0), None))[1] for i in range(8)]
        size = max(1, round(size * milliseconds / 1e3 / statistics.median(took[2:])))
    return size


class Bench:
    """One learner of a run, and what it does in a step of either kind."""

    def __init__(self, cluster: Cluster, folder: Path, batch_size: int) -> None:
        use_threads(1)
        self._cluster = cluster
        address = Address(syncer=cluster.address, token=read_token(cluster.token).reveal(), listen="127.0.0.1:0")
        self._loop = LoopThread()
        placement = self._loop.run(request_place(address, 0, random.Random(0)))
        config = settings(batch_size)
        task = language_task(config)
        self._snapshots = LearnerSnapshots(folder, placement.run, config)
        self.executor = TensorLearner(task, placement.learner, self._snapshots)
        header = Header(
            config=placement.config, code_version=code_version(), data_fingerprint=task.fingerprint,
            threads=torch.get_num_threads(), dtype=config.model.dtype, torch_version=str(torch.__version__),
            cpu_capability=cpu_capability(), tensors=True, run=placement.run, worker=placement.learner,
            epoch=placement.epoch,
        )  # fmt: skip
        tape = TapeWriter.create(folder / "learner.tape", header, flush_each=True)
        self.live = LiveLearner(address, placement, self.executor, tape=tape, loop=self._loop.loop)
        self._partner = cluster.learners(1, 1, "--follow")
        self.live.start()
        self._batch = 0

    def synchronising(self) -> None:
        """As `runtime/learner/live.py` does it. The partner ends its step when we have reported ours."""
        step = self.live.next_step()
        assert step is not None
        began = time.monotonic_ns()
        (done,) = self.executor.execute(step, None)
        assert isinstance(done, StepDone)
        nanos = time.monotonic_ns() - began
        self.live.step_done(msgspec.structs.replace(done, nanos=nanos))
        self._nanos = nanos

    def let_partner_step(self) -> None:
        """Not in any step's time: it is this benchmark's own doing."""
        self._partner.tell(str(self._nanos))

    def alone(self) -> None:
        self._batch += 1
        self.executor.execute(InnerStep(self._batch, 0, self._batch, 0), None)

    def close(self) -> None:
        self.live.close()
        self._snapshots.close()
        self._loop.stop()


Costs = list[tuple[float, float]]


def measure(task: Bench, steps: int, block: int) -> tuple[Costs, Costs]:
    alone: Costs = []
    synchronising: Costs = []
    for _ in range(WARM_UP):
        task.synchronising()
        task.let_partner_step()
    while len(alone) < steps:
        for _ in range(SETTLING):
            task.alone()
        alone += [cost_of(task.alone) for _ in range(block)]
        for turn in range(SETTLING + block):
            took = cost_of(task.synchronising)
            task.let_partner_step()
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
    """How many were stored, and how many learners took part on average: proof that there was something to slow us down."""
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
    options = parser.parse_args()
    use_threads(1)
    batch_size = fitting_batch(options.milliseconds)
    with Cluster(settings(batch_size)) as cluster:
        task = Bench(cluster, cluster.folder, batch_size)
        parameters = sum(p.numel() for p in task.executor.model.parameters())
        alone, synchronising = measure(task, options.steps, options.block)
        busy = load_average()
        task.close()
        stored, participants = rounds_of(cluster.tape)
    figures = {"alone": figures_of(alone), "synchronising": figures_of(synchronising)}
    ratios = {key: figures["synchronising"][key] / value for key, value in figures["alone"].items()}
    print(f"{parameters:,} parameters, batches of {batch_size}, {len(alone)} steps of each kind, load average {busy}")
    print(f"{stored} rounds stored, of {participants:.2f} learners each")
    print(row("milliseconds", list(ratios)))
    for name, values in figures.items():
        print(row(name, [f"{1e3 * value:.1f}" for value in values.values()]))
    print(row("ratio", [f"{value:.3f}" for value in ratios.values()]))
    passed = ratios["median"] <= TARGET
    print(f"{'PASS' if passed else 'FAIL'} a step that synchronises takes {ratios['median']:.3f} of one alone (at most {TARGET})")
    print(json.dumps({
        "bench": "step_overhead", "parameters": parameters, "batch_size": batch_size, "steps": len(alone),
        "rounds": stored, "participants": participants, "load_average": busy, "seconds": figures, "ratios": ratios,
    }))  # fmt: skip
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
