"""What does an honest run lose between two commits, in loss and in pace?

    python bench/honest_pace.py loss BEFORE AFTER [MORE ...] [--seeds 3] [--out bench/results/honest_pace.jsonl]
    python bench/honest_pace.py pace BEFORE AFTER [MORE ...] [--turns 8] [--out bench/results/honest_pace.jsonl]

BEFORE, AFTER and MORE are working trees, each of another commit (`git worktree add --detach FOLDER COMMIT`). Each runs its own
recipe `tiny` under preset decoupled, without faults. `loss`: in virtual time, the final held-out loss and the virtual seconds of
each seed. `pace`: live, a syncer and four learners as processes, outer and inner steps a second of the syncer's clock,
without the first tenth of the run. The trees take turns, in the other order every second turn, so that other work on the machine
meets all of them alike. One JSON line for each tree after the first, which compares it with the first; `by_turn` are the ratios
within each turn, sorted. Exit code 1 if AFTER is more than 1 % worse. Nothing else should run meanwhile; `load` says what did
before and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from provenance import commit
from scripted import load_average

ALLOWED = 0.01
TINY = ("recipes/tiny.toml", "decoupled")
RUNNER = '''
import signal, sys, tempfile
from pathlib import Path
from unittest.mock import patch
from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.protocol.vocabulary import Received, Report, Stored
from atoll.runtime.local import cluster

class Kept(cluster.ForkServer):
    """One for all runs: importing torch takes longer than a run."""
    children = []
    def spawn(self, argv, log):
        self.children.append(super().spawn(argv, log))
        return self.children[-1]
    def close(self):
        for child in self.children:
            child.signal(signal.SIGKILL)
        for child in self.children:
            child.wait(10.0)
        self.children.clear()

kept = Kept()
config = load(Path(sys.argv[1]), preset_name=sys.argv[2])
for _ in sys.stdin:
    stored, reported = [], []
    def watch(record):
        if isinstance(record.event, Stored):
            stored.append(record.now)
        elif isinstance(record.event, Received) and isinstance(record.event.envelope.body, Report):
            reported.append(record.now)
    with tempfile.TemporaryDirectory() as folder, patch.object(cluster, "ForkServer", lambda: kept):
        cluster.LocalCluster(config, Path(folder) / "run", ChaosPlan(()), watch=watch).run()
    first = len(stored) // 10
    seconds = (stored[-1] - stored[first]) / 1e9
    steps = sum(stored[first] <= at <= stored[-1] for at in reported)
    print((len(stored) - 1 - first) / seconds, steps / seconds, flush=True)
cluster.ForkServer.close(kept)
'''
"""Reads lines; for each it runs the recipe live and answers with outer steps and inner steps a second. It uses only what both
trees have."""


class Tree:
    def __init__(self, folder: Path) -> None:
        self.folder, self.commit = folder.absolute(), commit(folder)
        self.outer: list[float] = []
        self.inner: list[float] = []
        self._environment = os.environ | {"PYTHONPATH": str(self.folder / "src")}
        self._runner: subprocess.Popen[str] | None = None

    def loss(self, seed: int) -> tuple[float, float]:
        """In virtual time, and how long it lasts."""
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", TINY[0], "--preset", TINY[1], "--virtual", "--seed", str(seed), "--json", "--out", f"{folder}/run"]
            done = subprocess.run(
                [sys.executable, "-m", "atoll", *words], cwd=self.folder, env=self._environment, capture_output=True, text=True
            )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"a run of {self.commit} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        return round(summary["loss_final"], 5), round(summary["seconds"], 3)

    def begin(self) -> None:
        words = [sys.executable, "-c", RUNNER, *TINY]
        pipe = subprocess.PIPE
        self._runner = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdin=pipe, stdout=pipe, text=True)

    def turn(self) -> tuple[float, float]:
        assert self._runner is not None and self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.write("go\n")
        self._runner.stdin.flush()
        outer, inner = map(float, self._runner.stdout.readline().split())
        return round(outer, 3), round(inner, 3)

    def end(self) -> None:
        assert self._runner is not None and self._runner.stdin is not None
        self._runner.stdin.close()
        self._runner.wait(60)


def losses(trees: Sequence[Tree], seeds: int) -> list[dict[str, Any]]:
    found = [[tree.loss(seed) for seed in range(seeds)] for tree in trees]
    lines = []
    for tree, runs in zip(trees[1:], found[1:], strict=True):
        both = (found[0], runs)
        ratio = mean(loss for loss, _ in runs) / mean(loss for loss, _ in found[0])
        lines.append({
            "what": "loss", "before": trees[0].commit, "after": tree.commit,
            "loss": [[loss for loss, _ in each] for each in both],
            "ratio": round(ratio, 5), "worse": round(ratio - 1, 5),
            "virtual_seconds": [[took for _, took in each] for each in both],
        })  # fmt: skip
    return lines


def paces(trees: Sequence[Tree], turns: int) -> list[dict[str, Any]]:
    for tree in trees:
        tree.begin()
    try:
        for tree in trees:
            tree.turn()  # to read what later turns have in memory
        for turn in range(turns):
            for tree in trees[:: 1 if turn % 2 == 0 else -1]:
                outer, inner = tree.turn()
                tree.outer.append(outer)
                tree.inner.append(inner)
                print(f"turn {turn}: {tree.commit} {outer} outer steps and {inner} inner steps a second", file=sys.stderr)
    finally:
        for tree in trees:
            tree.end()
    lines = []
    for tree in trees[1:]:
        outer_pace = compared(trees[0].outer, tree.outer)
        lines.append({
            "what": "pace", "before": trees[0].commit, "after": tree.commit, "turns": turns,
            "outer_steps_per_second": outer_pace,
            "inner_steps_per_second": compared(trees[0].inner, tree.inner), "worse": round(1 - outer_pace["ratio"], 4),
        })  # fmt: skip
    return lines


def compared(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    by_turn = sorted(round(b / a, 3) for a, b in zip(before, after, strict=True))
    ratio = round(median(after) / median(before), 4)
    return {"before": median(before), "after": median(after), "ratio": ratio, "by_turn": by_turn, "median": median(by_turn)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loss", "pace"])
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    trees, load = [Tree(folder) for folder in options.trees], [load_average()]
    lines = losses(trees, options.seeds) if options.what == "loss" else paces(trees, options.turns)
    load.append(load_average())
    for line in lines:
        line |= {"load": load, "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit()}
        print(json.dumps(line), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return int(lines[0]["worse"] > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
