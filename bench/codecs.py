"""How long do codecs take, in units of `x.clone()`?

    python bench/codecs.py [--json] [--elements N] [--repetitions R] [--device cpu|cuda] [--codecs A,B]
                            [--kernels torch|neon]

One thread, 64 MiB of fp32. The target is that int4 and e3m0 encode and accumulate in at most the time of `x.clone()`, taken
literally: clones repeated between the codecs' runs, medians of one run. PASS and FAIL mean only that.

The cost of a clone depends on the allocator. glibc maps 64 MiB again each time, and the clone pays for the page faults.
mimalloc (torch's wheels for aarch64) returns the block just freed, and the clone is a plain copy at the speed of memory: one
read and one write, which no chain of torch operations can match. So the ratio to a clone into fresh memory is printed too;
there all clones are kept alive, as a learner keeps what it encodes.

On ARM, with llvmlite, int4 and e3m0 have compiled kernels (src/atoll/codecs/neon.py); --kernels torch shows
how much they save. Where the clone is a plain copy they still miss the target, by a factor of 1.2 to 1.6 on a Neoverse-N1.
Memory is not the reason: on data in L1 their prototypes took 1.1, 1.2, 1.4 and 1.0 of a clone for int4 encode and accumulate,
e3m0 encode and accumulate. In a clone's time the core's two vector pipes can start about five operations per four elements;
encoding takes 4.9 (int4) and 5.6 (e3m0).
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

from atoll.codecs import CODECS, available_kernels, codec, kernels, kernels_in_use

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
    """Medians in seconds. Clones run between the codecs' runs, so that noise affects both alike."""
    jobs = jobs_of(names, x)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    clones: list[float] = []
    for repetition in range(repetitions + 1):
        for key, job in jobs.items():
            plain = seconds_of(x.clone, x.device)
            elapsed = seconds_of(job, x.device)
            if repetition:  # the first round warms up
                clones.append(plain)
                times[key].append(elapsed)
    medians = {key: statistics.median(values) for key, values in times.items()}
    medians["clone", "plain"] = statistics.median(clones)
    medians["clone", "fresh"] = fresh_clone(x, repetitions)
    return medians


def fresh_clone(x: Tensor, repetitions: int) -> float:
    """A clone into memory that was never used: all clones stay alive until the end."""
    kept: list[Tensor] = []
    return statistics.median(seconds_of(lambda: kept.append(x.clone()), x.device) for _ in range(repetitions))


def report(medians: dict[tuple[str, str], float], names: list[str], repetitions: int) -> None:
    out = sys.stdout.write
    plain, fresh = medians["clone", "plain"], medians["clone", "fresh"]
    out(f"kernels of int4 and e3m0 on the CPU: {kernels_in_use()}\n")
    out(f"x.clone(): {plain * 1e3:.2f} ms repeated, {fresh * 1e3:.2f} ms into fresh memory; medians of {repetitions}\n")
    out(f"{'codec':<16}{'job':<12}{'ms':>9}{'/clone':>9}{'/fresh':>9}\n")
    for name in names:
        for job in ("encode", "decode", "accumulate"):
            took = medians[name, job]
            out(f"{name:<16}{job:<12}{took * 1e3:>9.2f}{took / plain:>9.2f}{took / fresh:>9.2f}\n")
    for name, job in (target for target in TARGETS if target in medians):
        took = medians[name, job]
        verdict = "PASS" if took <= plain else "FAIL"
        out(f"{verdict} {name} {job}: {took / plain:.2f} of x.clone() (information: {took / fresh:.2f} of a fresh one)\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--elements", type=int, default=16 * 2**20)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--kernels", choices=available_kernels(), default=available_kernels()[-1])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = arguments.codecs.split(",")
    x = torch.randn(arguments.elements).to(arguments.device)
    with kernels(arguments.kernels):
        medians = measure(names, x, arguments.repetitions)
        if arguments.json:
            rows = {f"{name} {job}": took for (name, job), took in medians.items()}
            facts = {"elements": arguments.elements, "kernels": kernels_in_use(), "median_seconds": rows}
            sys.stdout.write(json.dumps(facts) + "\n")
        else:
            report(medians, names, arguments.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
