"""The coordinator's side of its shards: their processes, and a handle for each."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import Tensor

from atoll.codecs import Packet
from atoll.config import Config
from atoll.errors import DataError, RunFailed
from atoll.executor.shard import StripeResult
from atoll.executor.sharded import Announcement, ShardLost
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import AbortRound, Accept, CopyVersions, Discard, ForgetVersion, Merge, Store
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards import messages as notes
from atoll.runtime.shards.messages import (
    DoEffect,
    LinkInto,
    OpenShard,
    PutStripe,
    ReadStripe,
    RetainVersions,
    ShardEffect,
    ShardFailed,
    ShardHello,
    ShardReady,
    SlotNormsFound,
    TellParts,
    ToCoordinator,
)
from atoll.runtime.shards.process import ADDRESS_FILE, KEY_FILE, LOG_FILE
from atoll.runtime.syncer.places import write_private
from atoll.store.striped import stripe_of_version
from atoll.store.tensor_files import StorageFailed
from atoll.store.version_folder import shard_folder
from atoll.store.versions import Version
from atoll.tensors.layout import Fragment
from atoll.tensors.stripes import Meeting, stripes_of

log = logging.getLogger("atoll.syncer")

START_SECONDS: Final = 120.0
"""For the process of a shard to listen: it imports torch first."""
END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05


class RemoteShard:
    """A `ShardHandle` over two connections."""

    def __init__(self, number: int, address: str, key: str) -> None:
        self.number = number
        self._work, self._reads = (self._connected(address, key, reads=reads) for reads in (False, True))
        self._working, self._reading = threading.Lock(), threading.Lock()
        self._numels: list[int] = []
        """Of its stripe of each fragment."""

    def _connected(self, address: str, key: str, *, reads: bool) -> RankChannel:
        host, _, port = address.rpartition(":")
        try:
            channel = RankChannel(socket.create_connection((host, int(port)), timeout=START_SECONDS), ToCoordinator)
            channel.send(ShardHello(key, reads))
        except (OSError, ChannelClosed) as error:
            raise ShardLost(f"shard {self.number} at {address} does not answer: {error}") from None
        return channel

    # ------------------------------------------------------------ the beginning

    def open(self, note: OpenShard, fragments: Sequence[Fragment]) -> None:
        self._numels = [stripes_of(fragment, note.shards)[note.shard].fragment.numel for fragment in fragments]
        self._ask(note)

    def put(self, p: FragmentId, v: OuterStep, version: Version) -> None:
        tensors, count, codec = notes.tensors_of_version(version)
        rows, data = notes.named(tensors)
        self._ask(PutStripe(p, v, rows, count, codec), data)

    def retain(self, kept: Sequence[Sequence[OuterStep]]) -> ShardReady:
        ready, _ = self._ask(RetainVersions(tuple(map(tuple, kept))))
        assert isinstance(ready, ShardReady)
        return ready

    # ------------------------------------------------------------ effects

    def accept(self, effect: Accept, packet: Packet, buffers: Tensor) -> None:
        rows, data = notes.named(notes.tensors_of_packet(packet) | {"buffers": buffers})
        self._ask(DoEffect(effect, rows, packet.codec), data)

    def merge(self, effect: Merge, meeting: Meeting) -> StripeResult:
        (result,) = self._results(effect, meeting)
        return result

    def copy(self, effect: CopyVersions) -> list[StripeResult]:
        return self._results(effect, None)

    def _results(self, effect: ShardEffect, meeting: Meeting | None) -> list[StripeResult]:
        done, data = self._ask(DoEffect(effect), meeting=meeting)
        return notes.results_of(notes.tensors_of_note(done.tensors, data))

    def store(self, effect: Store) -> list[Announcement]:
        done, data = self._ask(DoEffect(effect))
        tensors = notes.tensors_of_note(done.tensors, data)
        return [
            Announcement(notes.packet_of(tensors, codec, self._numels[p], f"{p}"), tensors[f"{p}.buffers"])
            for p, codec in zip(effect.fragments, done.codecs, strict=True)
        ]

    def tell(self, effect: AbortRound | Discard | ForgetVersion) -> None:
        self._ask(DoEffect(effect))

    def link_into(self, directory: str) -> None:
        self._ask(LinkInto(directory))

    # ------------------------------------------------------------ reading

    def read_announced(self, p: FragmentId, v: OuterStep) -> Tensor:
        return self._read(p, v, "announced")[0]["announced"]

    def read_announcement(self, p: FragmentId, v: OuterStep) -> Announcement:
        tensors, _, codec = self._read(p, v, "announcement")
        return Announcement(notes.packet_of(tensors, codec, self._numels[p]), tensors["buffers"])

    def read_theta(self, p: FragmentId, v: OuterStep) -> tuple[Tensor, Tensor]:
        tensors, _, _ = self._read(p, v, "theta")
        return tensors["theta"], tensors["buffers"]

    def read_version(self, p: FragmentId, v: OuterStep) -> Version:
        return notes.version_of(*self._read(p, v, "version"))

    def _read(self, p: FragmentId, v: OuterStep, what: str) -> tuple[dict[str, Tensor], int | None, str]:
        with self._reading:
            answer, data = self._exchange(self._reads, ReadStripe(p, v, what), ())
        return notes.tensors_of_note(answer.tensors, data), answer.count, answer.codec

    # ------------------------------------------------------------ asking

    def _ask(self, note: Any, data: Sequence[Tensor] = (), meeting: Meeting | None = None) -> tuple[Any, Tensor]:
        with self._working:
            return self._exchange(self._work, note, data, meeting)

    def _exchange(
        self, channel: RankChannel, note: Any, data: Sequence[Tensor], meeting: Meeting | None = None
    ) -> tuple[Any, Tensor]:
        try:
            channel.send(note, data)
            answer, received = channel.receive()
            while isinstance(answer, TellParts):
                assert meeting is not None
                norms = meeting.norms(notes.parts_told(answer, received))
                channel.send(SlotNormsFound(tuple((slot, tuple(found)) for slot, found in sorted(norms.items()))))
                answer, received = channel.receive()
        except ChannelClosed as closed:
            raise ShardLost(f"shard {self.number} is gone: {closed}") from None
        if isinstance(answer, ShardFailed):
            kinds: dict[str, type[Exception]] = {"storage": StorageFailed, "data": DataError}
            raise kinds.get(answer.kind, RunFailed)(f"shard {self.number}: {answer.sentence}")
        return answer, received

    def close(self) -> None:
        self._work.close()
        self._reads.close()


class ShardStarter:
    """Starts the processes of shards by forks: importing torch in each takes seconds of a core, and a killed one should be back
    sooner. It outlives the syncer's lives."""

    def __init__(self) -> None:
        self._fork_server: ForkServer | None = None

    def start(self, folder: Path) -> Child:
        if self._fork_server is None:
            self._fork_server = ForkServer()
        return self._fork_server.spawn(["shard", "--dir", str(folder), "--obey-stdin"], folder / LOG_FILE)

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()


