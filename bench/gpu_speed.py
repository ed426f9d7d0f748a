"""A live learner on a GPU against a plain compiled bf16 loop over the same model and batches.

    python bench/gpu_speed.py --size 35M --interval 96 --seconds 30 --out bench/results/gpu_speed.jsonl

The plain loop runs before and after the live run, in this process and on the same device, so that a machine that changes its pace
is seen. The live run is `atoll train --device cuda`: processes, int4 up, int8 down, P = 12. One JSON line:
`ratio` is live over plain tokens per second of one learner, `rounds_kept` fragments adopted over fragments due, `boundary` the
median time of a step while fragments travel over the median before any did. With --scripted N, N learners without training
(bench/scripted.py) take part, with steps as long as the plain loop's: they load the syncer and not the device. No round begins
before all of them have joined, while the learner trains already: `kept_since_first` counts from the first fragment adopted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from scripted import Cluster

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.executor.compute import loss_of, resolved
from atoll.executor.cuda.ahead import BatchesAhead, BatchPosition
from atoll.executor.cuda.transfer import to_device
from atoll.executor.optim.build import build_optimizer, optimizer_step
from atoll.executor.virtual_run import evaluated_on
from atoll.protocol.vocabulary import Adopt, StepDone
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Tape
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task

ROOT = Path(__file__).parents[1]
SIZES: dict[str, dict[str, Any]] = {
    "35M": {"model": {"size": "35M", "numbers": {"vocab": 32768}}, "batch": 32, "seq": 512},
    "560M": {"model": {"size": "500M", "numbers": {"vocab": 32768}}, "batch": 16, "seq": 1024},
    "nano": {"model": {"size": "nano"}, "batch": 4, "seq": 32},
}
"""Streaming DiLoCo's decoders with a vocabulary of 32,768; its 500M has 560M parameters. `nano` is for trying this script."""
FRAGMENTS, WARM_STEPS = 12, 20


def config_for(size: str, interval: int, steps: int, learners: int, overlap: int, scripted: int = 0) -> Config:
    shape = SIZES[size]
    overrides = {
        "learners": learners, "total_steps": steps, "model": shape["model"],
        "data": {"seq_len": shape["seq"], "batch_size": shape["batch"], "heldout_batches": 16},
        "protocol": {
            "fragments": FRAGMENTS, "local_steps_per_round": interval, "overlap": overlap,
            "codec_up": "int4", "codec_down": "int8", "fragmentation": "balanced",
        },
        # Scripted packets are random: beside them an honest contribution would be the unusual one.
        "limits": {"start_wait_seconds": 300.0} | ({"outlier_factor": 1e9, "peer_factor": 1e9} if scripted else {}),
    }  # fmt: skip
    return load(preset_name="decoupled", overrides=overrides)


