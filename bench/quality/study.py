"""Groups of quality runs, `--jobs` at a time, as processes of train.py.

    python bench/quality/study.py main --data DIR --out main.jsonl --jobs 4 --compiled --seeds 0,1,2 --skip-done
    python bench/quality/study.py ablations --list

Each run has a log beside `--out`, and appends its line to `--out` when it is done. A failed run is reported at the end and does
not stop the others. After `--time-limit` seconds no run is started, and those that still run are killed. Arguments after `--` go
to train.py: `-- --device cpu --corpus stdlib --heldout= --tokenizer bytes`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TRAIN = Path(__file__).with_name("train.py")
DATA_PARALLEL = "data_parallel"
STOPPED, STOPPED_WORDS = 75, "stopped, and can go on"
"""What train.py ends with where it was asked to stop."""
CHIPS = 1_200_000

SETTINGS: dict[str, Any] = {
    "inner": {"optimizer": "Muon", "betas": "[0.9,0.99]"},
    "rates": {1: 0.003, 2: 0.003, 4: 0.003, 8: 0.003},
    "outer": {2: (0.7, 0.5), 4: (1.0, 0.5), 8: (1.0, 0.5)},
    "runs": {"async_diloco_m8_h30": ["outer.outer_optimizer=sgd", "outer.outer_learning_rate=0.5"]},
}
"""Found by the sweeps (docs/research/results.md): keys of `inner` for all runs; the inner rate, and (rate, momentum) of the
outer Nesterov, by the number of learners; and for single runs, by name, --set lines that replace these."""
EVERY_12 = ("protocol.local_steps_per_round=12", "protocol.fragments=12", "protocol.codec_down=int8")
"""Twice as often as every 24 steps; with int4 up and int8 down still 3.1 % of the bytes of bf16 data-parallel."""
IN_PIECES = ("protocol.fragmentation=sub_tensor",)
"""The embedding is half of the model. Cut into pieces it makes fragments, and so peaks of traffic, of equal size."""
MEAN = ("protocol.merge=mean", "protocol.embedding_merge=mean")
"""For Muon, with outer learning rate 1.0: `merge_runs` compares it with RDA, each at its own outer settings."""
BY_ADAMW = ("inner.optimizer=AdamW", "inner.betas=[0.9,0.95]", "inner.learning_rate=2e-3")


class Run(NamedTuple):
    name: str
    arguments: tuple[str, ...]


def outer(rate: float, momentum: float) -> tuple[str, str]:
    return f"outer.outer_learning_rate={rate}", f"outer.outer_momentum={momentum}"


def run(name: str, preset: str, learners: int, *assignments: str, more: Sequence[str] = ()) -> Run:
    """One run with the common settings. data_parallel has no outer optimiser to tune."""
    lines = [f"inner.{key}={value}" for key, value in SETTINGS["inner"].items()]
    lines.append(f"inner.learning_rate={SETTINGS['rates'][learners]}")
    if preset != DATA_PARALLEL:
        lines += outer(*SETTINGS["outer"][learners])
    lines += [*assignments, *SETTINGS["runs"].get(name, ())]
    sets = [word for line in lines for word in ("--set", line)]
    return Run(name, ("--preset", preset, "--learners", str(learners), *more, *sets))


def sized(runs: Sequence[Run], size: str, tokens: float, step_tokens: int) -> list[Run]:
    scale = ("--size", size, "--tokens", f"{tokens:g}", "--step-tokens", str(step_tokens))
    return [Run(name, (*scale, *arguments)) for name, arguments in runs]


# ---------------------------------------------------------------- comparison of the methods


def main_runs() -> list[Run]:
    failing = ("--chips", str(CHIPS))
    every_30 = "protocol.local_steps_per_round=30"
    found = (*EVERY_12, *IN_PIECES, *MEAN)
    decoupled = [run(f"decoupled_m{m}", "decoupled", m, *found) for m in (2, 4, 8)]
    hurt = [run(f"decoupled_m{m}_failures", "decoupled", m, *found, more=failing) for m in (2, 4, 8)]
    return sized([
        run("data_parallel", DATA_PARALLEL, 1),
        run("data_parallel_failures", DATA_PARALLEL, 1, more=failing),
        run("diloco_m8_h30", "diloco", 8, every_30),
        run("async_diloco_m8_h30", "async_diloco", 8, every_30, "protocol.overlap=30"),
        run("streaming_m8_h30", "streaming", 8, every_30),
        run("streaming_m8_h100", "streaming", 8, "protocol.local_steps_per_round=100"),
        *decoupled, *hurt,
        run("decoupled_m8_scavenged", "decoupled", 8, *found, more=("--scavenge", "0.5")),
        run("decoupled_ramp_m8", "decoupled_ramp", 8, *found),
    ], "35M", 200e6, 65_536)  # fmt: skip


# ---------------------------------------------------------------- sweeps


def rate_runs() -> list[Run]:
    """For the inner rates above: the rate of one learner is used for two as well, that of eight for four."""
    found = (*EVERY_12, *IN_PIECES, *MEAN)
    return sized([
        *(run(f"dp_{rate}", DATA_PARALLEL, 1, f"inner.learning_rate={rate}") for rate in (0.0015, 0.003, 0.006)),
        *(run(f"m8_{rate}", "decoupled", 8, *found, f"inner.learning_rate={rate}") for rate in (0.003, 0.006)),
    ], "35M", 50e6, 65_536)  # fmt: skip


def outer_runs() -> list[Run]:
    """Outer settings for the methods that first had those of `decoupled`; 0.7 / 0.9 is published."""
    tries = ((1.0, 0.5), (0.7, 0.9), (0.7, 0.5))
    return sized([
        run(f"{name}_{rate}_{momentum}", name, 8, "protocol.local_steps_per_round=30", *outer(rate, momentum))
        for name in ("streaming", "diloco") for rate, momentum in tries
    ], "35M", 50e6, 65_536)  # fmt: skip


def merge_runs() -> list[Run]:
    """RDA steps further than a mean at the same outer rate, so each is compared at its own: a mean, and RDA on all tensors, with
    Muon. The main runs have `mean_1.0_0.5`."""
    tries = (("mean", 1.0, 0.5), ("mean", 0.7, 0.7), ("rda", 0.4, 0.7), ("rda", 0.7, 0.5), ("rda", 1.0, 0.5))
    return sized([
        run(
            f"{merge}_{rate}_{momentum}", "decoupled", 8, *EVERY_12, *IN_PIECES, f"protocol.merge={merge}",
            f"protocol.embedding_merge={merge}", *outer(rate, momentum),
        )
        for merge, rate, momentum in tries
    ], "35M", 50e6, 65_536)  # fmt: skip


def sweep_runs() -> list[Run]:
    """Runs from which the other settings were chosen."""
    published = outer(0.4, 0.7)
    rda = ("protocol.embedding_merge=rda", *published)
    return sized([
        *(run(f"dp_muon_{rate}", DATA_PARALLEL, 1, f"inner.learning_rate={rate}") for rate in ("3e-3", "1.5e-3", "6e-3")),
        run("m8_muon_mean", "decoupled", 8, *EVERY_12, *MEAN, "inner.learning_rate=4e-3"),
        run("m2_muon_mean", "decoupled", 2, *EVERY_12, *MEAN),
        run("m8_muon_mean_mu7", "decoupled", 8, *EVERY_12, *MEAN, "outer.outer_momentum=0.7"),
        run("m8_muon_mean_h24", "decoupled", 8, *MEAN),
        run("m8_muon_rda", "decoupled", 8, *EVERY_12, "inner.learning_rate=4e-3", *rda),
        run("dp_adamw", DATA_PARALLEL, 1, *BY_ADAMW),
        run("m8_adamw_rda", "decoupled", 8, *BY_ADAMW, *published),
        run("m8_adamw_rda_b99", "decoupled", 8, *BY_ADAMW, "inner.betas=[0.9,0.99]", *published),
    ], "35M", 90e6, 65_536)  # fmt: skip


# ---------------------------------------------------------------- one choice at a time

PUBLISHED = (*BY_ADAMW, *outer(0.4, 0.7))
"""As in the papers: AdamW, H = P = 24, RDA on all but the embedding; with a smaller outer step, because the run is short."""
SPARSE = 0.0645
"""Share of the values: with index and value, 64 bits each, it needs as many bytes as int4."""
EXACT = ("protocol.adopt=exact", "protocol.quorum=all", "protocol.grace=none", "protocol.pace=0")
"""Every learner waits for a result that has not arrived tau steps after its pull, so that tau is exact. With adoption on arrival
and links as fast as these, a result would be adopted at the next step boundary for any tau; and tau = 0 must wait."""
UNEVEN = ("cluster.slow_share=0.25", "cluster.slow_factor=1.5")


def ablation_runs() -> list[Run]:
    groups = (_codecs(), _merges(), _overlaps(), _uneven(), _fragments(), _others(), _with_muon())
    found = [run(name, "decoupled", 8, *PUBLISHED, *lines) for group in groups for name, lines in group.items()]
    references = [run("data_parallel", DATA_PARALLEL, 1, *BY_ADAMW), run("data_parallel_muon", DATA_PARALLEL, 1)]
    return sized([*references, run("base", "decoupled", 8, *PUBLISHED), *found], "10M", 50e6, 32_768)


def _codecs() -> dict[str, list[str]]:
    """int4 is the base."""
    names = ("fp32", "bf16", "int8", "int2", "int1", "e3m0")
    plain = {f"codec_{name}": [f"protocol.codec_up={name}"] for name in names}
    dropping = {f"codec_{name}": [f"protocol.codec_up={name}:{SPARSE}"] for name in ("top_k", "random_drop")}
    return plain | {"codec_int4_feedback": ["protocol.error_feedback=true"]} | dropping


def _merges() -> dict[str, list[str]]:
    """model_embedding; rda_mean is the base."""
    pairs = (("rda", "rda"), ("mean", "mean"), ("mean", "rda"))
    return {f"merge_{m}_{e}": [f"protocol.merge={m}", f"protocol.embedding_merge={e}"] for m, e in pairs}


def _overlaps() -> dict[str, list[str]]:
    even = {f"overlap_{tau}": [*EXACT, f"protocol.overlap={tau}"] for tau in (0, 1, 2, 5, 10)}
    kept = {f"{name}_keep": [*lines, "protocol.keep_overlap=true"] for name, lines in even.items() if name != "overlap_0"}
    by_learner = "protocol.overlap_by_learner=[1,1,1,1,6,6,6,6]"
    return even | kept | {"overlap_1_and_6": [*EXACT, "protocol.overlap=6", by_learner]}


def _uneven() -> dict[str, list[str]]:
    """A quarter of the learners is 1.5 times as slow; and the papers' bad case, one learner per merge."""
    no_grace = "protocol.grace=none"
    bad = [no_grace, "protocol.pace=0", "protocol.quorum=1"]
    return {"uneven": [*UNEVEN], "uneven_no_grace": [*UNEVEN, no_grace], "uneven_bad": [*UNEVEN, *bad], "even_bad": bad}


