"""The code of queue.py: which runs of queue.toml are left, how long they take, and as many at a time as the device has room for.

A run is known by its name, seed and settings. One that has a line in the group's file is done and is never run again. One that
was stopped goes on from its state, to the bits of a run that was not stopped. `--minutes` is a limit: `--grace` seconds before it
every run is asked to stop, and at the limit nothing runs any more. With `--whole` no run is started that would not end in time:
for a machine whose disk is gone afterwards. Arguments after `--` go to train.py.

Lines go to runs/quality: in a new checkout all is to do. Those of the tables are in bench/quality/results, and
`--results bench/quality/results` goes on with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from study import Job, JobRunner, Run, deciding, done, state_of

sys.path.append(str(Path(__file__).parents[1]))
from provenance import commit

QUEUE = Path(__file__).with_name("queue.toml")
RESULTS = Path("runs", "quality")
KEYS = ("name", "preset", "learners", "with", "set", "seeds", "priority", "chips", "scavenge", "share_moments")
SPARE = 0.9
"""Share of a device's memory that is given away."""


class Cost(NamedTuple):
    seconds: float
    gib: float
    compute: float
    """Share of the device that it keeps busy."""


class Entry(NamedTuple):
    job: Job
    priority: int
    """1 is first."""
    cost: Cost


class Room(NamedTuple):
    gib: float
    compute: float = 1.0

    def less(self, costs: Iterable[Cost]) -> Room:
        taken = list(costs)
        return Room(self.gib - sum(c.gib for c in taken), self.compute - sum(c.compute for c in taken))

    def takes(self, cost: Cost) -> bool:
        return cost.gib <= self.gib and cost.compute <= self.compute + 1e-9


# ---------------------------------------------------------------- what there is to do


