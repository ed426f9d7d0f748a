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


def plan_of(attack: str, size: float, learners: int, hostile: int) -> str:
    faults = (
        f'[[faults]]\nfault = "hostile"\nat = 0.0\nlearner = {m}\nattack = "{attack}"\nsize = {size}\n'
        for m in range(learners - hostile, learners)
    )
    return "\n".join(faults)


def run(merge: str, attack: str, seed: int, learners: int, steps: int, hostile: int = 1) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "atoll", "train", str(ROOT / "recipes" / "tiny.toml"), "--virtual", "--json",
            "--seed", str(seed), "--out", f"{folder}/run", "--threads", "1", "--learners", str(learners),
            "--set", f"total_steps={steps}", "--set", f"protocol.merge={merge}", "--set", f"protocol.embedding_merge={merge}",
        ]  # fmt: skip
        if (chosen := ATTACKS[attack]) is not None:
            plan = Path(folder) / "plan.toml"
            plan.write_text(plan_of(*chosen, learners, hostile))
            command += ["--chaos", str(plan)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        line: dict[str, Any] = {
            "merge": merge, "attack": attack, "seed": seed, "learners": learners, "total_steps": steps,
            "hostile": hostile if chosen is not None else 0, "machine": platform.machine(),
        }  # fmt: skip
        if done.returncode:
            return line | {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no word"}
        summary = json.loads(done.stdout)
        return line | {
            "loss": summary["loss_final"], "virtual_seconds": summary["seconds"],
            "refused": summary.get("refused", 0), "expelled": summary.get("expelled", {}),
        }  # fmt: skip


EIGHT = ("free ride", "sign flip", "sign flip x9", "scale x9", "drift", "drift x9")


def runs(seeds: list[int], steps: int, *, of_eight: bool) -> Iterator[tuple[str, str, int, int, int, int]]:
    for seed in seeds:
        for merge in MERGES:
            if of_eight:
                yield merge, "none", seed, 8, steps, 0
                yield from ((merge, attack, seed, 8, steps, hostile) for attack in EIGHT for hostile in (1, 2))
                continue
            yield merge, "none", seed, 4, steps, 0
            for attack in ATTACKS:
                if attack != "none":
                    yield merge, attack, seed, 5, steps, 1


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Loss against the reference of the same merge, and outer steps in the same virtual time."""
    for line in lines:
        line["attack"] += f" by {line['hostile']}" if line["learners"] == 8 and line["attack"] != "none" else ""
    good = [line for line in lines if "failed" not in line]
    attacks = dict.fromkeys(line["attack"] for line in lines)

    def average(merge: str, attack: str, key: str) -> float:
        found = [line[key] for line in good if (line["merge"], line["attack"]) == (merge, attack)]
        return mean(found) if found else float("nan")

    yield "| attack | " + " | ".join(f"`{merge}`" for merge in MERGES) + " |"
    yield "|---|" + "---|" * len(MERGES)
    yield "| none: loss | " + " | ".join(f"{average(merge, 'none', 'loss'):.4f}" for merge in MERGES) + " |"
    for attack in attacks:
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
    parser.add_argument("--of-eight", action="store_true", help="one and two hostile learners of eight")
    parser.add_argument("--total-steps", type=int, default=400)
    parser.add_argument("--table", type=Path, help="print the table of these results instead of running")
    asked = parser.parse_args()
    if asked.table is not None:
        print("\n".join(table([json.loads(line) for line in asked.table.read_text().splitlines()])))
        return
    with ThreadPoolExecutor(asked.jobs) as pool:
        seeds = [int(seed) for seed in asked.seeds.split(",")]
        futures = [pool.submit(run, *one) for one in runs(seeds, asked.total_steps, of_eight=asked.of_eight)]
        for future in futures:
            print(json.dumps(future.result()), flush=True)


if __name__ == "__main__":
    main()
