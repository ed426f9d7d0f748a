"""One run of a quality experiment: real text, real machines in virtual time, all learners on one device as a fleet.

    python bench/quality/train.py --name m8 --preset decoupled --learners 8 --tokens 200e6 --data DIR --out results.jsonl

`--data` holds the corpora and the tokenizer, by default those named below. The learners share the batch of a step,
`--step-tokens`. Runs of equal `--tokens` train equally many tokens, to a few per thousand. Where slices fail, learners join and
leave, or rounds are not paced, a rehearsal without tensors finds the number of outer steps; otherwise the fastest learners end
some steps ahead, and `trained_tokens` has the exact number. A line of JSON is appended to `--out`: the keys of `atoll train
--json`, the name, the config, the files and the text's fingerprint, and times. data_parallel is one learner with the whole
batch, whose merges change nothing (outer SGD, rate 1); its last steps, fewer than eight, are in no merge, so its loss is
`loss_replica`. To try it without files: `--corpus stdlib --heldout "" --tokenizer bytes`.

With `--state FILE` a run that gets SIGTERM is written to that file (`kept.py`) and ends with exit code 75; every `--save-minutes`
it is written too. The same command goes on from there, to the same bits.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import kept
import msgspec
import torch
import tried

from atoll.chaos import ChaosPlan, Scavenge
from atoll.config import ALL, Config, changed, load
from atoll.config.models import SIZES
from atoll.executor.compute import ComputeMode
from atoll.executor.fleet.executor import FleetExecutor
from atoll.executor.virtual_run import evaluated_on
from atoll.ids import SYNCER, LearnerId, Nanos, WorkerId
from atoll.protocol.interface import Observer
from atoll.protocol.vocabulary import Effect, Event, FixParticipants, StepDone
from atoll.sim.cluster import ExecutorFor, VirtualCluster
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.run import HeldoutObserver, learners_expected
from atoll.sim.slices import SliceHardware
from atoll.store.versions import average_of
from atoll.tape.heldout import HeldoutPoint
from atoll.tasks.task import Task, language_task
from atoll.views.run import RunView, summarise

TRAIN = "wiki-train.jsonl.xz,gutenberg-train-0*.jsonl.xz"
HELDOUT = "wiki-val.jsonl.xz,gutenberg-val.jsonl.xz"
TOKENIZER = "bpe32k.json.xz"
WORDS = ("", "stdlib", "bytes", "bpe")
"""Values of the data section that are not files."""
DATA_PARALLEL = "data_parallel"
OWN_SIZES: dict[str, dict[str, int | float | bool]] = {
    "10M": {"width": 256, "layers": 4, "heads": 4, "mlp": 1024, "tied": True},
}
REHEARSALS = 6
NEAR = 1e-3
STOPPED = 75
"""Exit code of a run that was stopped and can go on (EX_TEMPFAIL)."""


def settings(chosen: argparse.Namespace, total_steps: int) -> Config:
    """The settings of all runs, with the preset's own and --set laid over them."""

    def files(names: str) -> str:
        return ",".join(name if name in WORDS else str(chosen.data / name) for name in names.split(","))

    dp = chosen.preset == DATA_PARALLEL
    learners = 1 if dp else chosen.learners
    overrides = {
        "learners": learners, "seed": chosen.seed, "total_steps": total_steps,
        "model": {"numbers": numbers(chosen.size)},
        "data": {
            "corpus": files(chosen.corpus), "heldout": files(chosen.heldout), "tokenizer": files(chosen.tokenizer),
            "seq_len": chosen.seq_len, "batch_size": chosen.step_tokens // chosen.seq_len // learners,
            "heldout_batches": chosen.heldout_batches,
        },
        "inner": {"learning_rate": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "warmup_share": 0.05, "final_share": 0.1},
        "cluster": {"step_seconds": 5.0, "step_noise": 0.02, "up_gbit": 100.0, "down_gbit": 100.0, "parameters": 35_000_000},
    }  # fmt: skip
    if dp:
        overrides["protocol"] = {"local_steps_per_round": 8}
    return changed(load(preset_name="fedavg" if dp else chosen.preset, overrides=overrides), chosen.set)


def numbers(size: str) -> dict[str, int | float | bool]:
    """A size by its name, or width=256,layers=4,heads=4,mlp=1024,tied=1."""
    if "=" not in size:
        return dict((SIZES | OWN_SIZES)[size])
    given = dict(part.split("=") for part in size.split(","))
    return {key: bool(int(value)) if key == "tied" else int(value) for key, value in given.items()}


def plan_for(chosen: argparse.Namespace, config: Config) -> ChaosPlan:
    """--scavenge F: F times as many additional learners, in every second quarter of the run."""
    extra = round(chosen.scavenge * config.learners)
    quarter = config.total_steps * config.cluster.step_seconds / 4
    return ChaosPlan(tuple(
        Scavenge(start * quarter, config.learners + m, quarter) for start in (1, 3) for m in range(extra)
    ))  # fmt: skip


