"""What does `atoll replay --weights --device cuda` give of a run that was trained on a GPU?

    python bench/gpu_replay.py [--device cuda] [--steps 40] [--out FILE]

Live runs of two learners that share the device, then a replay of each there: deterministic ones, eager and compiled, which are
to be equal bit for bit, and one with the defaults (bf16, compiled), whose final Theta is compared with the recorded one. Learners
train in processes of their own; the replay trains them again in one. One JSON line a run; exit code 1 if a deterministic run's
bits differ, or if the other is further away than `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import commit

ROOT = Path(__file__).parents[1]
CASES: dict[str, list[str]] = {
    "deterministic, eager": ["model.deterministic=true", "model.compile=off"],
    "deterministic, compiled": ["model.deterministic=true"],
    "defaults": [],
}
MODEL = ["model.numbers.width=256", "model.numbers.layers=4", "model.numbers.heads=4", "model.numbers.mlp=768"]


def atoll(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)


def replayed(lines: list[str], steps: int, device: str, tolerance: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atoll-replay-", ignore_cleanup_errors=True) as name:
        run = Path(name) / "run"
        options = [word for line in [*MODEL, "learners=2", f"total_steps={steps}", *lines] for word in ("--set", line)]
        trained = atoll("train", "--preset", "decoupled", "--device", device, "--out", str(run), *options)
        if trained.returncode:
            raise SystemExit(f"the run ended with {trained.returncode}:\n{trained.stdout[-2000:]}{trained.stderr[-2000:]}")
        summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
        bits = atoll("replay", str(run), "--weights", "--device", device)
        found = {"compute": summary["compute"], "bits_equal": bits.returncode == 0}
        if bits.returncode:
            near = atoll("replay", str(run), "--weights", "--device", device, "--tolerance", str(tolerance))
            said = near.stdout + near.stderr
            apart = re.search(r"([0-9.e+-]+) of its norm", said)
            found |= {"first_difference": bits.stderr.strip()[-300:], "distance": float(apart[1]) if apart else said[-300:]}
            found["differing"] = int(m[1]) if (m := re.search(r"(\d+) Thetas differ", said)) else None
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tolerance", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    name = torch.cuda.get_device_name() if asked.device.startswith("cuda") else asked.device
    failed = False
    for case, lines in CASES.items():
        row = {"case": case, "steps": asked.steps, **replayed(lines, asked.steps, asked.device, asked.tolerance)}
        row |= {"torch": str(torch.__version__), "commit": commit(), "device": name}
        print(json.dumps(row), flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        near = row["bits_equal"] or (isinstance(row["distance"], float) and row["distance"] <= asked.tolerance)
        failed = failed or not (near if case == "defaults" else row["bits_equal"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
