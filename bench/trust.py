"""What one hostile learner beside four honest ones does to each merge, in virtual time: loss of Theta, and pace.

    python bench/trust.py --jobs 16 --seeds 0,1,2 > bench/results/trust.jsonl

One line for each (merge, attack, seed); `python bench/trust.py --table bench/results/trust.jsonl` prints the table of
docs/operations/trust.md. The reference of a merge is the same recipe with four honest learners under that merge.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
MERGES = ("mean", "rda", "clipped_mean", "trimmed_mean", "geometric_median")
ATTACKS: dict[str, tuple[str, float] | None] = {
    "none": None, "steps": ("steps", 1.0), "tokens": ("tokens", 1.0), "times": ("times", 1.0), "clock": ("clock", 1.0),
    "dawdle 1 s": ("dawdle", 1.0), "free ride": ("free_ride", 1.0), "sign flip": ("sign_flip", 1.0),
    "sign flip x9": ("sign_flip", 9.0), "scale x9": ("scale", 9.0), "noise x9": ("noise", 9.0), "noise x1e4": ("noise", 1e4),
    "drift": ("drift", 1.0), "drift x9": ("drift", 9.0),
}  # fmt: skip
"""x9 is just inside `limits.peer_factor`: the attacker knows the rule."""


def run(merge: str, attack: str, seed: int, learners: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "atoll", "train", str(ROOT / "recipes" / "tiny.toml"), "--virtual", "--json",
            "--seed", str(seed), "--out", f"{folder}/run", "--threads", "1", "--learners", str(learners), "--set", f"total_steps={steps}",
            "--set", f"protocol.merge={merge}", "--set", f"protocol.embedding_merge={merge}",
        ]  # fmt: skip
        if (chosen := ATTACKS[attack]) is not None:
            plan = Path(folder) / "plan.toml"
            name, size = chosen
            plan.write_text(f'[[faults]]\nfault = "hostile"\nat = 0.0\nlearner = 4\nattack = "{name}"\nsize = {size}\n')
            command += ["--chaos", str(plan)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        line: dict[str, Any] = {
            "merge": merge, "attack": attack, "seed": seed, "learners": learners, "total_steps": steps,
            "machine": platform.machine(),
        }  # fmt: skip
        if done.returncode:
            return line | {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no word"}
        summary = json.loads(done.stdout)
        return line | {
            "loss": summary["loss_final"], "virtual_seconds": summary["seconds"],
            "refused": summary.get("refused", 0), "expelled": summary.get("expelled", {}),
        }  # fmt: skip


def runs(seeds: list[int], steps: int) -> Iterator[tuple[str, str, int, int, int]]:
    for seed in seeds:
        for merge in MERGES:
            yield merge, "none", seed, 4, steps
            for attack in ATTACKS:
                if attack != "none":
                    yield merge, attack, seed, 5, steps


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Loss against the reference of the same merge, and outer steps in the same virtual time."""
    good = [line for line in lines if "failed" not in line]

    def average(merge: str, attack: str, key: str) -> float:
        found = [line[key] for line in good if (line["merge"], line["attack"]) == (merge, attack)]
        return mean(found) if found else float("nan")

    yield "| attack | " + " | ".join(f"`{merge}`" for merge in MERGES) + " |"
    yield "|---|" + "---|" * len(MERGES)
    yield "| none: loss | " + " | ".join(f"{average(merge, 'none', 'loss'):.4f}" for merge in MERGES) + " |"
    for attack in ATTACKS:
        cells = []
        for merge in MERGES:
            loss = average(merge, attack, "loss") / average(merge, "none", "loss") - 1
            pace = average(merge, "none", "virtual_seconds") / average(merge, attack, "virtual_seconds")
            failed = any("failed" in x for x in lines if (x["merge"], x["attack"]) == (merge, attack))
            cells.append("failed" if failed else f"{100 * loss:+.1f} %" + (f", pace {pace:.2f}" if pace < 0.98 else ""))
        if attack != "none":
            yield f"| {attack} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--total-steps", type=int, default=400)
    parser.add_argument("--table", type=Path, help="print the table of these results instead of running")
    asked = parser.parse_args()
    if asked.table is not None:
        print("\n".join(table([json.loads(line) for line in asked.table.read_text().splitlines()])))
        return
    with ThreadPoolExecutor(asked.jobs) as pool:
        futures = [pool.submit(run, *one) for one in runs([int(s) for s in asked.seeds.split(",")], asked.total_steps)]
        for future in futures:
            print(json.dumps(future.result()), flush=True)


if __name__ == "__main__":
    main()
