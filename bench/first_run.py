"""`make train`'s job several times: how much of what was trained was discarded, and how far a run with kills ends from its twin?

    python bench/first_run.py [--runs 10] [--recipe recipes/first.toml] [--out bench/results/first_run.jsonl]

Each run is the command of `make train`: a syncer and its learners as processes, two of them killed on the way, and the same again
without kills. One JSON line a run. `discarded` are the shares of trained tokens that did not reach Theta and never will (of the
run and of its twin); `kills_in_flight` counts the kills during which a round was being pulled, merged or stored. The targets: at
most 10 % discarded in every run, and losses within 2 % of the twin's in nine of ten. Exit code 1 if they are missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import commit

from atoll.protocol.membership import Standing
from atoll.protocol.vocabulary import Membership
from atoll.tape.format import Tape
from atoll.tape.in_flight import RoundsInFlight

ROOT = Path(__file__).parents[1]
DISCARDED_MOST, APART_MOST, APART_SHARE = 0.10, 0.02, 0.9


def train(recipe: Path, folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "atoll", "train", str(recipe), "--chaos", str(ROOT / "recipes" / "two_kills.toml")]
    words += ["--twin", "--json", "--out", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def discarded(summary: dict[str, Any]) -> float:
    return float(summary["tokens"]["discarded"] / summary["tokens"]["trained"])


def kills_in_flight(tape: Path) -> int:
    """Losses of learners before the end, and of those how many while a round was in flight."""
    in_flight, count = RoundsInFlight(), 0
    for record in Tape(tape).records():
        lost = any(isinstance(e, Membership) and e.standing is Standing.LOST for e in record.effects)
        count += lost and len(in_flight) > 0
        in_flight.note(record.event, record.effects)
    return count


def line_of(recipe: Path, summary: dict[str, Any], twin: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "recipe": recipe.name, "seconds": round(seconds, 1), "training_seconds": round(summary["seconds"], 1),
        "discarded": round(discarded(summary), 4), "twin_discarded": round(discarded(twin), 4),
        "token_shares": summary["token_shares"], "goodput": summary["goodput"], "token_goodput": summary["token_goodput"],
        "tokens_unreported": summary["tokens_unreported"], "loss_first": summary["loss_first"],
        "loss_final": summary["loss_final"], "twin_loss": summary["twin_loss"],
        "apart": round(summary["loss_final"] / summary["twin_loss"] - 1, 4),
        "kills": len(summary["faults"]), "kills_in_flight": kills_in_flight(Path(summary["tape"])),
        "recovered_in": [round(recovery["seconds"], 2) for recovery in summary["recoveries"]],
        "cores": os.cpu_count(), "machine": platform.machine(), "commit": commit(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "first.toml")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    lines = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            summary = train(options.recipe, Path(folder) / "run")
            twin = json.loads((Path(folder) / "run-twin" / "summary.json").read_text())
            lines.append(line_of(options.recipe, summary, twin, time.monotonic() - began))
        print(json.dumps(lines[-1]), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    kept = all(max(line["discarded"], line["twin_discarded"]) <= DISCARDED_MOST for line in lines)
    near = sum(abs(line["apart"]) <= APART_MOST for line in lines)
    good = kept and near >= APART_SHARE * len(lines)
    most = max(line["discarded"] for line in lines)
    verdict = "PASS" if good else "FAIL"
    print(f"{verdict}: discarded at most {most:.1%}; {near} of {len(lines)} within {APART_MOST:.0%} of the twin")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
