"""What does an honest run lose between two commits, in loss and in pace?

    python bench/honest_pace.py BEFORE AFTER [MORE ...] [--seeds 3] [--turns 8] [--out bench/results/honest_pace.jsonl]

BEFORE, AFTER and MORE are working trees, each of another commit (`git worktree add --detach FOLDER COMMIT`). Each runs its own
recipe `tiny` under preset decoupled, without faults. In virtual time: the final held-out loss and the virtual seconds of each
seed. Live, with four learners as processes: outer steps and trained tokens a second. The trees take turns, in the other order
every second turn, so that other work on the machine meets all of them alike. One JSON line for each tree after the first, which
compares it with the first. Exit code 1 if AFTER's loss or pace is more than 1 % worse.

`pace_by_turn` are the ratios within each turn, sorted. Nothing else should run meanwhile; `load` says what did
before.
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


def train(tree: Path, words: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "atoll", "train", "recipes/tiny.toml", "--preset", "decoupled", "--json", *words]
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        done = subprocess.run(
            [*command, "--out", f"{folder}/run"], cwd=tree, env=environment, capture_output=True, text=True
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"a run of {commit(tree)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def virtual(tree: Path, seeds: int) -> list[dict[str, Any]]:
    return [train(tree, ["--virtual", "--seed", str(seed)]) for seed in range(seeds)]


def live(trees: Sequence[Path], turns: int) -> list[list[dict[str, Any]]]:
    """The summaries of each tree, in the order of its turns."""
    found: list[list[dict[str, Any]]] = [[] for _ in trees]
    for turn in range(turns):
        for which in range(len(trees))[:: 1 if turn % 2 == 0 else -1]:
            found[which].append(train(trees[which], []))
            print(f"turn {turn}: {commit(trees[which])} {rates(found[which][-1:], 'rounds_merged')}", file=sys.stderr, flush=True)
    return found


def rates(summaries: Sequence[dict[str, Any]], what: str) -> list[float]:
    return [round(summary[what] / summary["seconds"], 3) for summary in summaries]


def compared(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    by_turn = sorted(b / a for a, b in zip(before, after, strict=True))
    return {
        "before": median(before), "after": median(after), "ratio": round(median(after) / median(before), 4),
        "by_turn": [round(ratio, 3) for ratio in by_turn], "median_by_turn": round(median(by_turn), 4),
    }  # fmt: skip


def line_of(trees: tuple[Path, Path], virtuals: Sequence[list[dict[str, Any]]], lives: Sequence[list[dict[str, Any]]],
            load: str) -> dict[str, Any]:  # fmt: skip
    losses = [[run["loss_final"] for run in runs] for runs in virtuals]
    pace = compared(*(rates(runs, "rounds_merged") for runs in lives))
    tokens = compared(*(rates(runs, "tokens_trained") for runs in lives))
    return {
        "before": commit(trees[0]), "after": commit(trees[1]),
        "loss": [[round(loss, 4) for loss in each] for each in losses],
        "loss_ratio": round(mean(losses[1]) / mean(losses[0]), 4),
        "virtual_seconds": [[round(run["seconds"], 2) for run in runs] for runs in virtuals],
        "outer_steps_per_second": pace, "tokens_per_second": tokens,
        "live_loss": [round(median(run["loss_final"] for run in runs), 4) for runs in lives],
        "turns": len(lives[0]), "load": load, "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    trees = [tree.absolute() for tree in options.trees]
    load = load_average()
    virtuals = [virtual(tree, options.seeds) for tree in trees]
    lives = live(trees, options.turns)
    lines = [
        line_of((trees[0], trees[n]), (virtuals[0], virtuals[n]), (lives[0], lives[n]), load) for n in range(1, len(trees))
    ]  # fmt: skip
    for line in lines:
        print(json.dumps(line), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    first = lines[0]
    return int(first["loss_ratio"] > 1 + ALLOWED or first["outer_steps_per_second"]["ratio"] < 1 - ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
