"""A shard's process: it holds its stripe of every version in its folder, and does what the syncer's coordinator asks.

One connection is for work, in order; another for reading stored versions, which must not wait for a merge. When the coordinator
is gone, the shard waits for the next one, which tells it what to keep: that is the whole of a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from atoll.config import from_builtins
from atoll.errors import AtollError, DataError, UserError
from atoll.executor.shard import ShardSyncer
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Accept, CopyVersions, Merge, Store
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel
from atoll.runtime.shards import messages as notes
from atoll.runtime.shards.door import ShardDoor
from atoll.runtime.shards.feeding import Feeding, HandedOver, HeldParts, LearnerConnections, OwnStripes, syncers_context
from atoll.runtime.shards.messages import (
    DoEffect,
    EffectDone,
    KeepSnapshots,
    LinkInto,
    OpenShard,
    PutStripe,
    ReadStripe,
    RetainVersions,
    ShardFailed,
    ShardReady,
    SlotNormsFound,
    StripeRead,
    TellParts,
)
from atoll.store.durable import DurableVersions
from atoll.store.inputs_ahead import InputsAhead
from atoll.store.lock import lock_directory
from atoll.store.tensor_files import StorageFailed, write_file
from atoll.store.version_file import FOLDER
from atoll.store.version_folder import scan, shard_folder
from atoll.tensors.norms import PartSquares
from atoll.tensors.stripes import stripes_of
from atoll.transport import LinkLimits

log = logging.getLogger("atoll.shard")

KEY_FILE: Final = "key"
ADDRESS_FILE: Final = "address"
LOG_FILE: Final = "log"
RUN_FILE: Final = "run"
SNAPSHOTS: Final = "snapshots"
START: Final = "start"
LOCK_SECONDS: Final = 20.0
WHOLES_QUEUED: Final = 2
"""Of each stripe, in full, that may wait for a learner; as a syncer without shards has it."""
QUEUED_BYTES_LEAST: Final = 4096


class ShardStore:
    """What one shard stores and computes, from the first request of a coordinator to its last."""

    def __init__(self, directory: Path, opened: OpenShard, *, alone: bool) -> None:
        """`alone`: on a machine of its own, all of whose cores it may use."""
        self._directory = directory
        self._opened = opened
        self._alone = alone
        self._refuse_another_run()
        self._config = from_builtins(opened.config)
        self._fragments = notes.fragments_from(opened.fragments)
        self._stripes = [stripes_of(fragment, opened.shards)[opened.shard] for fragment in self._fragments]
        self._background = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="log")
        if opened.fresh:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            (directory / FOLDER).mkdir(parents=True)
            write_file(directory / RUN_FILE, [opened.run.encode()])
            self.disk = DurableVersions(directory, len(self._fragments))
        else:
            self.disk = DurableVersions.open(directory)
        self.syncer: ShardSyncer | None = None
        self.parts: HeldParts | None = None
        """Of contributions that this shard receives itself."""

    def _refuse_another_run(self) -> None:
        path, run = self._directory / RUN_FILE, self._opened.run
        held = path.read_text("utf8") if path.exists() else ""
        if held == run:
            return
        if not self._opened.fresh:
            raise DataError(f"--dir {self._directory}: holds {_run(held)}; the shard of run {run} goes on in its own folder")
        if any(v > 0 for _, v, _ in scan(self._directory / FOLDER)):
            raise DataError(f"--dir {self._directory}: holds {_run(held)}; start the shard in a folder of its own for run {run}")

    def put(self, note: PutStripe, tensors: Mapping[str, Tensor]) -> None:
        self.disk.put(note.version, {note.fragment: notes.version_of(tensors, note.count, note.codec)})

    def retain(self, kept: Sequence[Sequence[OuterStep]], door: str = "") -> ShardReady:
        self.disk.retain(kept)
        opened, cores = self._opened, os.cpu_count() or 1
        self.syncer = ShardSyncer(
            self._config, self._fragments, opened.shard, opened.shards, self.disk, in_blocks=opened.in_blocks,
            threads=opened.threads or (cores if self._alone else max(1, cores // opened.shards)),
        )  # fmt: skip
        self.disk.remerge = self.syncer.merger.again
        self.disk.background, self.disk.ahead = self._run_later, InputsAhead(self._log_thread)
        self.disk.arrears.clock = time.monotonic
        for p, version in enumerate(self.disk.newest()):
            if version.theta.numel() != self._stripes[p].fragment.numel:
                raise DataError(f"directory {self._directory}: its stripe of fragment {p} has another size")
        return ShardReady(self.syncer.merger.kernels, self.syncer.merger.warm_seconds, door)

    def feeding(self, channel: RankChannel, own: ssl.SSLContext | None) -> Feeding:
        """`own`: with the certificate of a shard on a machine of its own; others show the syncer's."""
        opened = self._opened
        stripes = OwnStripes(self._config, self._fragments, opened.shard, opened.shards, self.disk)
        assert self.syncer is not None, "it sends and receives once it knows what to keep"
        self.parts = HeldParts(self._config, [stripe.fragment for stripe in self._stripes], self.syncer.merger)
        wholes = [stripe.fragment.numel + stripe.fragment.buffer_numel for stripe in self._stripes]
        limits = LinkLimits(queue_bytes_max=sum(WHOLES_QUEUED * 4 * numel + QUEUED_BYTES_LEAST for numel in wholes))
        return Feeding(channel, stripes, self.parts, own or syncers_context(opened.keys), len(self._fragments), limits)

    def _run_later(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:
                log.exception("work of the store in the background failed; the run goes on")

        self._background.submit(run)

    def do(self, note: DoEffect, tensors: Mapping[str, Tensor], meeting: Any) -> tuple[EffectDone, list[Tensor]]:
        effect, syncer = note.effect, self.syncer
        assert syncer is not None, "a shard works once it knows what to keep"
        results = []
        match effect:
            case Accept() if note.session:
                assert self.parts is not None, "the coordinator accepts what this shard has looked at"
                own = self.parts.of(note.session, note.number)
                syncer.execute(effect, Payload("packet", own[0].nbytes, own))
            case Accept(fragment=p):
                packet = notes.packet_of(tensors, note.codec, self._stripes[p].fragment.numel)
                assert packet is not None
                syncer.execute(effect, Payload("packet", packet.nbytes, (packet, tensors["buffers"])))
            case Merge():
                results = [syncer.merge(effect, meeting)]
            case CopyVersions(outer_step=t, versions=versions):
                syncer.execute(effect, None)
                results = [syncer.result(t, p) for p in range(len(versions))]
            case Store(outer_step=t, fragments=fragments):
                syncer.store(effect)
                return self._announcements(t, fragments, quietly=note.quietly)
            case _:
                syncer.execute(effect, None)
        rows, data = notes.named(notes.tensors_of_results(results))
        return EffectDone(rows), data

    def _announcements(
        self, t: OuterStep, fragments: Sequence[FragmentId], *, quietly: bool
    ) -> tuple[EffectDone, list[Tensor]]:
        tensors: dict[str, Tensor] = {}
        codecs = []
        for p in fragments:
            packet, (_, buffers) = self.disk.packet(p, t), self.disk.theta_at(p, t)
            if not quietly:
                tensors |= notes.tensors_of_packet(packet, f"{p}") | {f"{p}.buffers": buffers}
            codecs.append(packet.codec if packet is not None else "")
        rows, data = notes.named(tensors)
        return EffectDone(rows, tuple(codecs)), data

    def read(self, note: ReadStripe) -> tuple[StripeRead, list[Tensor]]:
        p, v = note.fragment, note.version
        count, codec = None, ""
        if note.what == "announced":
            tensors = {"announced": self.disk.announced(p, v)}
        elif note.what == "announcement":
            packet = self.disk.packet(p, v)
            codec = packet.codec if packet is not None else ""
            tensors = notes.tensors_of_packet(packet) | {"buffers": self.disk.theta_at(p, v)[1]}
        elif note.what == "theta":
            theta, buffers = self.disk.theta_at(p, v)
            tensors = {"theta": theta, "buffers": buffers}
        else:
            tensors, count, codec = notes.tensors_of_version(self.disk.at(p, v))
        rows, data = notes.named(tensors)
        return StripeRead(rows, count, codec), data

    def link_into(self, directory: str) -> None:
        if not self._alone:
            return self.disk.link_into(shard_folder(Path(directory), self._opened.shard, self._opened.shards))
        target = self._below(directory)
        shutil.rmtree(target, ignore_errors=True)  # of a syncer that was killed before it sealed its own part
        self.disk.link_into(target)

    def keep_snapshots(self, names: Sequence[str]) -> None:
        folder = self._directory / SNAPSHOTS
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _below(self, name: str) -> Path:
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or parts[0] not in (SNAPSHOTS, START):
            raise DataError(f"a syncer asks for the folder {name!r}, which is none of a shard's")
        return self._directory.joinpath(*parts)

    def close(self) -> None:
        for thread in (self._log_thread, self._background):
            thread.shutdown(wait=True)
        self.disk.close()


def _run(held: str) -> str:
    return f"stripes of run {held}" if held else "no stripes"


class _Asking:
    """Asks the coordinator, in the middle of a merge."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel

    def norms(self, parts: Mapping[int, Sequence[PartSquares]]) -> Mapping[int, Sequence[float]]:
        rows, data = notes.named(notes.tensors_of_parts(parts))
        self._channel.send(TellParts(tuple((slot, len(given)) for slot, given in parts.items()), rows), data)
        answer, _ = self._channel.receive()
        if not isinstance(answer, SlotNormsFound):
            raise ChannelClosed("the coordinator gave no norms")
        return dict(answer.norms)


class ShardServer:
    def __init__(self, directory: Path, listen: tuple[str, int], key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """With a `key` it is one of the shards of a syncer on this machine; with `tls` it is alone on its own."""
        self._directory, self._alone = directory, tls is not None
        directory.mkdir(parents=True, exist_ok=True)
        self._locks = contextlib.ExitStack()
        self._lock(directory)
        try:
            listener = socket.create_server(listen)
        except OSError as error:
            raise UserError(f"--listen {listen[0]}:{listen[1]}: cannot listen there: {error.strerror}") from None
        self._tls = tls
        self._learners = LearnerConnections()
        """Of the coordinator that is inside."""
        self._door = ShardDoor(listener, key, tls, lambda connection: self._learners.take(connection))
        self.address = f"{listen[0]}:{listener.getsockname()[1]}"
        write_file(directory / ADDRESS_FILE, [self.address.encode()])

    def _lock(self, directory: Path) -> None:
        """The shard of a syncer that was killed a moment ago may still be ending."""
        waiting, until = threading.Event(), time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._locks.enter_context(lock_directory(directory, "shard"))
                return
            except UserError:
                if time.monotonic() > until or self._alone:
                    raise
                waiting.wait(0.1)

    def serve(self) -> None:
        """Coordinators, one after the other, until the process is ended."""
        while True:
            work, reads = self._door.next()
            log.info("a coordinator is here")
            store: list[ShardStore] = []
            self._learners = LearnerConnections() if self._alone else HandedOver()
            self._door.on_feeds = lambda channel, store=store: self._feed(channel, store)  # type: ignore[misc]
            reader = threading.Thread(target=self._read_for, args=(reads, store), name="reads", daemon=True)
            reader.start()
            try:
                self._work_for(work, store)
            except ChannelClosed as closed:
                log.info("the coordinator is gone: %s", closed)
            finally:
                self._door.on_feeds = RankChannel.close
                self._learners.close()
                work.close()
                reads.close()
                reader.join()
                for each in store:
                    each.close()

    def _feed(self, channel: RankChannel, store: list[ShardStore]) -> None:
        """The coordinator that is inside tells from now on what to send to whom."""
        learners = self._learners
        if not store or learners.feeding is not None:
            return channel.close()
        try:
            learners.feeding = store[0].feeding(channel, self._tls)
        except (AtollError, OSError) as error:  # of the keys; the coordinator ends its life when this channel ends
            log.error("this shard cannot send to learners: %s", error)
            channel.close()
        return None

    def _work_for(self, channel: RankChannel, store: list[ShardStore]) -> None:
        while True:
            note, data = channel.receive()
            try:
                answer, tensors = self._answer(note, data, channel, store)
            except ChannelClosed:
                raise
            except Exception as error:
                channel.send(_failure(error))
            else:
                channel.send(answer, tensors)

    def _answer(
        self, note: Any, data: Tensor, channel: RankChannel, store: list[ShardStore]
    ) -> tuple[EffectDone | ShardReady, list[Tensor]]:
        if isinstance(note, OpenShard):
            store.append(ShardStore(self._directory, note, alone=self._alone))
            return EffectDone(), []
        if not store:
            raise DataError("a coordinator opens a shard before it asks for anything")
        match note:
            case PutStripe():
                store[0].put(note, notes.tensors_of_note(note.tensors, data))
            case RetainVersions(kept=kept):
                return store[0].retain(kept, self._learners.path), []
            case DoEffect():
                return store[0].do(note, notes.tensors_of_note(note.tensors, data), _Asking(channel))
            case LinkInto(directory=directory):
                store[0].link_into(directory)
            case KeepSnapshots(names=names):
                store[0].keep_snapshots(names)
            case _:
                raise DataError(f"a shard does not know what to do with {type(note).__name__}")
        return EffectDone(), []

    def _read_for(self, channel: RankChannel, store: list[ShardStore]) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                note, _ = channel.receive()
                try:
                    answer, tensors = store[0].read(note)
                except Exception as error:
                    channel.send(_failure(error))
                else:
                    channel.send(answer, tensors)


def _failure(error: Exception) -> ShardFailed:
    if isinstance(error, StorageFailed):
        return ShardFailed("storage", str(error))
    if isinstance(error, AtollError):
        return ShardFailed("data", str(error))
    log.exception("a request failed")
    return ShardFailed("bug", repr(error))
