"""How much longer does a step of a learner of several ranks take while it synchronises?

    python bench/ranks.py [--ranks 2] [--parallel fsdp2] [--steps 60] [--milliseconds 100]

One learner of N ranks (processes of one thread on gloo) and a syncer, over loopback; P = H = 8, so in every step a fragment is
pulled, merged and adopted. Every rank trains the same loop three times: alone, joined, alone again. A joined step includes all
that happens in `learner.step`. The first steps of each part do not count. The ratio is that of medians, of rank 0; `sent_bytes`
is what each rank encoded for the syncer, counted where it is encoded, and `shares` each rank's part of it, 1/N by target. With 4
ranks on 8 or more cores the target of the ratio is 1.05. The last line is one JSON object; figures of a busy machine are valid
only as ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import commit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.executor.ranks import executor

WIDTH, LAYERS, FRAGMENTS = 384, 8, 8
SETTLING = 5


def built(kind: str, ranks: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    if kind == "ddp":
        return model, DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def agreed(seconds: float) -> float:
    """The slowest rank's."""
    tensor = torch.tensor([seconds])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


class SentBytes:
    """Counts the bytes of the parts of packets that this rank encodes, which are all that it sends of the model."""

    def __init__(self) -> None:
        self.count = 0
        encode = executor.encode_part

        def counted(*arguments: Any, **named: Any) -> Any:
            part, residual = encode(*arguments, **named)
            self.count += sum(tensor.nbytes for tensor in part if tensor is not None)
            return part, residual

        executor.encode_part = counted


def rank_main(rank: int, options: argparse.Namespace, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    sent = SentBytes()
    plain, model = built(options.parallel, options.ranks)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    rows = 16
    for _ in range(8):  # towards the wanted step time; the first is of a cold process, and a larger batch is not as much slower
        data = torch.randn(rows, WIDTH)
        step(model, optimizer, data)
        began = time.perf_counter()
        for _ in range(3):
            step(model, optimizer, data)
        seconds = agreed(time.perf_counter() - began) / 3
        rows = max(1, min(65_536, round(rows * 1.05 * options.milliseconds / 1e3 / seconds)))
    data = torch.randn(rows, WIDTH)

    def timed(learner: atoll.Learner | None) -> list[float]:
        found = []
        for _ in range(options.steps):
            began = time.perf_counter()
            step(model, optimizer, data)
            if learner is not None:
                learner.step(tokens=rows)
            found.append(time.perf_counter() - began)
        return found[SETTLING:]

    alone = timed(None)
    with atoll.join(address, model, optimizer, token=Path(folder) / "s" / "token", out=Path(folder) / "learner") as learner:
        joined = timed(learner)
    alone += timed(None)
    every = [0] * options.ranks
    dist.all_gather_object(every, sent.count)
    if rank == 0:
        milliseconds = {name: 1e3 * statistics.median(times) for name, times in (("alone", alone), ("joined", joined))}
        line = {
            "bench": "ranks", "commit": commit(), "ranks": options.ranks, "parallel": options.parallel, "cores": os.cpu_count(),
            "machine": platform.machine(), "load": round(os.getloadavg()[0], 1),
            "parameters": sum(parameter.numel() for parameter in plain.parameters()), "fragments": FRAGMENTS,
            "milliseconds": {name: round(value, 2) for name, value in milliseconds.items()},
            "ratio": round(milliseconds["joined"] / milliseconds["alone"], 3), "sent_bytes": every,
            "shares": [round(count / sum(every), 4) for count in every],
        }  # fmt: skip
        sys.stdout.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--milliseconds", type=float, default=100.0)
    options = parser.parse_args()
    changes = (
        "learners=1", "total_steps=1000000", "model.name=custom", f"protocol.local_steps_per_round={FRAGMENTS}",
        f"protocol.fragments={FRAGMENTS}", "protocol.fragmentation=balanced",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        words = [sys.executable, "-m", "atoll", "syncer", "--preset", "decoupled", "--dir", f"{folder}/s"]
        words += ["--listen", "127.0.0.1:0"]
        with subprocess.Popen([*words, *(word for change in changes for word in ("--set", change))]) as syncer:
            pause = threading.Event()
            while not (file := Path(folder) / "s" / "address").exists():
                if syncer.poll() is not None:
                    sys.exit("the syncer did not start")
                pause.wait(0.1)
            try:
                mp.spawn(rank_main, (options, file.read_text(), folder), nprocs=options.ranks)
            finally:
                syncer.terminate()


if __name__ == "__main__":
    main()
