"""What a round costs the syncer: its real process over TLS, with scripted learners that send different packets each round.

    python bench/syncer_round.py --json [--learners 1 4 8] [--rounds 24] [--shards 1] [--threads 0]

`--shards` merges in so many processes, each with `--threads` threads (0: as many as they take by themselves).

Four fragments of 46.7 million parameters, int4 up, int8 down, RDA, H = P = 4, tau = 2; steps of the learners are short, so that a
round is always due and the syncer is the bound. Then the tape's merges are carried out again by torch's operations in this
process, and every digest on the tape must be the same: otherwise exit code 1. One object per M:

    cpu_ms          of the syncer's process a round, all threads and children, shards included
    shards_cpu_ms   of that, what the shards take together; the rest is the coordinator's
    commit_ms       median time between commits
    bytes_written   a round, as the kernel counts them
    bytes_hashed    a round: SHA-256, xxh3 and CRC together, counted by a wrapper around each; not those of shards
    floor_ms        the least memory traffic of a round over the bandwidth of a copy, measured in this run on one core: M packets
                    read twice, Theta, momentum and announcement read and written, the announced packet written
    load_cpu_ms     of the scripted learners a round
    stages_ms       medians from the tape, as `atoll strip --timing` shows them
    kernels         what merges: numba, or torch
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import platform
import runpy
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKETS, WARM = 11, 4
SHAPE = {"width": 1024, "mlp": 4128, "layers": 11, "heads": 8}

# ---------------------------------------------------------------- the syncer's process, with counted hashes


class Counter:
    """Counts the bytes that hashes see, in a file that the bench reads."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        while True:
            new = self._path.with_suffix(".new")
            new.write_text(str(self.count))
            new.replace(self._path)  # who reads it meanwhile must not find it empty
            time.sleep(0.25)

    def of_class(self, real: Callable[..., Any]) -> Callable[..., Any]:
        counter = self

        class Counted:
            def __init__(self, data: Any = b"", **named: Any) -> None:
                self._real = real(**named)
                self.update(data)

            def update(self, data: Any) -> None:
                counter.count += memoryview(data).nbytes
                self._real.update(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

        return Counted

    def of_function(self, real: Callable[..., int], data: int) -> Callable[..., int]:
        """`data`: which argument has the bytes."""

        def counted(*arguments: Any) -> int:
            self.count += memoryview(arguments[data]).nbytes
            return real(*arguments)

        return counted


def serve(counts: Path, argv: Sequence[str]) -> None:
    counter = Counter(counts)
    hashlib.sha256 = counter.of_class(hashlib.sha256)  # type: ignore[assignment]
    zlib.crc32 = counter.of_function(zlib.crc32, 0)
    for name, function, data in (("google_crc32c", "value", 0), ("google_crc32c", "extend", 1)):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            setattr(module, function, counter.of_function(getattr(module, function), data))
    with contextlib.suppress(ImportError):
        xxhash = importlib.import_module("xxhash")
        xxhash.xxh3_128, xxhash.xxh3_64 = counter.of_class(xxhash.xxh3_128), counter.of_class(xxhash.xxh3_64)
        xxhash.xxh3_128_digest = counter.of_function(xxhash.xxh3_128_digest, 0)
    sys.argv = ["atoll", *argv]
    runpy.run_module("atoll", run_name="__main__", alter_sys=True)


# ---------------------------------------------------------------- the measurement


@dataclass(frozen=True)
class Sample:
    commits: int
    at: float
    cpu: float
    shards: float
    """Of `cpu`, what the shards took."""
    load: float
    written: int
    hashed: int


def settings(learners: int) -> Any:
    from atoll.config import load

    return load(preset_name="decoupled", overrides={
        "learners": learners, "total_steps": 1_000_000, "model": {"numbers": SHAPE},
        "data": {"max_bytes": 200_000, "seq_len": 64, "batch_size": 8, "heldout_batches": 1},
        "protocol": {
            "fragments": 4, "local_steps_per_round": 4, "overlap": 2, "codec_up": "int4", "codec_down": "int8",
            "fragmentation": "balanced", "rollback_interval": 0,
        },
        "limits": {"start_wait_seconds": 300.0},
    })  # fmt: skip


def sample(cluster: Any, load: Any, counts: Path) -> Sample:
    try:
        from atoll.store.version_folder import newest_step
    except ImportError:  # a commit before there was a log of inputs
        from atoll.store.durable import newest_step  # type: ignore[attr-defined,no-redef]
    shards = shard_pids(cluster.directory)
    written = sum(written_by(pid) for pid in (cluster.syncer.pid, *shards))
    hashed = int(counts.read_text() or 0) if counts.exists() else 0
    commits, working = newest_step(cluster.directory), sum(each.cpu_seconds() for each in load)
    merging = sum(cpu_seconds(pid) for pid in shards)
    return Sample(commits, time.monotonic(), cluster.syncer.cpu_seconds() + merging, merging, working, written, hashed)


def shard_pids(directory: Path) -> list[int]:
    """By the locks of their folders."""
    return [int(path.read_text() or 0) for path in sorted((directory / "versions").glob("shard*/lock"))]


def written_by(pid: int) -> int:
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(io["write_bytes"])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(
    learners: int, rounds: int, words: Sequence[str], packets: Sequence[Any], out: Callable[[str], None]
) -> dict[str, Any]:
    from scripted import Cluster, write_packets

    counts = Path(os.environ.get("ATOLL_BENCH_DIR") or "/tmp") / f"hashed-{os.getpid()}"
    with Cluster(settings(learners), (__file__, "--serve", counts, "syncer", *words), keys=learners) as cluster:
        write_packets(packets, cluster.folder / "packets")
        load = loads(cluster, learners, cluster.folder / "packets")
        seen: list[Sample] = []
        while not seen or seen[-1].commits <= WARM + rounds:  # the last version may not be on the tape yet
            time.sleep(0.1)
            cluster.syncer.check()
            now = sample(cluster, load, counts)
            if not seen or now.commits > seen[-1].commits:
                seen.append(now)
                out(f"M = {learners}: {now.commits} of {WARM + rounds} commits")
        for process in (*load, cluster.syncer):
            process.stop()
        counts.unlink(missing_ok=True)
        first = next(each for each in seen if each.commits >= WARM)
        last, times, parted, verified = seen[-1], *verify(cluster.tape, settings(learners), WARM + rounds, packets, out)
        stages = stages_of(cluster.tape, WARM, last.commits)
    gaps = [1e3 * (b - a) for a, b in pairwise(times[WARM : last.commits])]
    n = last.commits - first.commits
    merging = round(1e3 * (last.shards - first.shards) / n)
    return {
        "cpu_ms": round(1e3 * (last.cpu - first.cpu) / n), **({"shards_cpu_ms": merging} if merging else {}),
        "commit_ms": round(statistics.median(gaps)),
        "bytes_written": round((last.written - first.written) / n), "bytes_hashed": round((last.hashed - first.hashed) / n),
        "load_cpu_ms": round(1e3 * (last.load - first.load) / n), "participants": round(statistics.mean(parted[WARM:]), 2),
        "rounds": n, "verified": verified, "stages_ms": stages,
    }  # fmt: skip


def loads(cluster: Any, learners: int, packets: Path) -> list[Any]:
    """Several processes where there are cores for them: one interpreter for all learners would be what the syncer waits for."""
    count = min(learners, max(1, (os.cpu_count() or 1) // 2))
    shares = [learners // count + (each < learners % count) for each in range(count)]
    given = ("--step", "0.05", "--packets-file", str(packets))
    return [cluster.learners(sum(shares[:at]), share, *given) for at, share in enumerate(shares)]


def stages_of(tape: Path, first: int, last: int) -> dict[str, float]:
    """Medians over the rounds that were measured; empty on a commit that does not time them."""
    try:
        from atoll.views.stages import RoundClock
    except ImportError:
        return {}
    from atoll.tape.format import Tape

    clock = RoundClock()
    for record in Tape(tape).records():
        clock(record.now, record.worker, record.event, record.effects)
    clock.rounds = clock.rounds[first:last]
    return {name: round(1e3 * seconds, 1) for name, seconds in clock.medians().items()}


def verify(
    tape: Path, config: Any, rounds: int, packets: Sequence[Any], out: Callable[[str], None]
) -> tuple[list[float], list[int], bool]:
    """Times of commits, participants of each, and whether torch's operations give the digests of the first rounds on the tape."""
    from scripted import chosen, layout_of

    from atoll.executor.syncer import TensorSyncer
    from atoll.protocol.interface import Payload
    from atoll.protocol.vocabulary import Accept, Discard, ForgetVersion, Merge, Store, Stored
    from atoll.store.versions import MemoryVersions
    from atoll.tape.format import Tape
    from atoll.tasks.registry import task_for
    from atoll.tasks.task import initial_versions

    layout = layout_of(config)
    executor = by_torch(TensorSyncer(config, layout.fragments, MemoryVersions(initial_versions(task_for(config)))))
    import torch

    empty = torch.empty(0)
    times, parted, digests, wanted = list[float](), list[int](), dict[int, str](), dict[int, str]()
    for record in Tape(tape).records():
        if isinstance(record.event, Stored):
            times.append(record.now / 1e9)
            wanted[record.event.outer_step] = record.event.digest
        if len(times) > rounds:
            break
        for effect in record.effects:
            match effect:
                case Accept():
                    packet = chosen(packets[effect.fragment], effect.learner, effect.outer_step)
                    executor.execute(effect, Payload("packet", packet.nbytes, (packet, empty)))
                case Store():
                    (stored,) = executor.execute(effect, None)
                    digests[effect.outer_step] = stored.digest
                    out(f"verified {effect.outer_step}")
                case Merge():
                    parted.append(len(effect.shares))
                    executor.execute(effect, None)
                case Discard() | ForgetVersion():
                    executor.execute(effect, None)
    others = [t for t in list(wanted)[:rounds] if digests[t] != wanted[t]]
    if others:
        print(f"torch's operations give other digests of the outer steps {others}", file=sys.stderr)
    return times, parted, len(wanted) >= rounds and not others


def by_torch(executor: Any) -> Any:
    """Torch's operations as the oracle, where the syncer has kernels of its own."""
    merger = getattr(executor, "merger", executor)  # it runs on older commits too
    if hasattr(merger, "use_torch"):
        merger.use_torch()
    return executor


def kernels() -> str:
    try:
        from atoll.kernels.fused import has_numba
    except ImportError:
        return "torch"
    return "numba" if has_numba() else "torch"


def copy_bytes_per_second() -> float:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = torch.ones(1 << 26), torch.ones(1 << 26)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        b.copy_(a)
        took.append(time.perf_counter() - began)
    torch.set_num_threads(threads)  # what follows the measurement may take all cores
    return 2 * 4 * a.numel() / min(took)


def floor_ms(learners: int, numel: int, rate: float) -> int:
    return round(1e3 * (2 * learners * numel / 2 + 6 * 4 * numel + numel) / rate)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels, in the syncer or in each shard")
    parser.add_argument("--json", action="store_true", help="print the line")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "syncer_round.jsonl")
    asked = parser.parse_args()
    from provenance import commit
    from scripted import layout_of, load_average, packets_of

    def out(text: str) -> None:
        print(f"\r{text:60}", end="", file=sys.stderr)

    numel, rate = max(f.numel for f in layout_of(settings(1)).fragments), copy_bytes_per_second()
    line: dict[str, Any] = {"numel": numel, "copy_gb_per_second": round(rate / 1e9, 1)}
    words: list[str] = []
    if asked.shards > 1 or asked.threads:
        line |= {"shards": asked.shards, "threads": asked.threads}
        words = ["--shards", str(asked.shards), "--kernel-threads", str(asked.threads)]
    out("making packets")
    packets = packets_of(settings(1), PACKETS)
    for m in asked.learners:
        found = measured(m, asked.rounds, words, packets, out)
        line[str(m)] = {**found, "floor_ms": floor_ms(m, numel, rate), "kernels": kernels()}
        print(f"\r{m}: {line[str(m)]}", file=sys.stderr)
    line |= {"load": load_average(), "commit": commit(), "machine": platform.machine(), "cores": os.cpu_count()}
    with asked.out.open("a") as file:
        print(json.dumps(line), file=file)
    if asked.json:
        print(json.dumps(line))
    return sys.exit(0 if all(line[str(m)]["verified"] for m in asked.learners) else 1)


if __name__ == "__main__":
    main()
