"""How long do codecs take, in units of `x.clone()`?

    python bench/codecs.py [--json] [--elements N] [--repetitions R] [--device cpu|cuda] [--codecs A,B]

One thread, 64 MiB of fp32. The targets are that int4 and e3m0 encode and accumulate in no more than a clone. Clones
and codec runs alternate, and the medians of one run are compared.

What a clone costs depends on the allocator. glibc maps 64 MiB afresh each time, and the clone pays the page faults.
mimalloc (torch's wheels for aarch64) hands the block just freed back, and the clone is a bare copy at the speed of
memory: one read and one write, which no chain of torch operations can match. So both are measured: `recycled` frees
each clone before the next, `fresh` keeps them all alive so that the memory is always new. A learner that holds what it
encodes is in the second case. The targets are judged against the plain (recycled) clone first, and against the fresh
one in a line of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from atoll.codecs import CODECS, codec

TARGETS = (("int4", "encode"), ("int4", "accumulate"), ("e3m0", "encode"), ("e3m0", "accumulate"))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def jobs_of(names: list[str], x: Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    jobs: dict[tuple[str, str], Callable[[], object]] = {}
    into = torch.zeros_like(x)
    for name in names:
        c = codec(name)
        packet = c.encode(x)
        jobs[name, "encode"] = partial(c.encode, x)
        jobs[name, "decode"] = partial(c.decode, packet)
        jobs[name, "accumulate"] = partial(c.accumulate, packet, into, 0.25)
    return jobs


def measure(names: list[str], x: Tensor, repetitions: int) -> dict[tuple[str, str], float]:
    """Medians in seconds. Clones run between the codecs' runs, so that a noisy minute hurts both alike."""
    jobs = jobs_of(names, x)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    recycled: list[float] = []
    for repetition in range(repetitions + 1):
        for key, job in jobs.items():
            plain = seconds_of(x.clone, x.device)
            elapsed = seconds_of(job, x.device)
            if repetition:  # the first round warms up
                recycled.append(plain)
                times[key].append(elapsed)
    medians = {key: statistics.median(values) for key, values in times.items()}
    medians["clone", "recycled"] = statistics.median(recycled)
    medians["clone", "fresh"] = fresh_clone(x, repetitions)
    return medians


def fresh_clone(x: Tensor, repetitions: int) -> float:
    """In memory never used before: all clones stay alive until the end."""
    kept: list[Tensor] = []
    return statistics.median(seconds_of(lambda: kept.append(x.clone()), x.device) for _ in range(repetitions))


def report(medians: dict[tuple[str, str], float], names: list[str], repetitions: int) -> None:
    out = sys.stdout.write
    recycled, fresh = medians["clone", "recycled"], medians["clone", "fresh"]
    out(f"clone: recycled {recycled * 1e3:.2f} ms, fresh {fresh * 1e3:.2f} ms; medians of {repetitions}\n")
    out(f"{'codec':<16}{'job':<12}{'ms':>9}{'/recycled':>11}{'/fresh':>9}\n")
    for name in names:
        for job in ("encode", "decode", "accumulate"):
            took = medians[name, job]
            out(f"{name:<16}{job:<12}{took * 1e3:>9.2f}{took / recycled:>11.2f}{took / fresh:>9.2f}\n")
    for kind, clone in (("recycled", recycled), ("fresh", fresh)):
        for name, job in (target for target in TARGETS if target in medians):
            verdict = "PASS" if medians[name, job] <= clone else "FAIL"
            out(f"{verdict} {name} {job} <= clone ({kind}): ratio {medians[name, job] / clone:.2f}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--elements", type=int, default=16 * 2**20)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codecs", default=",".join(CODECS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = arguments.codecs.split(",")
    x = torch.randn(arguments.elements).to(arguments.device)
    medians = measure(names, x, arguments.repetitions)
    if arguments.json:
        rows = {f"{name} {job}": took for (name, job), took in medians.items()}
        sys.stdout.write(json.dumps({"elements": arguments.elements, "median_seconds": rows}) + "\n")
    else:
        report(medians, names, arguments.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