class ShardGroup:
    """The shards of one syncer, as processes of this machine."""

    def __init__(self, directory: Path, count: int, threads: int, starter: ShardStarter) -> None:
        self._directory, self._count, self._threads = directory, count, threads
        self._starter = starter
        self._processes: list[Child] = []
        self.shards: list[RemoteShard] = []
        self.kernels = ""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folders = [shard_folder(self._directory, shard, self._count) for shard in range(self._count)]
        keys = [secrets.token_hex(16) for _ in folders]
        for shard, (folder, key) in enumerate(zip(folders, keys, strict=True)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ADDRESS_FILE).unlink(missing_ok=True)
            write_private(folder / KEY_FILE, key.encode())
            self._processes.append(self._starter.start(folder))
            log.info("shard %d of %d: process %d, log %s", shard, self._count, self._processes[-1].pid, folder / LOG_FILE)
        until = time.monotonic() + START_SECONDS
        for shard, (folder, key) in enumerate(zip(folders, keys, strict=True)):
            self.shards.append(RemoteShard(shard, self._address(shard, folder / ADDRESS_FILE, until), key))

    def _address(self, shard: int, path: Path, until: float) -> str:
        waiting = threading.Event()
        while not path.exists():
            code = self._processes[shard].poll()
            if code is not None:
                failure = self._processes[shard].failure
                why = failure.message if failure is not None else f"its log is {path.with_name(LOG_FILE)}"
                raise ShardLost(f"shard {shard} ended at its start with code {code}; {why}")
            if time.monotonic() > until:
                raise ShardLost(f"shard {shard} did not listen within {START_SECONDS:.0f} s")
            waiting.wait(POLL_SECONDS)
        return path.read_text("utf8")

    def open(
        self, config: Config, fragments: Sequence[Fragment], kept: Sequence[Sequence[OuterStep]], *, in_blocks: bool = True,
        version_at: Callable[[FragmentId, OuterStep], Version] | None = None,
    ) -> None:  # fmt: skip
        """`version_at`: of a run that begins, which sends every shard its stripes; else they have them."""
        rows, plain = notes.rows_of(fragments), msgspec.to_builtins(config)
        fresh = version_at is not None
        self._each(lambda shard: shard.open(
            OpenShard(plain, rows, shard.number, self._count, self._threads, fresh, in_blocks), fragments
        ))  # fmt: skip
        if version_at is not None:
            order = sorted((v, p) for p, versions in enumerate(kept) for v in versions)
            for v, p in order:
                version, stripes = version_at(p, v), stripes_of(fragments[p], self._count)
                self._each(lambda s, p=p, v=v, of=version, cut=stripes: s.put(p, v, stripe_of_version(of, cut[s.number])))  # type: ignore[misc]
        ready = self._each(lambda shard: shard.retain(kept))
        self.kernels = f"{self._count} shards, each by {ready[0].kernels}"

    def _each(self, work: Callable[[RemoteShard], Any]) -> list[Any]:
        with ThreadPoolExecutor(self._count, "shards") as pool:
            return list(pool.map(work, self.shards))

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        for process in self._processes:
            process.signal(signal.SIGTERM)  # what it stored is durable, and what it did not is gathered again
        for process in self._processes:
            process.wait(END_SECONDS)
            process.signal(signal.SIGKILL)
            process.wait(END_SECONDS)
