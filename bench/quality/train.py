"""One run of a quality experiment: real text, real machines in virtual time, all learners on one device as a fleet.

    python bench/quality/train.py --name m8 --preset decoupled --learners 8 --tokens 200e6 --data DIR --out results.jsonl

`--data` holds the corpora and the tokenizer named below. The batch of a step, `--step-tokens`, is dealt to the learners, so
all runs of equal `--tokens` take equal steps. A line of JSON is appended to `--out`: the keys of `atoll train --json`, the
name, and what it took. data_parallel is one learner with the whole batch, whose merges change nothing (outer SGD, rate 1).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from atoll.chaos import Plan, Scavenge
from atoll.config import Config, changed, load
from atoll.executor.fleet import FleetHands
from atoll.executor.workbench import Workbench, language_workbench
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.vocabulary import Effect, Event, FixParticipants
from atoll.sim.cluster import Cluster
from atoll.sim.failures import FailureModel
from atoll.sim.slices import SliceHardware
from atoll.views.run import RunView, summarise
from atoll.workload.model import SIZES

TRAIN = ("wiki-train.jsonl.xz", "gutenberg-train-0*.jsonl.xz")
HELDOUT = ("wiki-val.jsonl.xz", "gutenberg-val.jsonl.xz")
TOKENIZER = "bpe32k.json.xz"
SEQ_LEN = 512


def settings(chosen: argparse.Namespace) -> Config:
    """What all runs share; the preset's own numbers and --set lie over it."""
    def files(names: Sequence[str]) -> str:
        return ",".join(str(chosen.data / name) for name in names)

    dp = chosen.preset == "data_parallel"
    learners = 1 if dp else chosen.learners
    overrides = {
        "learners": learners, "seed": chosen.seed, "outer_steps": round(chosen.tokens / chosen.step_tokens),
        "model": {"numbers": dict(SIZES[chosen.size])},
        "data": {
            "corpus": files(TRAIN), "heldout": files(HELDOUT), "tokenizer": str(chosen.data / TOKENIZER), "seq_len": SEQ_LEN,
            "batch_size": chosen.step_tokens // SEQ_LEN // learners, "heldout_batches": chosen.heldout_batches,
        },
        "inner": {"learning_rate": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "warmup_share": 0.05, "final_share": 0.1},
        "cluster": {"step_seconds": 5.0, "step_noise": 0.02, "up_gbit": 100.0, "down_gbit": 100.0, "parameters": 35_000_000},
    }  # fmt: skip
    if dp:
        overrides["protocol"] = {"local_steps_per_round": 8}
    return changed(load(preset_name="fedavg" if dp else chosen.preset, overrides=overrides), chosen.set)


def plan_for(chosen: argparse.Namespace, config: Config) -> Plan:
    """--scavenge F: F times as many learners more, there for every second quarter of the run."""
    extra = round(chosen.scavenge * config.learners)
    quarter = config.outer_steps * config.cluster.step_seconds / 4
    return Plan(tuple(
        Scavenge(start * quarter, config.learners + m, quarter) for start in (1, 3) for m in range(extra)
    ))  # fmt: skip


class Pace:
    """Tells how it goes, about every twenty seconds."""

    def __init__(self, name: str, config: Config) -> None:
        self._name, self._steps, self._begun, self._next = name, config.outer_steps, time.time(), 0.0

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER and time.time() > self._next:
            for effect in effects:
                if isinstance(effect, FixParticipants):
                    self._next = time.time() + 20.0
                    print(f"{self._name}: {effect.outer_step} of {self._steps}, {time.time() - self._begun:.0f} s", flush=True)


def train(chosen: argparse.Namespace) -> dict[str, object]:
    device = torch.device(chosen.device)
    config = settings(chosen)
    bench = language_workbench(config)
    on_device: Workbench = dataclasses.replace(bench, evaluate=lambda model: bench.evaluate(model.to(device)))
    plan = plan_for(chosen, config)
    total = config.learners + len({f.learner for f in plan.faults if isinstance(f, Scavenge)})
    hands = FleetHands(on_device, device, learners=total, compiled=chosen.compiled)
    slices = SliceHardware(config, chosen.chips, FailureModel(), config.seed) if chosen.chips else None
    view, begun = RunView(total), time.time()
    first = on_device.evaluate_theta(*hands.disk.theta())
    cluster = Cluster(config, plan=plan, hands_for=hands, observers=[view, Pace(chosen.name, config)], hardware=slices)
    cluster.run(until_seconds=100 * config.outer_steps * config.cluster.step_seconds)
    final = on_device.evaluate_theta(*hands.disk.theta())
    summary = summarise(config, view, cluster.syncer.fates(), loss_first=first, loss_final=final)
    told: dict[str, object] = msgspec.to_builtins(summary)
    tokens = summary.tokens.trained // config.protocol.fragments
    more = {"name": chosen.name, "size": chosen.size, "trained_tokens": tokens, "wall_seconds": round(time.time() - begun, 1)}
    return more | {"settings": chosen.set, "chips": chosen.chips, "scavenge": chosen.scavenge} | told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--preset", default="decoupled", help="a preset of atoll's, or data_parallel")
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--size", default="35M")
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--step-tokens", type=int, default=65_536)
    parser.add_argument("--heldout-batches", type=int, default=10**6, help="at most so many; by default all of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--chips", type=int, default=0, help="failures of so many chips")
    parser.add_argument("--scavenge", type=float, default=0.0)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true")
    chosen = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    told = train(chosen)
    with chosen.out.open("a", encoding="utf8") as file:
        file.write(json.dumps(told) + "\n")
    print(f"{chosen.name}: held-out loss {told['loss_final']:.4f} in {told['wall_seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
