"""How long do codecs take, in units of `x.clone()`?

    python bench/codecs.py [--json] [--elements N] [--repetitions R] [--device cpu|cuda] [--codecs A,B]

One thread, 64 MiB of fp32. The targets are that int4 and e3m0 encode and accumulate in no more than `x.clone()`, read
literally: a clone repeated in place, between the codecs' runs, medians of one run. PASS and FAIL mean that and nothing
else.

What a clone costs depends on the allocator. glibc maps 64 MiB afresh each time, and the clone pays the page faults.
mimalloc (torch's wheels for aarch64) hands the block just freed back, and the clone is a bare copy at the speed of
memory: one read and one write, which no chain of torch operations can match. So, as information, the ratio to a clone
into fresh memory is printed too: clones are kept alive, as a learner keeps what it encodes.

Would compiled kernels pass where the copy is bare? Measured on a Neoverse-N1 (4.2 ms a clone), the kernels alone, best
of a run, in clones, for int4 encode and accumulate and e3m0 encode and accumulate: fused numba loops 1.4, 3.2, 9.0,
3.8; LLVM IR vectorised by hand with NEON table lookups 1.2, 1.2, 1.4, 1.0. The last are bound by arithmetic, not by
memory: already in L1 they take 1.1, 1.2, 1.4, 1.0. Four elements cost five to six vector operations, and in a clone's
time the core's two vector pipes can do five. No dependency is worth a target it still misses.
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
    """In memory never used before: all clones stay alive until the end."""
    kept: list[Tensor] = []
    return statistics.median(seconds_of(lambda: kept.append(x.clone()), x.device) for _ in range(repetitions))


def report(medians: dict[tuple[str, str], float], names: list[str], repetitions: int) -> None:
    out = sys.stdout.write
    plain, fresh = medians["clone", "plain"], medians["clone", "fresh"]
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