def cluster_for(
    chosen: argparse.Namespace, config: Config, executor: ExecutorFor | None, observers: Sequence[Observer]
) -> VirtualCluster:
    slices = SliceHardware(config, chosen.chips, FailureModel(), config.seed) if chosen.chips else None
    return VirtualCluster(config, plan=plan_for(chosen, config), executor_for=executor, observers=observers, hardware=slices)


def run(cluster: VirtualCluster, pause: Stopper | None = None) -> bool:
    limit = 100 * cluster.config.total_steps * cluster.config.cluster.step_seconds
    return cluster.run(until_seconds=limit, pause=pause)


def trained_tokens(cluster: VirtualCluster) -> int:
    return cluster.syncer.fates().trained // cluster.config.protocol.fragments


def at_equal_tokens(chosen: argparse.Namespace) -> Config:
    """Outer steps end a run, but the comparison is at equal tokens: a run with smaller batches needs more outer steps, one with
    more learners fewer, and with K = 1 and no pace an outer step is a single learner's. The machines decide the same without
    tensors, so a few rehearsals find how many tokens a number of outer steps gives; the nearest is taken."""
    steps, found = round(chosen.tokens / chosen.step_tokens), dict[int, int]()
    wanted = steps * chosen.step_tokens
    if is_regular(chosen, settings(chosen, steps)):
        return settings(chosen, steps)
    while steps not in found and len(found) < REHEARSALS:
        rehearsal = cluster_for(chosen, settings(chosen, steps), None, ())
        run(rehearsal)
        found[steps] = trained_tokens(rehearsal)
        if abs(found[steps] / wanted - 1) < NEAR:
            break
        steps = max(1, round(steps * wanted / found[steps]))
    return settings(chosen, min(found, key=lambda n: abs(found[n] - wanted)))


def is_regular(chosen: argparse.Namespace, config: Config) -> bool:
    """Every outer step is one step of every learner, except for a few per thousand by which the fastest get ahead: no rehearsal
    is needed."""
    paced = config.protocol.pace >= 1.0 or config.protocol.quorum == ALL
    return paced and not (chosen.chips or chosen.scavenge or config.cluster.slow_share)


class Pace:
    """Prints progress about every twenty seconds."""

    def __init__(self, name: str, config: Config) -> None:
        self._name, self._steps, self._begun, self._next = name, config.total_steps, time.time(), 0.0

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER and time.time() > self._next:
            for effect in effects:
                if isinstance(effect, FixParticipants):
                    self._next = time.time() + 20.0
                    print(f"{self._name}: {effect.outer_step} of {self._steps}, {time.time() - self._begun:.0f} s", flush=True)


class Steps:
    """Inner steps by learner, and their tokens."""

    def __init__(self) -> None:
        self.of: Counter[LearnerId] = Counter()
        self.tokens = 0
        self.smallest = 0

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self.of[worker] += 1
            self.tokens += event.tokens
            self.smallest = min(self.smallest or event.tokens, event.tokens)

    def figures(self) -> dict[str, object]:
        return {
            "inner_steps": self.of.total(), "steps": max(self.of.values()),
            "tokens_per_inner_step": self.tokens / self.of.total(), "smallest_inner_step": self.smallest,
        }  # fmt: skip


class Stopper:
    """Whether a run is to pause: for good after SIGTERM, and for a moment where its state is due to be written. It is asked after
    every event, and looks at the clock at every hundredth."""

    def __init__(self, save_minutes: float) -> None:
        self._every, self._asked, self._written = 60 * save_minutes, 0, time.monotonic()
        self.stopped = False

    def on_signal(self, number: int, frame: object) -> None:
        self.stopped = True

    def __call__(self) -> bool:
        self._asked += 1
        return self.stopped or (self._asked % 100 == 0 and time.monotonic() > self._written + self._every)

    def wrote(self) -> None:
        self._written = time.monotonic()


@dataclass
class UnderWay:
    """A run, and everything that is kept of it where it stops."""

    executor: FleetExecutor
    view: RunView
    steps: Steps
    points: HeldoutObserver
    cluster: VirtualCluster
    loss_first: float
    seconds: float = 0.0
    """What it has trained for, in earlier processes too."""


def begun(chosen: argparse.Namespace, config: Config, task: Task) -> UnderWay:
    device = torch.device(chosen.device)
    total = learners_expected(config, plan_for(chosen, config))
    compute = ComputeMode("bf16" if device.type == "cuda" else "fp32", chosen.compiled)
    made = tried.SharingExecutor if chosen.share_moments else FleetExecutor
    executor = made(task, device, learners=total, compute=compute)
    view, steps = RunView(total), Steps()
    points = HeldoutObserver(task, executor, None, partial(print_point, chosen.name))
    cluster = cluster_for(chosen, config, executor, [view, steps, points, Pace(chosen.name, config)])
    return UnderWay(executor, view, steps, points, cluster, task.evaluate_theta(*executor.disk.theta()))


