"""How much memory does a syncer need at its peak, and for what?

    python bench/syncer_memory.py [--learners 4 8] [--rounds 60] [--step 0.5] [--width 768] [--mlp 2048] [--layers 12]

A syncer's process with a decoder of 85 million parameters, P = H = 24, int4 up and bf16 down, and scripted learners
(bench/scripted.py). They all join at once and get all of Theta. Two thirds into the run one more joins and, as no peer serves
it, gets all of Theta from the syncer while rounds go on. The budget is 4 fp32 models + 64 MiB per learner + 500 MB, compared
with VmHWM of the process. The process is that of `atoll syncer` with one more thread, which adds up the memory of its parts
and allocates very little itself. The peak while it starts (the model is built) and the peak while it runs are separate; the
higher one decides.

The table has the memory at the moment of the largest sum: the newest versions (theta, announced, momentum), cached older
announcements, accepted packets, merged versions not stored yet, cached payloads, and other payloads queued for learners. The
rest of the process is Python, torch, gRPC and the temporary memory of merges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from scripted import Cluster, Sampler, load_average
from torch import Tensor

from atoll.config import Config, load
from atoll.executor.environment import use_threads
from atoll.executor.syncer import TensorSyncer
from atoll.ids import SYNCER as SYNCER_ID
from atoll.protocol.vocabulary import Recovered, Stored
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.process import SyncerProcess
from atoll.store.durable import DurableVersions
from atoll.store.versions import Version
from atoll.tape.format import Tape
from atoll.tape.tail import Tail
from atoll.tasks.task import language_task

PER_LEARNER = 64 << 20
BESIDE = 500_000_000
POLL_SECONDS = 0.05
SYNCER = "--be-the-syncer"

# ---------------------------------------------------------------- the syncer's process


class HeldBytes:
    """Bytes by owner; a tensor with several owners counts for the first one."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.bytes: dict[str, int] = {}

    def add(self, what: str, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    self.bytes[what] = self.bytes.get(what, 0) + storage.nbytes()

    def add_views(self, what: str, views: Iterable[Any]) -> None:
        """Pieces of payloads, most of them views of tensors that were counted already."""
        for view in views:
            address = torch.frombuffer(view, dtype=torch.uint8).data_ptr() if len(view) else 0
            if len(view) and address not in self._seen:
                self._seen.add(address)
                self.bytes[what] = self.bytes.get(what, 0) + memoryview(view).nbytes


def parts_of(version: Version) -> Iterator[Tensor | None]:
    yield from (version.theta, version.announced, version.buffers)
    if version.outer is not None:
        yield from (version.outer.momentum, version.outer.pending)
    if version.packet is not None:
        yield from (version.packet.codes, version.packet.scales)


def held_bytes(home: SyncerDirectory, process: SyncerProcess) -> dict[str, int]:
    """Reads private attributes, which only a benchmark may do."""
    executor, disk = home.executor, home.disk
    assert isinstance(executor, TensorSyncer) and isinstance(disk, DurableVersions)
    held = HeldBytes()
    held.add("newest versions", (t for _, v in list(disk._newest.values()) for t in parts_of(v)))
    held.add("older announcements", list(disk._older.values()))
    packets = [part for parts in list(executor._accepted.values()) for part in list(parts.values())]
    held.add("accepted packets", (t for packet, buffers, _ in packets for t in (packet.codes, packet.scales, buffers)))
    held.add("anchors of accepted packets", (announced for _, _, announced in packets))
    held.add("merged, not stored yet", (t for v in list(executor._merged.values()) for t in parts_of(v)))
    held.add_views("cached payloads", (view for views in list(process._payloads.values()) for view in views or ()))
    links = [peer.link for peer in list(process._links.values())]
    transfers = [transfer for link in links for transfer in list(link._outbox._bulks)]
    held.add_views("queued for learners", (view for transfer in transfers for view in list(transfer.pieces)))
    assembling = [a.received for link in links for a in list(link._inbox._assemblies.values())]
    held.bytes["arriving"] = sum(assembling)
    return held.bytes


def be_the_syncer(options: argparse.Namespace) -> None:
    """The process of `atoll syncer` with a thread that measures it and writes the peak beside the tape."""
    use_threads(1)
    config = load(options.recipe)
    home = SyncerDirectory(options.dir, config, language_task(config))
    process = SyncerProcess(home, options.listen)
    most_bytes = 0

    def watch() -> None:
        nonlocal most_bytes
        while True:
            time.sleep(POLL_SECONDS)
            try:
                held = held_bytes(home, process)
            except (RuntimeError, ValueError):  # changed while it was read
                continue
            if sum(held.values()) > most_bytes:
                most_bytes = sum(held.values())
                (home.directory / "fullest.json").write_text(json.dumps(held))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, process.stop)
        threading.Thread(target=watch, daemon=True).start()
        threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(process.stop)), daemon=True).start()
        await process.run()

    asyncio.run(main())