class PlainLoop:
    """What a user would write: autocast, torch.compile, fused AdamW, clipping, batches prepared ahead in pinned memory."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._model = task.build().to(device)
        self._optimizer = build_optimizer(task.config, dict(self._model.named_parameters()), task.layout.fragments)
        self._loss = loss_of(task.loss, resolved(task.config, device), device)
        self._place = BatchPosition(0, 0, 1.0)
        self._ahead = BatchesAhead(lambda place: [task.batch(0, place.stream, place.batch)]) if device.type == "cuda" else None

    def tokens_per_second(self, seconds: float) -> float:
        for _ in range(WARM_STEPS):
            self._step()
        self._wait()
        began, tokens = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            tokens += sum(self._step() for _ in range(10))
            self._wait()
        return tokens / (time.monotonic() - began)

    def _step(self) -> int:
        self._place = self._place.following()
        (batch,) = self._ahead.take(self._place) if self._ahead else [self._task.batch(0, 0, self._place.batch)]
        if self._ahead:
            self._ahead.prepare(self._place.following())
        self._model.train()
        self._loss(self._model, to_device(batch, self._device)).backward()
        optimizer_step(self._task.config, self._optimizer, self._place.batch)
        return self._task.count(batch)[0]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def live(config: Config, task: Task, device: str, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="atoll-gpu-speed-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        say = partial(print, file=sys.stderr)
        LocalCluster(config, folder, ChaosPlan(), device=device, say=say, words=((), words)).run()
        over = time.monotonic()
        summary = verdict(config, folder, task=evaluated_on(task, torch.device(device)))
        return measured(config, folder / "learners" / "0" / "0.tape") | {
            "waited_seconds": summary.waited_seconds, "summary_seconds": round(time.monotonic() - over, 1),
            "loss_first": summary.loss_first or 0.0, "loss_final": summary.loss_final or 0.0,
        }  # fmt: skip


def live_beside(config: Config, device: str, scripted: int, step_seconds: float, words: list[str]) -> dict[str, float]:
    """The same with scripted learners: the syncer and the learner are started by hand, and nothing is evaluated."""
    with Cluster(config, ("-m", "atoll", "syncer", *words)) as cluster:
        folder = cluster.folder / "learner"
        where = ["--syncer", cluster.address, "--token", str(cluster.token), "--out", str(folder), "--id", "0"]
        learner = subprocess.Popen([sys.executable, "-m", "atoll", "learner", *where, "--device", device], stdout=sys.stderr)
        for number in range(1, scripted + 1):  # each a process of its own, as learners are: one for all would be the slower end
            cluster.learners(number, 1, "--step", str(step_seconds), "--jitter", "0.05")
        if learner.wait():
            raise SystemExit(f"the learner ended with {learner.returncode}")
        return measured(config, next(folder.rglob("0.tape")))


def measured(config: Config, tape: Path) -> dict[str, float]:
    records = list(Tape(tape).records())
    done = [(r.now / 1e9, r.event.tokens, r.event.nanos) for r in records if isinstance(r.event, StepDone)]
    adoptions = [r.now / 1e9 for r in records for e in r.effects if isinstance(e, Adopt) and e.merged]
    first = adoptions[0]
    since = [each for each in done if each[0] > first]
    steady = [each for each in done[WARM_STEPS:] if each[0] > first]
    gaps = [b[0] - a[0] for a, b in pairwise(steady)]
    alone = [b[0] - a[0] for a, b in pairwise(done[WARM_STEPS:]) if b[0] <= first]
    due = len(done) * config.protocol.fragments / config.protocol.local_steps_per_round
    return {
        "live_tokens_per_second": round(sum(each[1] for each in steady[1:]) / (steady[-1][0] - steady[0][0])),
        "rounds_kept": round(len(adoptions) / due, 3),
        "kept_since_first": round((len(adoptions) - 1) / (due * len(since) / len(done)), 3),
        "step_ms": round(1e3 * statistics.median(gaps), 2),
        "boundary": round(statistics.median(gaps) / statistics.median(alone), 4) if len(alone) >= 5 else 0.0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="35M")
    parser.add_argument("--interval", type=int, default=96, help="H, local steps a round")
    parser.add_argument("--overlap", type=int, default=2, help="tau, local steps that a round may take")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--scripted", type=int, default=0, help="learners without training beside one that trains")
    parser.add_argument("--shards", type=int, default=0, help="processes of the syncer that merge")
    parser.add_argument("--steps", type=int, default=600, help="inner steps of the live run")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the plain loop, before and after")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_speed.jsonl")
    asked = parser.parse_args()
    learners = asked.scripted + 1 if asked.scripted else asked.learners
    config = config_for(asked.size, asked.interval, asked.steps, learners, asked.overlap, asked.scripted)
    device, task = torch.device(asked.device), task_for(config)
    words = ["--shards", str(asked.shards)] if asked.shards else []
    plain = PlainLoop(task, device)
    before = plain.tokens_per_second(asked.seconds)
    if asked.scripted:
        tokens = SIZES[asked.size]["batch"] * SIZES[asked.size]["seq"]
        figures = live_beside(config, asked.device, asked.scripted, tokens / before, words)
    else:
        figures = live(config, task, asked.device, words)
    after = plain.tokens_per_second(asked.seconds)
    rate = (before + after) / 2
    line = {
        "size": asked.size, "parameters": sum(f.numel for f in task.layout.fragments), "learners": learners,
        "scripted": asked.scripted, "shards": asked.shards, "interval": asked.interval, "overlap": asked.overlap,
        "plain_tokens_per_second": round(rate), "plain_before": round(before), "plain_after": round(after),
        "ratio": round(figures["live_tokens_per_second"] / rate, 4), **figures, "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    with asked.out.open("a") as file:
        print(json.dumps(line), file=file)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