def carried_out(chosen: argparse.Namespace, going: UnderWay) -> bool:
    """Whether it came to its end. What was computed on the device since the last write is lost with the process."""
    stopper = Stopper(chosen.save_minutes if chosen.state is not None else float("inf"))
    before = signal.signal(signal.SIGTERM, stopper.on_signal) if chosen.state is not None else None
    try:
        earlier, since = going.seconds, time.monotonic()
        while not run(going.cluster, stopper):
            going.seconds = earlier + time.monotonic() - since
            kept.write(chosen.state, going)
            stopper.wrote()
            if stopper.stopped:
                return False
        going.seconds = earlier + time.monotonic() - since
        return True
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def train(chosen: argparse.Namespace) -> dict[str, object] | None:
    """`inner_steps` are those of all learners, `steps` the most of one learner. None: the run was stopped, and can go on."""
    device, started = torch.device(chosen.device), time.time()
    config = at_equal_tokens(chosen)
    task = language_task(config)
    on_device = evaluated_on(task, device)
    goes_on = chosen.state is not None and chosen.state.exists()
    going = kept.read(chosen.state, on_device) if goes_on else begun(chosen, config, on_device)
    prepared = time.time()
    if not carried_out(chosen, going):
        return None
    executor, view, cluster = going.executor, going.view, going.cluster
    final = on_device.evaluate_theta(*executor.disk.theta())
    executor.fleet.synchronize(0)
    replica = on_device.evaluate(executor.learners[0].model)
    points, first, average = going.points.taken, going.loss_first, average_of(executor.disk.newest())
    loss_average = None if average is None else on_device.evaluate_theta(*average)
    summary = summarise(config, view, cluster.syncer.fates(), loss_first=first, loss_final=final, points=points,
                        loss_average=loss_average)  # fmt: skip
    sizes = [fragment.numel for fragment in task.layout.fragments]
    keys: dict[str, object] = msgspec.to_builtins(summary)
    return {
        "name": chosen.name, "method": chosen.preset, "size": chosen.size, "settings": chosen.set, "chips": chosen.chips,
        "scavenge": chosen.scavenge, "trained_tokens": trained_tokens(cluster), "loss_replica": replica,
        "parameters": sum(sizes), "fragment_sizes": sizes, "wall_seconds": round(prepared - started + going.seconds, 1),
        "rehearsal_seconds": round(prepared - started, 1), "train_seconds": round(going.seconds, 1),
        "device": device_name(device), "heldout_points": [(point.outer_step, point.loss) for point in points],
        "bytes_between_learners": view.bytes_between_learners, "config": without_folder(chosen, config),
        "corpus_files": corpus_files(chosen), "data_fingerprint": task.fingerprint,
    } | going.steps.figures() | keys  # fmt: skip


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def without_folder(chosen: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The files by name alone, without this machine's folders."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    names = {"corpus": chosen.corpus, "heldout": chosen.heldout, "tokenizer": chosen.tokenizer}
    return plain | {"data": plain["data"] | names}


def corpus_files(chosen: argparse.Namespace) -> list[str]:
    """The files that a glob found: folders may differ, and then runs do not have the same text."""
    names = [name for name in chosen.corpus.split(",") if name not in WORDS]
    return sorted(Path(path).name for name in names for path in glob(str(chosen.data / name)))


def print_point(name: str, point: HeldoutPoint) -> None:
    print(f"{name}: {point.outer_step}, held-out loss {point.loss:.4f}", flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--preset", default="decoupled", help="a preset of atoll's, or data_parallel")
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--size", default="35M", help="a size's name, or its numbers: width=256,layers=4,heads=4,mlp=1024,tied=1")
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--step-tokens", type=int, default=65_536)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--heldout-batches", type=int, default=10**6, help="at most this many; by default all of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--chips", type=int, default=0, help="simulate failures of this many chips")
    parser.add_argument("--scavenge", type=float, default=0.0)
    parser.add_argument("--share-moments", action="store_true", help="learners share their momentum on adoption (tried.py)")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder of the three that follow")
    parser.add_argument("--corpus", default=TRAIN, help="file names and globs with commas, or stdlib")
    parser.add_argument("--heldout", default=HELDOUT, help="the same; empty: a twentieth of the corpus")
    parser.add_argument("--tokenizer", default=TOKENIZER, help="a file name, bytes or bpe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--state", type=Path, help="go on from this file if it is there, and stop into it")
    parser.add_argument("--save-minutes", type=float, default=15.0)
    return parser


def main() -> None:
    chosen = options().parse_args()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(chosen.threads)
    tried.register()
    line = train(chosen)
    if line is None:
        print(f"{chosen.name}: stopped", flush=True)
        sys.exit(STOPPED)
    with chosen.out.open("a", encoding="utf8") as file:
        file.write(json.dumps(line) + "\n")
    if chosen.state is not None:
        chosen.state.unlink(missing_ok=True)
    print(f"{chosen.name}: held-out loss {line['loss_final']:.4f} in {line['wall_seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
