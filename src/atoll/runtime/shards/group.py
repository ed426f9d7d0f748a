"""The coordinator's side of its shards: their processes, and a handle for each."""

from __future__ import annotations

import logging
import secrets
import signal
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor

from atoll.codecs import Packet
from atoll.config import Config
from atoll.errors import DataError, RunFailed, UserError
from atoll.executor.shard import StripeResult
from atoll.executor.sharded import Announcement, ShardLost
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import AbortRound, Accept, CopyVersions, Discard, ForgetVersion, Merge, Store
from atoll.runtime.local.forkserver import Child, ForkServer
from atoll.runtime.log import PacedLog
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards import messages as notes
from atoll.runtime.shards.door import knock
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.shards.messages import (
    DoEffect,
    KeepSnapshots,
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
)
from atoll.runtime.shards.process import ADDRESS_FILE, KEY_FILE, LOG_FILE
from atoll.runtime.syncer.places import write_private
from atoll.store.snapshots import OPEN
from atoll.store.striped import stripe_of_version
from atoll.store.tensor_files import StorageFailed
from atoll.store.version_folder import mark_elsewhere, shard_folder
from atoll.store.versions import Version
from atoll.tensors.layout import Fragment
from atoll.tensors.stripes import Meeting, stripes_of
from atoll.transport.keys import split_address

log = logging.getLogger("atoll.syncer")

START_SECONDS: Final = 120.0
"""For the process of a shard to listen: it imports torch first."""
AWAY_SECONDS: Final = 3600.0
"""How long a run that goes on waits for a shard on another machine; as long as learners dial a syncer that is away."""
DIAL_SECONDS: Final = 1.0
LINE_SECONDS: Final = 30.0
SLOW_SECONDS: Final = 10.0
"""An answer takes less, but for a merge on a slow disk."""
END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05


class ShardAddress(NamedTuple):
    where: str
    key: str = ""
    tls: ssl.SSLContext | None = None
    """Of a shard on another machine, which its certificate proves; on this one the key does."""


class RemoteShard:
    """A `ShardHandle` over two connections."""

    def __init__(self, number: int, address: ShardAddress, home: Path) -> None:
        """OSError or ChannelClosed: nobody answers there."""
        self.number, self.address, self._home = number, address, home
        self._session = secrets.token_hex(16)
        self._work = self._knock(reads=False)
        try:
            self._reads = self._knock(reads=True)
        except BaseException:
            self._work.close()
            raise
        self.door = ""
        """Where it takes connections of learners, if it does."""
        self._working, self._reading = threading.Lock(), threading.Lock()
        self._numels: list[int] = []
        """Of its stripe of each fragment."""
        self.asked_at: float | None = None
        """Since when it owes an answer about its work."""

    def _knock(self, *, reads: bool, feeds: bool = False) -> RankChannel:
        where, key, tls = self.address
        return knock(split_address(where), ShardHello(self._session, reads, key, feeds), tls)

    def feeds(self) -> RankChannel:
        """A connection on which it is told what to send to learners. Once it is ready."""
        return self._knock(reads=False, feeds=True)

    # ------------------------------------------------------------ the beginning

    def open(self, note: OpenShard, fragments: Sequence[Fragment]) -> None:
        self._numels = [stripes_of(fragment, note.shards)[note.shard].fragment.numel for fragment in fragments]
        self._shards = note.shards
        self._ask(note)

    def put(self, p: FragmentId, v: OuterStep, version: Version) -> None:
        tensors, count, codec = notes.tensors_of_version(version)
        rows, data = notes.named(tensors)
        self._ask(PutStripe(p, v, rows, count, codec), data)

    def retain(self, kept: Sequence[Sequence[OuterStep]]) -> ShardReady:
        ready, _ = self._ask(RetainVersions(tuple(map(tuple, kept))))
        assert isinstance(ready, ShardReady)
        self.door = ready.door
        return ready

    # ------------------------------------------------------------ effects

    def accept(self, effect: Accept, packet: Packet, buffers: Tensor) -> None:
        rows, data = notes.named(notes.tensors_of_packet(packet) | {"buffers": buffers})
        self._ask(DoEffect(effect, rows, packet.codec), data)

    def accept_own(self, effect: Accept, session: bytes, number: int) -> None:
        self._ask(DoEffect(effect, session=session, number=number))

    def merge(self, effect: Merge, meeting: Meeting) -> StripeResult:
        (result,) = self._results(effect, meeting)
        return result

    def copy(self, effect: CopyVersions) -> list[StripeResult]:
        return self._results(effect, None)

    def _results(self, effect: ShardEffect, meeting: Meeting | None) -> list[StripeResult]:
        done, data = self._ask(DoEffect(effect), meeting=meeting)
        return notes.results_of(notes.tensors_of_note(done.tensors, data))

    def store_quietly(self, effect: Store) -> tuple[str, ...]:
        done, _ = self._ask(DoEffect(effect, quietly=True))
        codecs: tuple[str, ...] = done.codecs
        return codecs

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
        if self.address.tls is None:
            self._ask(LinkInto(directory))
            return
        self._ask(LinkInto(str(Path(directory).relative_to(self._home)).removesuffix(OPEN)))
        mark_elsewhere(Path(directory), self.number, self._shards, self.address.where)

    def keep_snapshots(self, names: Sequence[str]) -> None:
        if self.address.tls is not None:
            self._ask(KeepSnapshots(tuple(names)))

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
            self.asked_at = time.monotonic()
            try:
                return self._exchange(self._work, note, data, meeting)
            finally:
                self.asked_at = None

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

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        """Without one it starts a process that imports torch anew when the first shard is asked for."""
        self._fork_server = fork_server

    def start(self, folder: Path) -> Child:
        if self._fork_server is None:
            self._fork_server = ForkServer()
        return self._fork_server.spawn(["shard", "--dir", str(folder), "--obey-stdin"], folder / LOG_FILE)

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()


