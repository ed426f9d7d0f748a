"""How long does `atoll train` take from its last stored outer step to its exit?

    python bench/end_of_run.py --corpus TEXT --heldout TEXT --tokenizer FILE [--size 560M] [--steps 40] [--device cuda]

A live run of one learner with H = P = 12. In the time: the syncer's last announcement and its end, theta.safetensors written, the
tapes replayed, Theta read back with its checksums, its held-out loss over `--batches` batches, its SHA-256 and the summary. After
it: the file is loaded, and must have the summary's SHA-256. The text of Python's library holds out too little for 16 batches of
16 x 1024. One JSON line; exit code 1 if the target of 10 s is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_speed import ROOT, SIZES, config_for
from provenance import commit

from atoll.config import Config, changed, to_toml
from atoll.errors import DataError
from atoll.protocol.vocabulary import Stored
from atoll.store.weights import THETA_FILE
from atoll.tape.format import Tape
from atoll.tasks.trained import open_trained
from atoll.workload.data.stream import heldout_batches
from atoll.workload.data.tokens import text_data

TARGET = 10.0


def settings(asked: argparse.Namespace) -> Config:
    lines = [f"data.{key}={value}" for key in ("corpus", "heldout", "tokenizer") if (value := getattr(asked, key))]
    return changed(config_for(asked.size, 12, asked.steps, 1, 2), [*lines, f"data.heldout_batches={asked.batches}"])


def heldout_shape(config: Config) -> tuple[int, int]:
    """Batches, and tokens that are predicted."""
    d = config.data
    batches = heldout_batches(text_data(d).tokens, d.batch_size, d.seq_len, d.heldout_batches)
    return len(batches), sum(batch[:, 1:].numel() for batch in batches)


def last_stored(tape: Tape) -> tuple[int, float]:
    """The outer step, and when by the wall clock."""
    step, now = [(r.event.outer_step, r.now) for r in tape.records() if isinstance(r.event, Stored)][-1]
    return step, (tape.header.epoch + now) / 1e9


def timed(config: Config, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atoll-end-", ignore_cleanup_errors=True) as name:
        recipe, run = Path(name) / "recipe.toml", Path(name) / "run"
        recipe.write_text(to_toml(config), encoding="utf8")
        began = time.time()
        words = [sys.executable, "-m", "atoll", "train", str(recipe), "--device", device, "--out", str(run)]
        subprocess.run(words, check=True, stdout=sys.stderr)
        ended = time.time()
        step, stored = last_stored(Tape(run / "syncer" / "run.tape"))
        summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
        return {
            "total_steps": step, "end_seconds": round(ended - stored, 2),
            "weights_seconds": round((run / "syncer" / THETA_FILE).stat().st_mtime - stored, 2),
            "weights_bytes": (run / "syncer" / THETA_FILE).stat().st_size, "weights_verified": is_whole(run),
            "command_seconds": round(ended - began, 1), "loss_first": summary["loss_first"], "loss_final": summary["loss_final"],
        }  # fmt: skip


def is_whole(run: Path) -> bool:
    """Loads theta.safetensors; one with another SHA-256 than the summary's is refused."""
    try:
        open_trained(run)
    except DataError as error:
        print(error, file=sys.stderr)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="560M")
    parser.add_argument("--steps", type=int, default=40, help="outer steps")
    parser.add_argument("--batches", type=int, default=16, help="held-out batches, at most")
    parser.add_argument("--device", default="cuda")
    for key in ("--corpus", "--heldout", "--tokenizer"):
        parser.add_argument(key, default="", help="as in the section [data]")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "end_of_run.jsonl")
    asked = parser.parse_args()
    config, device = settings(asked), torch.device(asked.device)
    batches, tokens = heldout_shape(config)
    line = {
        "size": asked.size, "batch": config.data.batch_size, "seq": config.data.seq_len, "heldout_batches": batches,
        "heldout_tokens": tokens, **timed(config, asked.device), "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    with asked.out.open("a") as file:
        print(json.dumps(line), file=file)
    print(json.dumps(line))
    sys.exit(0 if line["end_seconds"] < TARGET and line["weights_verified"] else 1)


if __name__ == "__main__":
    main()