def arguments_of(queue: Mapping[str, Any], group: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Of train.py, in the order in which study.py has them: then a line of either counts for both."""
    if unknown := sorted(row.keys() - set(KEYS)):
        raise SystemExit(f"queue.toml: run {row.get('name')!r} has the unknown {', '.join(unknown)}; there are {', '.join(KEYS)}")
    words = ["--size", group["size"], "--tokens", f"{group['tokens']:g}", "--step-tokens", str(group["step_tokens"])]
    words += ["--preset", row["preset"], "--learners", str(row["learners"])]
    words += ["--share-moments"] if row.get("share_moments") else []
    words += [word for key in ("chips", "scavenge") if key in row for word in (f"--{key}", str(row[key]))]
    lines = [line for name in row.get("with", ()) for line in queue["settings"][name]]
    return (*words, *(word for line in (*lines, *row.get("set", ())) for word in ("--set", line)))


def entries_of(queue: Mapping[str, Any], names: Sequence[str], folder: Path, more: Sequence[str], device: str) -> list[Entry]:
    """Every run of these groups with every seed, done or not, the most urgent first."""
    found = []
    for name in names:
        group = queue["groups"][name]
        out = folder / group["file"]
        for row in group["runs"]:
            run = Run(row["name"], arguments_of(queue, group, row))
            for seed in row.get("seeds", group["seeds"]):
                job = Job(run, seed, out, (*run.arguments, *deciding(more)))
                found.append(Entry(job, row.get("priority", 2), cost_of(queue, group, row, out, device)))
    return sorted(found, key=lambda entry: (entry.priority, entry.job.seed))


def cost_of(queue: Mapping[str, Any], group: Mapping[str, Any], row: Mapping[str, Any], out: Path, device: str) -> Cost:
    """Time by the lines of this device, of runs of this size with about as many learners; else by queue.toml."""
    size = queue["sizes"][group["size"]]
    seen = [line["train_seconds"] / line["trained_tokens"] for line in lines_of(out)
            if line.get("device") == device and line["size"] == group["size"]
            and (line["learners"] == 1) == (row["learners"] == 1)]  # fmt: skip
    each = statistics.median(seen) if seen else 1 / size["tokens_per_second"]
    return Cost(group["tokens"] * each, size["gib"], size["compute"])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()] if path.exists() else []


def left_of(entries: Sequence[Entry], states: Path) -> list[Entry]:
    """Without those that are done; those that were stopped come first."""
    already = {out: done(out) for out in {entry.job.out for entry in entries}}
    left = [e for e in entries if (e.job.run.name, e.job.seed, e.job.settings) not in already[e.job.out]]
    return sorted(left, key=lambda entry: not state_of(states, entry.job).exists())


# ---------------------------------------------------------------- how long it takes, and doing it


def packed_seconds(entries: Sequence[Entry], room: Room) -> float:
    """Until the last is done, if each starts as soon as there is room for it."""
    waiting, running, now = list(entries), list[tuple[float, Cost]](), 0.0
    while waiting or running:
        for entry in startable(waiting, [cost for _, cost in running], room):
            running.append((now + entry.cost.seconds, entry.cost))
            waiting.remove(entry)
        now = min(end for end, _ in running)
        running = [(end, cost) for end, cost in running if end > now]
    return now


def startable(waiting: Sequence[Entry], running: Sequence[Cost], room: Room) -> list[Entry]:
    """In order; one that is too large for the room that is left lets smaller ones pass, and alone it may have all of it."""
    chosen: list[Entry] = []
    for entry in waiting:
        costs = [*running, *(each.cost for each in chosen)]
        if room.less(costs).takes(entry.cost) or not costs:
            chosen.append(entry)
    return chosen


class Worker:
    def __init__(self, runner: JobRunner, room: Room, until: float, *, whole: bool) -> None:
        self._runner, self._room, self._until, self._whole = runner, room, until, whole

    def work_off(self, entries: Sequence[Entry]) -> None:
        waiting, running = list(entries), dict[Future[None], Entry]()
        with ThreadPoolExecutor(max(1, len(waiting))) as pool:
            while True:
                self._drop_late(waiting)
                for entry in startable(waiting, [each.cost for each in running.values()], self._room):
                    running[pool.submit(self._runner, entry.job)] = entry
                    waiting.remove(entry)
                if not running:
                    return
                for over in wait(running, return_when=FIRST_COMPLETED).done:
                    over.result()
                    del running[over]

    def _drop_late(self, waiting: list[Entry]) -> None:
        left = self._until - time.monotonic()
        waiting[:] = [entry for entry in waiting if left > (entry.cost.seconds if self._whole else 0.0)]


# ---------------------------------------------------------------- the command


def said(entries: Sequence[Entry], left: Sequence[Entry], room: Room, device: str, states: Path) -> str:
    """What is done, what is left and how long that takes, before anything starts."""
    stopped = sum(state_of(states, entry.job).exists() for entry in left)
    words = f"{len(entries)} runs: {len(entries) - len(left)} are done, {len(left)} are left"
    words += f", {stopped} of them begun" if stopped else ""
    if not left:
        return words
    measured = any(line.get("device") == device for entry in left for line in lines_of(entry.job.out))
    known = "by the runs that this device has done" if measured else "by the times of an H200, five runs at a time"
    return f"{words}. They take about {duration(packed_seconds(left, room))} on {device} with {room.gib:.0f} GiB, {known}."


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"


def room_of(device: str, gib: float | None) -> Room:
    if gib is not None:
        return Room(gib)
    if device == "cuda":
        return Room(SPARE * torch.cuda.mem_get_info()[1] / 2**30)
    return Room(SPARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def options(groups: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[*groups, []], help="in any order; none: all of them")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder of the corpora and the tokenizer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the lines")
    parser.add_argument("--states", type=Path, default=RESULTS / "states", help="the folder for runs that were stopped")
    parser.add_argument("--minutes", type=float, default=1e6, help="the time that there is")
    parser.add_argument("--grace", type=float, default=90.0, help="seconds before that in which runs write their states")
    parser.add_argument("--whole", action="store_true", help="start only what ends in time")
    parser.add_argument("--memory", type=float, help="GiB for all runs together; by default nine tenths of the device's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--list", action="store_true", help="say what is left, and run nothing")
    return parser


def main(words: Sequence[str], path: Path = QUEUE) -> int:
    until = time.monotonic()
    at = words.index("--") if "--" in words else len(words)
    queue = tomllib.loads(path.read_text(encoding="utf8"))
    chosen, more = options(queue["groups"]).parse_args(words[:at]), words[at + 1 :]
    until += 60 * chosen.minutes
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else chosen.device
    room = room_of(chosen.device, chosen.memory)
    entries = entries_of(queue, chosen.groups or list(queue["groups"]), chosen.results, more, device)
    left = left_of(entries, chosen.states)
    print(said(entries, left, room, device, chosen.states), flush=True)
    if chosen.list:
        for entry in left:
            print(f"{entry.priority} {entry.job.name}: {duration(entry.cost.seconds)}, {' '.join(entry.job.run.arguments)}")
        return 0
    for folder in (chosen.results, chosen.states):
        folder.mkdir(parents=True, exist_ok=True)
    common = ["--data", str(chosen.data), "--device", chosen.device, *(["--compiled"] if chosen.compiled else []), *more]
    runner = JobRunner(common, until, states=chosen.states, grace=chosen.grace, notes={"commit": commit()})
    Worker(runner, room, until, whole=chosen.whole).work_off(left)
    return report(runner, entries, chosen.states)


def report(runner: JobRunner, entries: Sequence[Entry], states: Path) -> int:
    left = left_of(entries, states)
    print(f"{len(entries) - len(left)} of {len(entries)} runs are done, {len(runner.stopped)} were stopped and can go on")
    for name, why in runner.failures.items():
        print(f"failed: {name}: {why}")
    return 1 if runner.failures else 0
