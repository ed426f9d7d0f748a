"""Does a live run end where the virtual run of its recipe does?

    python bench/live_and_virtual.py --data DIR [--tokens 20e6] [--slow 12] [--device cuda]

`--data` has the text and the tokenizer, named as in recipes/books_35m.toml. Two learners of a 35M decoder with that recipe's
inner settings share one device, and then the same config is trained in virtual time, for as many steps as give the tokens that
the live learners trained. In virtual time a round is over within a step, so learners lose one step of each interval to the
overlap. A live round takes the syncer longer than one step of a small model; a chaos plan slows every live step by `--slow` (on a
GPU it multiplies what the host waits for, which is less than the step), so that both runs merge and discard alike.
One JSON line; exit code 1 if the held-out losses differ by 1 % or more. To try it on a CPU, without files:

    python bench/live_and_virtual.py --size nano --batch 4 --seq 32 --tokens 4e4 --slow 3 --interval 12 --device cpu
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from atoll.chaos import FAR, ChaosPlan, Slow
from atoll.config import Config, load, to_toml

ROOT = Path(__file__).parents[1]
TARGET = 0.01
KEYS = ("total_steps", "seconds", "command_seconds", "loss_first", "loss_final", "tokens_trained", "tokens_unreported",
        "token_shares", "token_goodput", "participants", "rounds_merged", "waited_seconds", "compute", "kernels")  # fmt: skip


def settings(asked: argparse.Namespace, steps: int) -> Config:
    data = {"seq_len": asked.seq, "batch_size": asked.batch, "heldout_batches": 1000}
    if asked.data:
        data |= {
            key: ",".join(f"{asked.data}/{name}" for name in getattr(asked, key).split(",")) for key in ("corpus", "heldout")
        }
        data |= {"tokenizer": f"{asked.data}/{asked.tokenizer}"}
    overrides: dict[str, Any] = {
        "learners": asked.learners, "total_steps": steps, "seed": asked.seed, "model": {"size": asked.size}, "data": data,
        "inner": {"optimizer": "Muon", "learning_rate": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.99]},
        "protocol": {
            "fragments": 12, "local_steps_per_round": asked.interval, "fragmentation": "sub_tensor", "codec_down": "int8",
        },
        "outer": {"outer_learning_rate": 0.7, "outer_momentum": 0.5},
        "cluster": {"step_seconds": 5.0, "step_noise": 0.02, "up_gbit": 100.0, "down_gbit": 100.0},
        "limits": {"start_wait_seconds": 300.0},
    }  # fmt: skip
    return load(preset_name="decoupled", overrides=overrides)


def trained(config: Config, folder: Path, name: str, *words: str) -> dict[str, Any]:
    recipe, run = folder / f"{name}.toml", folder / name
    recipe.write_text(to_toml(config), encoding="utf8")
    argv = [sys.executable, "-m", "atoll", "train", str(recipe), "--out", str(run), *words]
    subprocess.run(argv, check=True, stdout=sys.stderr)
    summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
    print(f"{name}: {summary['loss_final']:.4f} after {summary['tokens_trained']} tokens", file=sys.stderr)
    return {key: summary[key] for key in KEYS}


def slowed(asked: argparse.Namespace, folder: Path) -> list[str]:
    if asked.slow <= 1.0:
        return []
    plan = folder / "slow.toml"
    faults = tuple(Slow(0.0, learner, asked.slow, FAR) for learner in range(asked.learners))
    plan.write_text(ChaosPlan(faults).to_toml(), encoding="utf8")
    return ["--chaos", str(plan)]


def compared(asked: argparse.Namespace) -> dict[str, Any]:
    step_tokens = asked.learners * asked.batch * asked.seq
    with tempfile.TemporaryDirectory(prefix="atoll-both-", ignore_cleanup_errors=True) as name:
        folder, where = Path(name), ("--device", asked.device)
        live = trained(settings(asked, round(asked.tokens / step_tokens)), folder, "live", *where, *slowed(asked, folder))
        steps = round((live["tokens_trained"] + live["tokens_unreported"]) / step_tokens)
        virtual = trained(settings(asked, steps), folder, "virtual", "--virtual", *where)
    return {"live": live, "virtual": virtual, "difference": round(live["loss_final"] / virtual["loss_final"] - 1, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="the folder of the next three; empty: the standard library, by bytes")
    parser.add_argument("--corpus", default="wiki-train.jsonl.xz,gutenberg-train-00.jsonl.xz")
    parser.add_argument("--heldout", default="wiki-val.jsonl.xz,gutenberg-val.jsonl.xz")
    parser.add_argument("--tokenizer", default="bpe32k.json.xz")
    parser.add_argument("--size", default="35M")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="of each learner")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--tokens", type=float, default=20e6)
    parser.add_argument("--interval", type=int, default=24, help="H, local steps a round")
    parser.add_argument("--slow", type=float, default=12.0, help="factor of the chaos plan, for every live step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "live_and_virtual.jsonl")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    line = {
        "size": asked.size, "learners": asked.learners, "batch": asked.batch, "seq": asked.seq, "interval": asked.interval,
        "slow": asked.slow, "seed": asked.seed, "corpus": asked.corpus if asked.data else "stdlib", **compared(asked),
        "commit": commit(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    with asked.out.open("a", encoding="utf8") as file:
        print(json.dumps(line), file=file)
    print(json.dumps(line))
    sys.exit(0 if abs(line["difference"]) < TARGET else 1)


if __name__ == "__main__":
    main()
