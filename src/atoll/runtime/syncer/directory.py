"""A syncer's open directory: its tape, versions, places and machine. A lock admits one syncer at a time. The directory holds
everything that a restarted syncer needs.

    run.tape          every event and its decisions; fsynced before anything is announced; older segments beside it
    versions/         Theta, outer state and announced bytes, a file for each version of each fragment; a folder for each shard
    snapshots/        the syncer's part of snapshots
    start/            the versions that a resumed run started from
    model.upload      the model that the first learner uploaded; model.received while it does so
    places.jsonl      the incarnations given out so far        run.secret, token.key, token   private
    address           where it listens
    rollback.json     a request of `atoll rollback`, and rollback.answer.json
    revoked           tokens that no longer admit (beside --keys if given)
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.config import CUSTOM, Config, from_builtins, to_toml
from atoll.errors import DataError, UserError
from atoll.executor.environment import tape_header
from atoll.executor.merging import FragmentMerger, remerge_for
from atoll.executor.sharded import ShardedSyncer, ShardedVersions, ShardLost
from atoll.executor.syncer import TensorSyncer
from atoll.ids import SYNCER, FragmentId, Nanos, OuterStep
from atoll.protocol.checkpoint import thaw
from atoll.protocol.membership import EXPELLED, LEFT
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Event, Restored, Started, SyncerState
from atoll.runtime.clock import Clock, wall
from atoll.runtime.shards.feeds import ShardFeeds
from atoll.runtime.shards.group import ShardGroup, ShardsElsewhere, ShardStarter
from atoll.runtime.syncer.index import SyncerIndex
from atoll.runtime.syncer.places import PlaceLimits, Places, new_run_id, write_private
from atoll.runtime.syncer.resume import TAPE, load_resumable_state, refuse_other_data, resume_warnings
from atoll.runtime.syncer.snapshots import SyncerSnapshots
from atoll.runtime.tape_roller import TapeRoller
from atoll.store.durable import DurableVersions
from atoll.store.inputs_ahead import InputsAhead
from atoll.store.lock import lock_directory
from atoll.store.model_upload import named_tensors_of, read_model
from atoll.store.snapshots import load_syncer
from atoll.store.striped import open_versions
from atoll.store.tensor_files import publish_file, write_file
from atoll.store.tokenizer_file import refuse_other_tokenizer, write_tokenizer_file
from atoll.store.version_folder import elsewhere, shard_folders
from atoll.store.versions import IN_BLOCKS, Version, average_of
from atoll.store.weights import AVERAGE_FILE, THETA_FILE, save_weights
from atoll.tape.format import Tape, TapeWriter
from atoll.tape.segments import settle
from atoll.tasks.task import Task, initial_versions
from atoll.tensors.layout import Layout
from atoll.tensors.outer import initial_state, outer_rule
from atoll.tensors.stripes import refuse_unsharded
from atoll.transport.keys import JoinTokens, make_token, random_token_secret
from atoll.transport.revoked import Revoked

log = logging.getLogger("atoll.syncer")

UPLOAD_FILE = "model.upload"


class SyncerDirectory:
    def __init__(
        self, directory: Path, config: Config, task: Task | None, *, keys: Path | None = None,
        resume: Path | None = None, plan: Sequence[dict[str, object]] = (), shards: int | None = None, threads: int = 0,
        starter: ShardStarter | None = None, others: ShardsElsewhere | None = None,
    ) -> None:  # fmt: skip
        """`task` is None for a custom model, whose code only the learners have. `resume` is the syncer's part of a snapshot.
        `shards`: processes that merge; None: as many as the directory has, or none beside this one. `threads`: of the
        kernels, here or in each shard; 0: all cores, or its share of them. `starter`: of their processes. `others`: shards on
        other machines; without addresses it says with what to dial those that the directory names."""
        assert (task is None) == (config.model.name == CUSTOM)
        self.directory = directory
        self.config = config
        self.stopping = threading.Event()
        self.machine = SyncerMachine(config)
        self.tape_path = directory / TAPE
        self.data_fingerprint = task.fingerprint if task else ""
        self.tokenizer_fingerprint = task.tokenizer.fingerprint if task and task.tokenizer else ""
        self.layout: Layout | None = task.layout if task else None
        self.executor: TensorSyncer | None = None
        self.disk: DurableVersions | ShardedVersions
        self._others = others if others is not None and others.addresses else None
        self._keys = keys
        self._tls, self._hidden = (others.tls, others.hidden) if others is not None else (None, False)
        self.shards = len(self._others.addresses) if self._others is not None else shards or 1
        self._threads = threads
        self._group: ShardGroup | None = None
        self._starter = starter
        self._hashing = threading.Lock()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._snapshots: SyncerSnapshots | None = None
        self._locks = contextlib.ExitStack()
        self._locks.enter_context(lock_directory(directory))
        self._restored: SyncerState | None = None
        self._in_blocks = True
        self._closed = False
        self._starts = 0
        self._task = task
        if resume is not None:
            self._clear_false_start()
        try:
            if self.tape_path.exists():
                self._reopen(shards)
            else:
                if self._has_shards:
                    refuse_unsharded(config, "--shard-at" if self._others is not None else f"--shards {self.shards}")
                self._create(resume, list(plan))
            if self._hidden and self._others is None:
                raise UserError("--hide-shards: is for shards on other machines (--shard-at), and this run has none")
        except BaseException:
            self._close_shards()
            self._locks.close()
            raise
        self._roller = TapeRoller(self.tape, self.machine, config.limits, self._run_later, self.index.segment_begins)
        tokens = self._tokens(keys)
        self.revoked = Revoked(self.token_file.parent)
        if self.revoked.flaws:
            raise UserError(self.revoked.flaws[0])
        limits, now = PlaceLimits.of(config), time.monotonic()
        self.places = Places(directory, self.run, tokens, limits, self._is_connected, self._is_expelled, self.revoked, now)
        for member in self.machine.roster:
            if member.standing == LEFT and member.returns:
                self.places.left(member.learner, now, returns=True)

    # ------------------------------------------------------------ opening

    def _clear_false_start(self) -> None:
        """A resumed run that failed before its first event (a port in use) has not begun: its files are removed."""
        if self.tape_path.exists():
            if any(not isinstance(r.event, Started) for r in Tape(self.tape_path).records()):
                return
            self.tape_path.unlink()
        for folder in ("versions", "start"):
            shutil.rmtree(self.directory / folder, ignore_errors=True)

    def _create(self, resume: Path | None, plan: list[dict[str, object]]) -> None:
        self.run, self.epoch = new_run_id(), wall()
        if resume is not None:
            self._restored = self._load_snapshot(resume)
        elif self._task is not None:
            self._begin_with(initial_versions(self._task))
            if self.config.model.init:  # for replay: what was read may be gone by then
                self.disk.link_into(self.directory / "start")
        (self.directory / "config.toml").write_text(to_toml(self.config), encoding="utf8")
        if self._task is not None:
            write_tokenizer_file(self.directory, self._task)
        header = tape_header(
            self.config, data_fingerprint=self.data_fingerprint, tensors=self._task is not None, plan=plan, run=self.run,
            worker=SYNCER, epoch=self.epoch, kernels=self.executor.merger.kernels if self.executor is not None else "",
        )  # fmt: skip
        self.tape = TapeWriter.create(self.tape_path, header, flush_each=True)
        self.tape.sync()
        self.index = SyncerIndex(self.directory, header, self.machine)
        self.clock = Clock(self.epoch)

    def _load_snapshot(self, part: Path) -> SyncerState:
        syncer_state = load_resumable_state(part, self.config)
        if self._task is not None:
            refuse_other_data(part, self._task)
        for warning in resume_warnings(part, self.config, self._task):
            log.warning(warning)
        snapshot = load_syncer(part)
        if self._task is None:
            uploaded = part / UPLOAD_FILE
            if not uploaded.exists():
                raise DataError(f"snapshot {part}: has no {UPLOAD_FILE}, which a custom model needs; choose another snapshot")
            shutil.copyfile(uploaded, self.directory / UPLOAD_FILE)
            self.layout, _, _ = read_model(self.config, uploaded)
        snapshot.disk.link_into(self.directory / "start")
        kept = _kept_by(self.config, syncer_state)
        if not self._has_shards and isinstance(snapshot.disk, DurableVersions):
            snapshot.disk.link_into(self.directory)
            disk = DurableVersions.open(self.directory)
            disk.retain(kept)
            self._build_executor(disk)
            self._check_sizes(disk.newest())
        else:
            self._restripe(part, kept)
        return syncer_state

    def _restripe(self, part: Path, kept: Sequence[Sequence[OuterStep]]) -> None:
        """A snapshot of another number of shards: every version is read, put together and written again."""
        assert self.layout is not None
        source = open_versions(part, remerge_for(self.config, self.layout.fragments))
        self._check_sizes(source.newest())
        if self._has_shards:
            self._open_shards(kept, version_at=source.at)
            return
        disk = DurableVersions(self.directory, len(kept))
        (self.directory / "versions").mkdir(parents=True, exist_ok=True)
        for v, p in sorted((v, p) for p, versions in enumerate(kept) for v in versions):
            disk.put(v, {p: source.at(p, v)})
        self._build_executor(disk)

    def _check_sizes(self, newest: Sequence[Version]) -> None:
        assert self.layout is not None
        for fragment, version in zip(self.layout.fragments, newest, strict=True):
            if version.theta.numel() != fragment.numel:
                raise UserError(
                    f"snapshot: fragment {fragment.id} has {version.theta.numel()} parameters and the recipe's model "
                    f"{fragment.numel}; resume with the same model"
                )

    def _reopen(self, shards: int | None) -> None:
        """Feeds the tape to the machine, which gives the state. The other files are made to agree with it."""
        settle(self.tape_path)
        tape = Tape(self.tape_path).newest_segment()
        self.run, self.epoch = tape.header.run, tape.header.epoch
        if from_builtins(tape.header.config) != self.config:  # decoded: JSON has no tuples, so raw dicts never match
            raise UserError(
                f"directory {self.directory}: holds run {self.run} with another config; give the same recipe or another folder"
            )
        if self._task is not None:
            refuse_other_tokenizer(self.directory, self._task)
        if tape.header.data_fingerprint != self.data_fingerprint:
            log.warning("the text has changed since the run began: training goes on, but `atoll replay --weights` will fail")
            self.data_fingerprint = tape.header.data_fingerprint
        last = self._feed(tape)
        if tape.gaps:
            raise UserError(f"{tape.missing()[0]}; a syncer's tape is its state and cannot lack any")
        if not tape.cut:
            raise UserError(f"directory {self.directory}: run {self.run} is over; choose another directory")
        self.tape = TapeWriter.reopen(tape)
        self.clock = Clock(self.epoch, floor=last)
        uploaded = self.directory / UPLOAD_FILE
        if self._task is None and uploaded.exists():
            self.layout, _, _ = read_model(self.config, uploaded)
        if self.layout is None:
            return
        self._in_blocks = tape.header.digests == IN_BLOCKS
        self._find_shards(shards)
        if self._has_shards:
            self._open_shards(self.machine.stored_versions())
            return
        # To load the kernels takes one core for seconds, and to read and check all files the others.
        with ThreadPoolExecutor(1, thread_name_prefix="kernels") as beside:
            merger = beside.submit(self._merger)
            disk = DurableVersions.open(self.directory)
            disk.retain(self.machine.stored_versions())
            self._build_executor(disk, merger.result())

    def _find_shards(self, asked: int | None) -> None:
        """Those that the directory has; who asks for others is told."""
        folders = shard_folders(self.directory)
        there = tuple(address for folder in folders if (address := elsewhere(folder)) is not None)
        what = f"{len(folders)} shards" + (" on other machines" if there else "") if folders else "no shards"
        instead = "leave the option out, or go on from a snapshot in another folder (--resume)"
        if asked not in (None, len(folders) or 1):
            raise UserError(f"--shards {asked}: directory {self.directory} holds a run with {what}; {instead}")
        if self._others is not None and len(self._others.addresses) != len(there):
            given = len(self._others.addresses)
            raise UserError(f"--shard-at: names {given}, and directory {self.directory} holds a run with {what}; {instead}")
        if there and self._tls is None:
            raise UserError(f"directory {self.directory}: its shards are on other machines ({', '.join(there)}); give --keys")
        if there and self._others is None:
            self._others = ShardsElsewhere(there, self._tls, self._hidden)
        self.shards = len(folders) or 1

    @property
    def _has_shards(self) -> bool:
        return self.shards > 1 or self._others is not None

    def _feed(self, tape: Tape) -> Nanos:
        """What the machine was at the beginning of the newest segment, and the events since. Returns the time of the last."""
        begins = tape.begins_with()
        if begins is not None:
            state, segment = begins
            thaw(state, self.machine)
            self._starts = segment.incarnation + 1
        self.index = SyncerIndex(self.directory, tape.header, self.machine)
        last: Nanos = self.machine.now
        for record in tape.records():
            self.machine.on(record.event, record.now)
            self.index(record.now, record.worker, record.event, record.effects)
            self._starts += isinstance(record.event, Started)
            last = record.now
        return last

    def between_events(self) -> None:
        """Called by the driver, whose lock keeps events out meanwhile."""
        self._roller.look()

    def _begin_with(self, versions: Sequence[Version]) -> None:
        """A run's first versions."""
        if self._has_shards:
            self._open_shards([[0]] * len(versions), version_at=lambda p, v: versions[p])
        else:
            self._build_executor(DurableVersions.create(self.directory, versions))

    def _merger(self) -> FragmentMerger:
        assert self.layout is not None
        return FragmentMerger(self.config, self.layout.fragments, threads=self._threads or None)

    def _build_executor(self, disk: DurableVersions, merger: FragmentMerger | None = None) -> None:
        assert self.layout is not None
        self.disk = disk
        self._snapshots = SyncerSnapshots(self.directory, disk, self.run, self.config)
        self.executor = TensorSyncer(
            self.config, self.layout.fragments, disk, self._snapshots, in_blocks=self._in_blocks,
            merger=merger or self._merger(),
        )  # fmt: skip
        disk.remerge = self.executor.merger.again
        disk.background, disk.ahead = self._run_later, InputsAhead(self._log_thread)
        disk.arrears.clock = time.monotonic

    def _open_shards(
        self, kept: Sequence[Sequence[OuterStep]], version_at: Callable[[FragmentId, OuterStep], Version] | None = None
    ) -> None:
        assert self.layout is not None
        assert self._starter is not None, "who asks for shards says how they start"
        fragments = self.layout.fragments
        group = self._group = ShardGroup(
            self.directory, self.run, self.shards, self._threads, self._starter, self._others, self._keys
        )  # fmt: skip
        group.open(self.config, fragments, kept, in_blocks=self._in_blocks, version_at=version_at)
        self.disk = disk = ShardedVersions(group.shards, kept)
        self._snapshots = SyncerSnapshots(self.directory, disk, self.run, self.config, disk.keep_snapshots)
        self.executor = ShardedSyncer(self.config, fragments, group.shards, disk, self._snapshots)
        if group.feeds is not None:
            self.executor.feeds, group.feeds.announced_as = True, self.executor.announced_as

    @property
    def feeds(self) -> ShardFeeds | None:
        """Of shards that send to learners themselves."""
        return self._group.feeds if self._group is not None else None

    def _close_shards(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _run_later(self, work: Callable[[], None]) -> None:
        """What no round waits for: whole versions are written, and old files deleted."""

        def run() -> None:
            try:
                work()
            except Exception:
                log.exception("work of the store in the background failed; the run goes on")

        self._background.submit(run)

    def _tokens(self, keys: Path | None) -> JoinTokens:
        """The secret of `atoll keys`, or the run's own."""
        if keys is not None and (keys / "token.key").exists():
            self.token_file = keys / "token"
            return JoinTokens.load(keys)
        self.token_file = self.directory / "token"
        path = self.directory / "token.key"
        if not path.exists():
            secret = random_token_secret()
            write_private(self.directory / "token", make_token(secret).encode())
            write_private(path, secret)
        return JoinTokens.load(self.directory)

    # ------------------------------------------------------------ while it runs

    def first_events(self) -> list[Event]:
        restored = [Restored(self._restored)] if self._restored is not None else []
        return [Started(self._starts), *restored]

    @property
    def restarted(self) -> bool:
        return self._starts > 0

    def _is_connected(self, learner: int) -> bool:
        member = self.machine.roster.get(learner)
        return member is not None and member.connected

    def _is_expelled(self, learner: int) -> bool:
        member = self.machine.roster.get(learner)
        return member is not None and member.standing == EXPELLED

    def anchor_digests(self, learner: int) -> dict[int, dict[int, str]]:
        """Digests of the versions that a learner may hold now: those that it reported, and those on their way to it. A
        version that is being forgotten at this moment is left out."""
        member = self.machine.roster.get(learner)
        found: dict[int, dict[int, str]] = {}
        if member is not None and self.layout is not None:
            for p, versions in enumerate(zip(member.held, member.sent, strict=True)):
                for version in set(versions):
                    with contextlib.suppress(DataError):
                        found.setdefault(p, {})[version] = self.disk.announced_sha256(p, version)
        return found

    def hash_anchors(self) -> None:
        """In any thread, before a newcomer asks for a peer: of a large model the digests take longer than the loop may wait."""
        if self.layout is None or not self.machine.outer_step or not self._hashing.acquire(blocking=False):
            return  # one at a time: a learner that connects again and again must not cost more
        try:
            for p, versions in enumerate(self.disk.kept()):
                with contextlib.suppress(DataError, OSError, ShardLost):
                    self.disk.announced_sha256(p, versions[-1])
        finally:
            self._hashing.release()

    @property
    def snapshots_kept(self) -> tuple[OuterStep, ...]:
        return self._snapshots.kept if self._snapshots is not None else ()

    @property
    def kernels(self) -> str:
        if self.executor is None:
            return "what fits the model that a learner will upload"
        if self._group is not None:
            return self._group.kernels
        return f"{self.executor.merger.kernels} (ready after {self.executor.merger.warm_seconds:.1f} s)"

    @property
    def layout_digest(self) -> str:
        return self.layout.fingerprint if self.layout is not None else ""

    def payload_bytes_max(self) -> int:
        """The largest honest payload is one fragment in full."""
        return max(self._fragment_bytes())

    def queue_bytes_max(self) -> int:
        """Of each fragment one announcement is on its way to a learner, until the learner reports that it has it. One that
        reports without reading is sent more, and has its connection closed when twice the model is queued."""
        return sum(self._fragment_bytes())

    def _fragment_bytes(self) -> list[int]:
        """At least twice what a fragment has in full."""
        if self.layout is None:
            return [1 << 20]
        return [4096 + 8 * f.numel + 8 * f.buffer_numel for f in self.layout.fragments]

    def take_model(self, received: Path) -> None:
        """`received` becomes the upload file."""
        layout, params, buffers = read_model(self.config, received)
        rule = outer_rule(self.config)
        versions = [
            Version(theta, extra, initial_state(rule, theta.numel()) if rule else None, None, theta, None)
            for theta, extra in zip(params, buffers, strict=True)
        ]
        shutil.rmtree(self.directory / "versions", ignore_errors=True)  # of an upload that was interrupted
        # The upload file is last: a syncer killed in between has no model yet, and the next learner uploads it again.
        self._close_shards()  # likewise
        self.layout = layout
        self._begin_with(versions)
        publish_file(received, self.directory / UPLOAD_FILE)

    def write_address(self, address: str) -> None:
        """Atomically: a launcher may be waiting for this file."""
        write_file(self.directory / "address", [address.encode()])

    def let_old_files_go(self) -> None:
        """Those that are kept to be written over: the tape may need their room. From any thread."""
        disk = getattr(self, "disk", None)  # a start that failed has none yet
        if isinstance(disk, DurableVersions):
            disk.close()

    def close(self, *, complete: bool) -> None:
        """Once; another call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.stopping.set()
        for thread in (self._log_thread, self._background):
            thread.shutdown(wait=True)
        self.let_old_files_go()
        if complete:
            if self.layout is not None:
                if self.config.outer.average_decay and (average := average_of(self.disk.newest())) is not None:
                    save_weights(self.directory / AVERAGE_FILE, named_tensors_of(self.layout, *average))
                save_weights(self.directory / THETA_FILE, named_tensors_of(self.layout, *self.disk.theta()))
            self.tape.close()
        self._close_shards()
        self.index.close(complete=complete)
        self._locks.close()


def _kept_by(config: Config, syncer_state: SyncerState) -> tuple[tuple[OuterStep, ...], ...]:
    """The versions that a machine restored to this state refers to. A snapshot has the files of others too, from which these are
    merged again."""
    machine = SyncerMachine(config)
    machine.on(Started(0), 0)
    machine.on(Restored(syncer_state), 0)
    return machine.stored_versions()