# ---------------------------------------------------------------- the benchmark


def settings(options: argparse.Namespace, learners: int) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": learners,
        "total_steps": 1_000_000,
        "data": {"max_bytes": 200_000, "seq_len": 64, "batch_size": 8, "heldout_batches": 1},
        "model": {"numbers": {"width": options.width, "mlp": options.mlp, "layers": options.layers, "heads": 8}},
    })  # fmt: skip


class Watch:
    """Counts rounds, and records from which source each learner has loaded its state."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tail = Tail(Tape(cluster.tape))
        self.rounds = 0
        self.sources: dict[int, int] = {}

    def wait(self, rounds: int, learner: int) -> None:
        """Until this many rounds are stored and this learner has joined."""
        while self.rounds < rounds or learner not in self.sources:
            time.sleep(0.2)
            for record in self._tail.more():
                self.rounds += isinstance(record.event, Stored)
                self.sources |= {e.learner: e.source for e in record.effects if isinstance(e, Recovered)}
            for process in self._cluster.processes:
                process.check()


def one_run(options: argparse.Namespace, learners: int) -> dict[str, Any]:
    step = ("--step", str(options.step))
    with Cluster(settings(options, learners), (__file__, SYNCER)) as cluster:
        home, syncer = cluster.directory, cluster.syncer
        theta = [path.stat().st_size for path in (home / "versions").iterdir()]
        at_start, idle = syncer.memory("VmHWM"), syncer.memory("VmRSS")
        syncer.forget_peak()
        sampler = Sampler(lambda: syncer.memory("VmRSS"), 0.25)
        sampler.start()
        cluster.learners(0, learners, *step)
        watch = Watch(cluster)
        watch.wait(2 * options.rounds // 3, 0)
        before_join = syncer.memory("VmHWM")
        cluster.learners(learners, 1, *step)
        watch.wait(options.rounds, learners)
        assert watch.sources[learners] == SYNCER_ID, "the new learner must get Theta from the syncer"
        usual = statistics.median(sampler.stop())
        peak, busy, rounds = syncer.memory("VmHWM"), load_average(), watch.rounds
        versions = len(list((home / "versions").iterdir()))
        syncer.kill()
        held = json.loads((home / "fullest.json").read_text())
    model = sum(theta) // 2  # theta and momentum of version 0
    members = learners + 1
    budget = 4 * model + members * PER_LEARNER + BESIDE
    highest = max(at_start, peak)
    print(f"{learners} learners and one that joins, {model / 1e6:.0f} MB of fp32, {rounds} rounds, load average {busy}")
    print(f"  starting: peak {at_start / 1e6:.0f} MB, then {idle / 1e6:.0f} MB")
    print(f"  running: peak {before_join / 1e6:.0f} MB before the join, {peak / 1e6:.0f} MB with it; median {usual / 1e6:.0f} MB")
    print(f"  {versions} versions of 24 fragments on disk; held in memory at the fullest moment:")
    for what, size in held.items():
        print(f"    {what:<30}{size / 1e6:>8.0f} MB")
    mark = "PASS" if highest <= budget else "FAIL"
    print(f"{mark} {highest / 1e6:.0f} MB of {budget / 1e6:.0f} MB: 4 models, {members} x 64 MiB and 500 MB")
    return {
        "learners": learners, "model_bytes": model, "rounds": rounds, "start_peak": at_start, "idle": idle, "load_average": busy,
        "peak_before_join": before_join, "peak": peak, "budget": budget, "passed": highest <= budget, "fullest": held,
    }  # fmt: skip


def main() -> int:
    if SYNCER in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument(SYNCER, action="store_true")
        parser.add_argument("recipe", type=Path)
        parser.add_argument("--listen")
        parser.add_argument("--dir", type=Path)
        parser.add_argument("--obey-stdin", action="store_true")
        be_the_syncer(parser.parse_args())
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--step", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--mlp", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    runs = [one_run(options, learners) for learners in options.learners]
    print(json.dumps({"bench": "syncer_memory", "runs": runs}))
    return 0 if all(run["passed"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
