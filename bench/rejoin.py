"""How long does a process that comes back take from the call of `atoll.join` to its first step?

    python bench/rejoin.py [--times 10] [--step 0.05] [--out bench/results/rejoin.jsonl]

A syncer and two loops with `atoll.join` on this machine: a network of a million parameters with AdamW, steps of about `--step`
seconds. One loop trains throughout. The other is killed (SIGKILL) after it was merged, and a process that has imported everything
already joins in its place. The clock runs from its call of `join` to the moment at which it may take its first step, with Theta
and the optimiser's state of the other loop. The breakdown is from its own tape. The steps of the loop that stays are timed while
the other comes back; none may last longer than twice its median. The last line is one JSON object. The target is a median of less
than 0.3 s. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from scripted import Cluster, load_average
from torch import nn

import atoll
from atoll.config import load
from atoll.executor.environment import use_threads
from atoll.protocol.vocabulary import Connected, Enter, InnerStep, LoadState, Received, StateTransfer, Ticket, Welcome
from atoll.tape.format import Tape

TARGET, WIDTH = 0.3, 700
STAGES = {"link open": Connected, "welcome": Welcome, "ticket": Ticket, "peer's state": StateTransfer, "enter": Enter}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))


def loop(options: argparse.Namespace) -> None:
    """A process of its own. It begins when a line comes on standard input, and says how long joining took, then every step."""
    use_threads(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, target = torch.randn(32, WIDTH), torch.randint(0, 10, (32,))
    join = atoll.join  # imported when it is first asked for, and imports are not part of the figure
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    joining = join(options.syncer, model, optimizer, token=options.token, out=options.folder)
    with joining as learner:
        print(json.dumps({"joined": time.monotonic() - began}), flush=True)
        while not learner.over:
            began = time.monotonic()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, options.step - (time.monotonic() - began)))
            learner.step(tokens=32, loss=loss)
            print(json.dumps({"at": time.monotonic(), "step": time.monotonic() - began}), flush=True)


class Loop:
    def __init__(self, cluster: Cluster, folder: Path, step: float, log: Path) -> None:
        words = ["--syncer", cluster.address, "--token", str(cluster.token), "--folder", str(folder), "--step", str(step)]
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--loop", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        self._lines, self._words = self._process.stdout, self._process.stdin
        self._lines.readline()

    def begin(self) -> dict[str, Any]:
        self._words.write("go\n")
        self._words.flush()
        return self.next()

    def next(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise SystemExit(f"a loop ended; its log: {Path(self._log.name).read_text()[-1500:]}")
        return dict(json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def breakdown(tape: Path) -> dict[str, float]:
    """Milliseconds between the stages of one joining, by its own tape; the first is the tape's own beginning."""
    passed: dict[str, int] = {}
    for record in Tape(tape).records():
        event = record.event
        what = type(event.envelope.body) if isinstance(event, Received) else type(event)
        passed.setdefault("tape", record.now)
        for name, kind in STAGES.items():
            if what is kind:
                passed.setdefault(name, record.now)
        if any(isinstance(effect, LoadState) for effect in record.effects):
            passed.setdefault("loaded", record.now)
        if any(isinstance(effect, InnerStep) for effect in record.effects):
            break
    moments = sorted(passed.items(), key=lambda item: item[1])
    return {name: round((at - before) / 1e6, 1) for (_, before), (name, at) in pairwise(moments)}


def come_back(
    cluster: Cluster, steady: Loop, returning: Loop, options: argparse.Namespace, number: int
) -> tuple[Loop, dict[str, Any]]:
    """Kills it after some steps, and lets the next process, which waits, take its place."""
    following = Loop(cluster, cluster.folder / "b", options.step, cluster.folder / f"b{number}.log")
    for _ in range(2 * options.interval):
        returning.next()
    returning.kill()
    time.sleep(4 * options.step)
    usual, at = [], 0.0
    joined_from = time.monotonic()
    joined = following.begin()
    joined_until = time.monotonic()
    while at < joined_until:
        line = steady.next()
        at = line["at"]
        usual.append((at, line["step"]))
    meanwhile = [step for at, step in usual if at >= joined_from]
    steps = [step for _, step in usual]
    tape = sorted((cluster.folder / "b").glob("*.tape"), key=lambda path: int(path.stem))[-1]
    stages = breakdown(tape)
    stages = {"place, model, tape": round(1e3 * joined["joined"] - sum(stages.values()), 1), **stages}
    figures = {
        "seconds": round(joined["joined"], 4), "stages_ms": stages,
        "median_step": round(statistics.median(steps), 4), "longest_step_meanwhile": round(max(meanwhile), 4),
    }  # fmt: skip
    return following, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of an inner step")
    parser.add_argument("--out", type=Path, help="append the result to this file")
    for hidden in ("--syncer", "--token", "--folder"):
        parser.add_argument(hidden, type=str if hidden == "--syncer" else Path, help=argparse.SUPPRESS)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(interval=16)
    options = parser.parse_args()
    if options.loop:
        loop(options)
        return 0
    config = load(preset_name="decoupled", overrides={
        "learners": 2, "total_steps": 1_000_000, "model": {"name": "custom"},
        "protocol": {"fragmentation": "sub_tensor", "fragments": 8, "local_steps_per_round": options.interval},
    })  # fmt: skip
    with Cluster(config) as cluster:
        steady = Loop(cluster, cluster.folder / "a", options.step, cluster.folder / "a.log")
        returning = Loop(cluster, cluster.folder / "b", options.step, cluster.folder / "b.log")
        first = threading.Thread(target=steady.begin)  # the first round waits for both
        first.start()
        returning.begin()
        first.join()
        lines = []
        for number in range(options.times):
            returning, figures = come_back(cluster, steady, returning, options, number)
            lines.append(figures)
            print(json.dumps(figures), flush=True)
        steady.kill()
        returning.kill()
    times, stages = [line["seconds"] for line in lines], [line["stages_ms"] for line in lines]
    slowest = max(line["longest_step_meanwhile"] / line["median_step"] for line in lines)
    result = {
        "parameters": sum(p.numel() for p in network().parameters()), "median": round(statistics.median(times), 4),
        "most": max(times), "times": times, "longest_step_over_median": round(slowest, 2), "step": options.step,
        "stages_ms": {name: round(statistics.median(s.get(name, 0.0) for s in stages), 1) for name in stages[0]},
        "load": load_average(), "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit(),
    }  # fmt: skip
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    good = result["median"] < TARGET and slowest <= 2.0
    print(f"{'PASS' if good else 'FAIL'}: {result['median']} s where less than {TARGET} s is the target")
    print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