def _fragments() -> dict[str, list[str]]:
    """24 balanced fragments are the base. In a model of 4 layers, 2 and 3 layers per fragment give the same two fragments."""

    def by_layer(order: str, layers: int) -> list[str]:
        keys = {"fragmentation": "layer", "fragments": 0, "layer_order": order, "layers_per_fragment": layers}
        return [f"protocol.{key}={value}" for key, value in keys.items()]

    layered = {f"layer_{order}_{n}": by_layer(order, n) for order, n in
               (("strided", 1), ("strided", 2), ("sequential", 2), ("strided", 4))}  # fmt: skip
    return layered | {kind: [f"protocol.fragmentation={kind}"] for kind in ("tensor", "sub_tensor")}


def _others() -> dict[str, list[str]]:
    """Freezing compares with overlap_0. With adoption on arrival and a fragment due in each step it would learn nothing: the
    fragment due next is pulled from the copy of the previous boundary, while the step that trains it still runs, and is then
    overwritten."""
    freezing = [*EXACT, "protocol.overlap=0", "protocol.freeze_not_due=true"]
    moments = {"fresh_moments": ["inner.preserve_optimizer_state=false"], "betas_0.99": ["inner.betas=[0.9,0.99]"]}
    return {"freezing": freezing} | moments | {f"h{h}": [f"protocol.local_steps_per_round={h}"] for h in (12, 48)}