class ShardsElsewhere(NamedTuple):
    """Shards that somebody started on other machines."""

    addresses: tuple[str, ...]
    tls: ssl.SSLContext | None
    """The syncer's own certificate, and what it requires of theirs."""
    hidden: bool = False
    """Learners cannot reach them."""


class ShardGroup:
    """The shards of one syncer: processes of this machine that it starts, or of others."""

    def __init__(
        self, directory: Path, run: str, count: int, threads: int, starter: ShardStarter,
        others: ShardsElsewhere | None = None, keys: Path | None = None,
    ) -> None:  # fmt: skip
        """`keys`: the folder with the syncer's own, for shards that send to learners themselves."""
        self._directory, self._run, self._count, self._threads = directory, run, count, threads
        self._starter = starter
        self._others = others
        self._keys = str(keys.absolute()) if keys is not None else None
        self.feeds: ShardFeeds | None = None
        """Unless learners cannot reach the shards."""
        self._closed = threading.Event()
        self._processes: list[Child] = []
        self.shards: list[RemoteShard] = []
        self.kernels = ""

    def _start(self, *, fresh: bool) -> None:
        if self._others is None:
            return self._start_here()
        until = time.monotonic() + (START_SECONDS if fresh else AWAY_SECONDS)
        for shard, where in enumerate(self._others.addresses):
            self.shards.append(self._found(shard, ShardAddress(where, "", self._others.tls), until, fresh=fresh))
            mark_elsewhere(self._directory, shard, self._count, where)

    def _found(self, shard: int, address: ShardAddress, until: float, *, fresh: bool) -> RemoteShard:
        """A run that goes on waits longer: the machine of a shard may be starting."""
        waiting, line = threading.Event(), PacedLog(LINE_SECONDS)
        while True:
            try:
                return RemoteShard(shard, address, self._directory)
            except (OSError, ChannelClosed) as error:
                why = str(error)
            if time.monotonic() > until:
                if fresh:
                    remedy = "start it with `atoll shard --listen`"
                    raise UserError(f"--shard-at {address.where}: no shard answers there ({why}); {remedy}")
                raise ShardLost(f"shard {shard} at {address.where} does not answer: {why}")
            if line.due():
                meanwhile = "" if fresh else "; rounds wait, learners train on"
                log.warning("shard %d at %s does not answer yet%s: %s", shard, address.where, meanwhile, why)
            waiting.wait(DIAL_SECONDS)

    def _start_here(self) -> None:
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
            where = self._address(shard, folder / ADDRESS_FILE, until)
            try:
                self.shards.append(RemoteShard(shard, ShardAddress(where, key), self._directory))
            except (OSError, ChannelClosed) as error:
                raise ShardLost(f"shard {shard} at {where} does not answer: {error}") from None

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
        try:
            self._start(fresh=version_at is not None)
            self._open(config, fragments, kept, in_blocks, version_at)
        except BaseException:
            self.close()
            raise

    def _open(
        self, config: Config, fragments: Sequence[Fragment], kept: Sequence[Sequence[OuterStep]], in_blocks: bool,
        version_at: Callable[[FragmentId, OuterStep], Version] | None,
    ) -> None:  # fmt: skip
        rows, plain = notes.rows_of(fragments), msgspec.to_builtins(config)
        fresh = version_at is not None
        self._each(lambda shard: shard.open(
            OpenShard(self._run, plain, rows, shard.number, self._count, self._threads, fresh, in_blocks, self._keys), fragments
        ))  # fmt: skip
        if version_at is not None:
            order = sorted((v, p) for p, versions in enumerate(kept) for v in versions)
            for v, p in order:
                version, stripes = version_at(p, v), stripes_of(fragments[p], self._count)
                self._each(lambda s, p=p, v=v, of=version, cut=stripes: s.put(p, v, stripe_of_version(of, cut[s.number])))  # type: ignore[misc]
        ready = self._each(lambda shard: shard.retain(kept))
        self.kernels = f"{self._count} shards, each by {ready[0].kernels}"
        threading.Thread(target=self._watch, name="watch shards", daemon=True).start()
        others = self._others
        if others is None or not others.hidden:
            try:
                self.feeds = ShardFeeds(self.shards, fragments, others.addresses if others is not None else ())
            except (OSError, ChannelClosed) as error:
                raise ShardLost(f"a shard is gone before it takes connections of learners: {error}") from None

    def _watch(self) -> None:
        """A process that hangs keeps its connections, and rounds wait for it: somebody has to hear of that."""
        line = PacedLog(LINE_SECONDS)
        while not self._closed.wait(DIAL_SECONDS):
            now = time.monotonic()
            for shard in self.shards:
                waits = now - (shard.asked_at or now)
                if waits > SLOW_SECONDS and line.due():
                    log.warning("shard %d has not answered for %.0f s; rounds wait, learners train on", shard.number, waits)

    def _each(self, work: Callable[[RemoteShard], Any]) -> list[Any]:
        with ThreadPoolExecutor(self._count, "shards") as pool:
            return list(pool.map(work, self.shards))

    def close(self) -> None:
        self._closed.set()
        if self.feeds is not None:
            self.feeds.close()
        for shard in self.shards:
            shard.close()
        for process in self._processes:
            process.signal(signal.SIGTERM)  # what it stored is durable, and what it did not is gathered again
        for process in self._processes:
            process.wait(END_SECONDS)
            process.signal(signal.SIGKILL)
            process.wait(END_SECONDS)
