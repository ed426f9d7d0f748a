"""What merging costs on one core: the kernels alone, without a process, a socket or a disk around them.

    python bench/merging.py [--learners 1 4 8] [--repeats 4] [--out bench/results/merging.jsonl]

A fragment of 46.7 million parameters, int4 up, int8 down, RDA, every contribution a version old. One JSON line, in
milliseconds of this process's CPU time, the least of the repeats: `inspect_ms` for one contribution, `merge_ms` by number of
learners, `step_ms` for the outer step with its announcement. It runs on the commits before the loops with explicit vectors too.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from atoll.codecs import codec
from atoll.config import load
from atoll.kernels.fused import Fused, MergePart
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.outer import OuterState, outer_rule

SIZES = (*[4 << 20] * 11, 528_384)


def fragment() -> Fragment:
    slots, at = [], 0
    for index, size in enumerate(SIZES):
        slots.append(Slot(f"w{index}", "param", 0, size, (size,), at, size, torch.float32, embedding=False))
        at += size
    return Fragment(0, tuple(slots), (), at, 0)


def least(repeats: int, work: Callable[[], Any]) -> float:
    """In milliseconds. The result before is released first, so that its memory is used again, as in a run."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - began))
    return round(min(found), 1)


def measure(learners: list[int], repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = load(preset_name="decoupled", overrides={"protocol": {"fragments": 1, "codec_up": "int4", "codec_down": "int8"}})
    rule, part = outer_rule(config), fragment()
    assert rule is not None
    kernels = Fused(config, 1)
    kernels.warm_up(rule)
    theta = torch.randn(part.numel) * 0.02
    older, announced = theta + torch.randn(part.numel) * 1e-4, theta + torch.randn(part.numel) * 1e-6
    packets = [codec("int4").encode(torch.randn(part.numel) * 1e-3) for _ in range(max(learners))]
    given = [MergePart(packet, older) for packet in packets]
    merges = {
        str(m): least(repeats, lambda m=m: kernels.merged(part, theta, given[:m], [1.0] * m, plain=False)) for m in learners
    }
    delta, factors = kernels.merged(part, theta, given[:1], [1.0], plain=False)
    state = OuterState(torch.randn(part.numel) * 1e-4, None, 3)
    stepped = least(repeats, lambda: kernels.step(part, delta, factors, theta, announced, state, rule))
    inspected = least(repeats, lambda: kernels.norm(packets[0]))
    return {"numel": part.numel, "inspect_ms": inspected, "merge_ms": merges, "step_ms": stepped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    line = json.dumps(measure(given.learners, given.repeats) | {"commit": commit(), "machine": platform.machine()})
    print(line)
    if given.out is not None:
        with given.out.open("a", encoding="utf8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