def _with_muon() -> dict[str, list[str]]:
    """The merges again, to compare with data_parallel_muon: Muon's learners may need another merge than AdamW's."""
    muon = [f"inner.{key}={value}" for key, value in SETTINGS["inner"].items()]
    muon.append(f"inner.learning_rate={SETTINGS['rates'][8]}")
    pairs = (("rda", "mean"), ("rda", "rda"), ("mean", "mean"))
    return {f"muon_{m}_{e}": [*muon, f"protocol.merge={m}", f"protocol.embedding_merge={e}"] for m, e in pairs}


GROUPS = {
    "main": main_runs, "rates": rate_runs, "outer": outer_runs, "merges": merge_runs, "sweep": sweep_runs,
    "ablations": ablation_runs,
}  # fmt: skip

# ---------------------------------------------------------------- running jobs


@dataclass(frozen=True)
class Job:
    run: Run
    seed: int
    out: Path
    settings: tuple[str, ...] = ()
    """The run's arguments and the common ones that decide what is trained."""

    @property
    def name(self) -> str:
        return f"{self.run.name}.s{self.seed}"

    def beside(self, suffix: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{self.name}{suffix}")


class JobRunner:
    """Starts jobs, prints their progress and appends their lines. One thread per job; `until` is on the monotonic clock. With
    `states` a job keeps its state in that folder, and is asked to stop `grace` seconds before the end. `notes` go into every
    line."""

    def __init__(
        self, common: Sequence[str], until: float, *, states: Path | None = None, grace: float = 0.0,
        notes: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._common, self._until, self._lock = list(common), until, threading.Lock()
        self._states, self._grace, self._notes = states, grace, dict(notes or {})
        self.failures: dict[str, str] = {}
        self.stopped: list[str] = []

    def __call__(self, job: Job) -> None:
        if time.monotonic() >= self._until:
            why = "not started, the time is up"
        else:
            job.beside(".line").unlink(missing_ok=True)
            why = self._carry_out(job)
        with self._lock:
            if why == STOPPED_WORDS:
                self.stopped.append(job.name)
            elif why:
                self.failures[job.name] = why
                print(f"{job.name}: {why}", flush=True)
            else:
                append(job, self._notes)

    def _carry_out(self, job: Job) -> str:
        own = ["--name", job.run.name, "--seed", str(job.seed), "--out", str(job.beside(".line"))]
        own += ["--state", str(state_of(self._states, job))] if self._states is not None else []
        words = [sys.executable, str(TRAIN), *job.run.arguments, *self._common, *own]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process, job.beside(".log").open("w", encoding="utf8") as log:  # fmt: skip
            ending = threading.Timer(self._until - time.monotonic(), end, [process])
            asking = threading.Timer(max(0.0, self._until - self._grace - time.monotonic()), process.terminate)
            timers = [ending, *([asking] if self._states is not None else [])]
            for timer in timers:
                timer.daemon = True
                timer.start()
            last = self._listen(job, process, log)
            code = process.wait()
            for timer in timers:
                timer.cancel()
        asked = self._states is not None and time.monotonic() >= self._until - self._grace
        if code in (0, STOPPED) or (asked and code == -signal.SIGTERM):  # before train.py took the signal: it begins anew
            return STOPPED_WORDS if code else ""
        return "ended, the time is up" if time.monotonic() >= self._until else f"exit {code}, {last} (see {job.beside('.log')})"

    def _listen(self, job: Job, process: subprocess.Popen[str], log: Any) -> str:
        """Copies all output to the log, and prints the lines of train.py with the seed."""
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            log.write(line)
            log.flush()
            last = line.strip() or last
            if line.startswith(f"{job.run.name}: "):
                with self._lock:
                    print(f"{job.name}{line.rstrip().removeprefix(job.run.name)}", flush=True)
        return last


def state_of(folder: Path, job: Job) -> Path:
    """Its name has what is trained: the state of another run under the same name is not gone on from."""
    digest = hashlib.sha256(json.dumps(job.settings).encode()).hexdigest()[:12]
    return folder / f"{job.name}.{digest}.kept"


def end(process: subprocess.Popen[str]) -> None:
    """With its children: the process has its own session."""
    os.killpg(process.pid, signal.SIGKILL)


def append(job: Job, notes: Mapping[str, str]) -> None:
    line = json.loads(job.beside(".line").read_text(encoding="utf8"))
    with job.out.open("a", encoding="utf8") as file:
        file.write(json.dumps(line | {"arguments": list(job.settings)} | notes) + "\n")
    job.beside(".line").unlink()


def done(out: Path) -> set[tuple[str, int, tuple[str, ...]]]:
    """By name, seed and settings: a run with other settings does not count."""
    if not out.exists():
        return set()
    lines = [json.loads(line) for line in out.read_text(encoding="utf8").splitlines()]
    return {(line["name"], line["seed"], tuple(line.get("arguments", ()))) for line in lines}


def deciding(words: Sequence[str]) -> tuple[str, ...]:
    """Common arguments of train.py without those that change only where and how fast it runs."""
    kept, passing = [], iter(words)
    for word in passing:
        if word in ("--device", "--threads"):
            next(passing, None)
        elif word != "--compiled":
            kept.append(word)
    return tuple(kept)


def jobs_of(chosen: argparse.Namespace, more: Sequence[str] = ()) -> Iterator[Job]:
    """All runs of one seed before the next seed, so that an interrupted study can still be compared."""
    runs = GROUPS[chosen.group]()
    wanted = set(filter(None, chosen.only.split(",")))
    unknown = wanted - {each.name for each in runs}
    if unknown:
        raise SystemExit(f"--only {','.join(sorted(unknown))}: no such run in {chosen.group}; --list names them")
    scale = [word for key in ("size", "tokens", "step_tokens") if (value := getattr(chosen, key)) is not None
             for word in (f"--{key.replace('_', '-')}", f"{value}")]  # fmt: skip
    already = done(chosen.out) if chosen.skip_done else set()
    for seed in map(int, chosen.seeds.split(",")):
        for each in runs:
            scaled = Run(each.name, (*each.arguments, *scale))
            settings = (*scaled.arguments, *deciding(more))
            if (not wanted or each.name in wanted) and (each.name, seed, settings) not in already:
                yield Job(scaled, seed, chosen.out, settings)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seeds", default="0", help="numbers, separated by commas")
    parser.add_argument("--size")
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--skip-done", action="store_true", help="leave out runs that --out has with the same settings")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--list", action="store_true")
    return parser


def main(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    chosen = options().parse_args(words[:at])
    jobs = list(jobs_of(chosen, words[at + 1 :]))
    if chosen.list:
        for job in jobs:
            print(f"{job.name}: {' '.join(job.run.arguments)}")
        return 0
    common = ["--data", str(chosen.data), *(["--compiled"] if chosen.compiled else []), *words[at + 1 :]]
    runner = JobRunner(common, time.monotonic() + chosen.time_limit)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(runner, jobs))
    return report(runner.failures, len(jobs))


def report(failures: Mapping[str, str], jobs: int) -> int:
    print(f"{jobs - len(failures)} of {jobs} runs are done")
    for name, why in failures.items():
        print(f"failed: {name}: {why}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
