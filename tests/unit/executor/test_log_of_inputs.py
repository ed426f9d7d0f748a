"""A round stores what it merged and not what came of it: after any crash the versions are merged again, to the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codecs import codec
from atoll.config import Config, load
from atoll.errors import DataError
from atoll.executor.merging import remerge_for
from atoll.executor.syncer import TensorSyncer
from atoll.ids import FragmentId, OuterStep
from atoll.kernels import fused
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import AbortRound, Accept, CopyVersions, ForgetVersion, Merge, Share, Store, Stored
from atoll.store import durable, inputs_ahead
from atoll.store.arrears import WHOLE_EVERY, WHOLE_LEAST
from atoll.store.durable import DurableVersions
from atoll.store.inputs_ahead import InputsAhead
from atoll.store.spare_files import SpareFiles
from atoll.store.tensor_files import StorageFailed
from atoll.store.version_file import INPUTS, WHOLE, check_version
from atoll.store.version_folder import missing_files
from atoll.store.versions import MemoryVersions, MergeInputs, Version, VersionStore
from atoll.tensors.layout import Fragment, Slot
from atoll.tensors.outer import initial_state, outer_rule

SIZES = (300, 5_001)
NUMEL = sum(SIZES)
FRAGMENTS = 3


@pytest.fixture(autouse=True)
def small_is_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTHWHILE", 1)


def config(**protocol: Any) -> Config:
    sizes = {"fragments": FRAGMENTS, "local_steps_per_round": 3, "overlap": 2}
    return load(preset_name="decoupled", overrides={"learners": 3, "protocol": sizes | protocol})


def layout() -> tuple[Fragment, ...]:
    slots, at = [], 0
    for index, size in enumerate(SIZES):
        slots.append(Slot(f"w{index}", "param", 0, size, (size,), at, size, torch.float32, embedding=False))
        at += size
    return tuple(Fragment(p, tuple(slots), (), at, 0) for p in range(FRAGMENTS))


def numbers(seed: int, size: float) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * size


def initial(settings: Config) -> list[Version]:
    rule = outer_rule(settings)
    assert rule is not None
    thetas = [numbers(p, 0.02) for p in range(FRAGMENTS)]
    return [Version(theta, torch.empty(0), initial_state(rule, NUMEL), None, theta, None) for theta in thetas]


class Run:
    """The same rounds on a disk and in memory. `later` holds what the disk wants done in the background."""

    def __init__(self, folder: Path, settings: Config, *, ahead: bool = False) -> None:
        """`ahead`: inputs are written while they are merged, and over old files."""
        self.settings, self.folder, self.ahead = settings, folder, ahead
        self.later: list[Callable[[], None]] = []
        self.memory = MemoryVersions(initial(settings))
        self.oracle = TensorSyncer(settings, layout(), self.memory)
        self.use(DurableVersions.create(folder, initial(settings)))
        self.outer_step = 0

    def use(self, disk: DurableVersions) -> None:
        self.disk = disk
        self.syncer = TensorSyncer(self.settings, layout(), disk)
        self.disk.remerge, self.disk.background = self.syncer.merger.again, self.later.append
        if self.ahead:
            self.disk.ahead = InputsAhead(ThreadPoolExecutor(1), worthwhile_bytes=0)
            self.disk.spare = SpareFiles(worthwhile_bytes=1)

    def round(self, anchors: tuple[OuterStep, ...] | None = None, plain: bool = False) -> OuterStep:
        """One outer step of the fragment whose turn it is; contributions refer to its newest version unless told."""
        t, p = self.outer_step + 1, self.outer_step % FRAGMENTS
        newest = max(self.memory.kept()[p])
        shares = []
        for m, anchor in enumerate(anchors or (newest,) * 3):
            packet = codec(self.settings.protocol.codec_up).encode(numbers(97 * t + m, 1e-3))
            for syncer in (self.oracle, self.syncer):
                syncer.execute(Accept(t, p, m, anchor), Payload("packet", packet.nbytes, (packet, torch.empty(0))))
            shares.append(Share(m, 1.0 + m, 0, 4))
        stored = [self._commit(syncer, t, p, tuple(shares), newest, plain) for syncer in (self.oracle, self.syncer)]
        assert stored[0] == stored[1]
        self.outer_step = t
        return t

    def _commit(
        self, syncer: TensorSyncer, t: OuterStep, p: FragmentId, shares: tuple[Share, ...], newest: OuterStep, plain: bool
    ) -> Stored:
        syncer.execute(Merge(t, p, shares, newest, plain), None)
        (stored,) = syncer.execute(Store(t, (p,)), None)
        assert isinstance(stored, Stored)
        return stored

    def roll_back(self, versions: tuple[OuterStep, ...]) -> None:
        self.outer_step += 1
        for syncer in (self.oracle, self.syncer):
            syncer.execute(CopyVersions(self.outer_step, versions), None)
            syncer.execute(Store(self.outer_step, tuple(range(FRAGMENTS))), None)

    def forget_but(self, count: int) -> None:
        for p, versions in enumerate(self.memory.kept()):
            for v in versions[:-count]:
                for syncer in (self.oracle, self.syncer):
                    syncer.execute(ForgetVersion(p, v), None)

    def background(self) -> None:
        while self.later:
            self.later.pop(0)()

    def restart(self) -> None:
        """A killed process loses its memory and what it had not begun in the background."""
        self.later.clear()
        disk = DurableVersions.open(self.folder)
        disk.retain(self.memory.kept())
        self.use(disk)

    def check(self, disk: VersionStore | None = None) -> None:
        for p, versions in enumerate(self.memory.kept()):
            for v in versions:
                same_version((disk or self.disk).at(p, v), self.memory.at(p, v))
                assert torch.equal((disk or self.disk).announced(p, v), self.memory.announced(p, v))

    def names(self, kind: str) -> list[str]:
        return sorted(path.stem for path in (self.folder / "versions").glob(f"*.{kind}"))


def same_version(a: Version, b: Version) -> None:
    for x, y in ((a.theta, b.theta), (a.announced, b.announced), (a.buffers, b.buffers)):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert a.outer is not None and b.outer is not None and a.outer.count == b.outer.count
    assert a.outer.momentum is not None and b.outer.momentum is not None and torch.equal(a.outer.momentum, b.outer.momentum)
    assert (a.packet is None) == (b.packet is None)
    assert a.packet is None or b.packet is None or torch.equal(a.packet.codes, b.packet.codes)


@pytest.fixture(params=[False, True], ids=["after", "ahead"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    return Run(tmp_path / "syncer", config(), ahead=request.param)


def test_round_writes_its_inputs_and_a_restart_merges_them_again(run: Run) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
    assert run.names(WHOLE) == [f"{p:04d}-000000000" for p in range(FRAGMENTS)]
    assert run.names(INPUTS) == ["0000-000000001", "0000-000000004", "0001-000000002", "0001-000000005", "0002-000000003",
                                 "0002-000000006"]  # fmt: skip
    run.check()
    run.restart()
    run.check()
    run.round()
    run.check()


def test_kept_version_keeps_the_files_that_it_is_merged_from(run: Run) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
        run.forget_but(1)
    run.background()
    assert len(run.names(INPUTS)) == 2 * FRAGMENTS and len(run.names(WHOLE)) == FRAGMENTS
    assert not missing_files(run.folder, run.memory.kept())
    run.restart()
    run.check()


def test_whole_version_of_the_background_lets_older_files_go(run: Run) -> None:
    """So the files are bounded: at most one whole version and some inputs of each, and what is on its way."""
    for _ in range(6 * WHOLE_EVERY * FRAGMENTS):
        run.round()
        run.forget_but(1)
        run.background()
        run.restart() if run.outer_step % 17 == 0 else run.check()
        assert len(run.names(WHOLE)) <= 2 * FRAGMENTS
        assert len(run.names(INPUTS)) <= 2 * FRAGMENTS * WHOLE_EVERY
    assert all(v > WHOLE_EVERY for versions in run.memory.kept() for v in versions)
    assert "0000-000000000" not in run.names(WHOLE)


def test_files_that_nobody_needs_are_written_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "syncer", config(), ahead=True)
    names: dict[int, set[str]] = {}
    for _ in range(4 * WHOLE_EVERY * FRAGMENTS):
        run.round()
        run.forget_but(1)
        run.background()
        for path in (run.folder / "versions").iterdir():
            names.setdefault(path.stat().st_ino, set()).add(path.name.partition(".")[0])
    assert max(map(len, names.values())) > 2
    run.restart()
    run.check()


def test_slow_merges_are_written_whole_more_often(run: Run) -> None:
    """By a clock on which every merge takes two seconds: every fourth version of a fragment, not every eighth."""
    ticks = iter(range(0, 10**6, 2))
    run.disk.arrears.clock = lambda: float(next(ticks))
    counts = []
    for _ in range(3 * WHOLE_EVERY * FRAGMENTS):
        run.round()
        run.forget_but(1)
        run.background()
        counts.append(len(run.names(INPUTS)))
    assert max(counts) <= FRAGMENTS * (WHOLE_LEAST + 1)  # what has just been written whole goes with the next version
    run.restart()
    run.check()


def test_background_that_never_comes_ends_in_whole_versions(run: Run) -> None:
    for _ in range((durable.LOGGED_MAX + 1) * FRAGMENTS):
        run.round()
        run.forget_but(1)
    assert max(run.names(WHOLE)) == f"{FRAGMENTS - 1:04d}-{run.outer_step:09d}"
    run.restart()
    run.check()


def test_contribution_to_a_version_before_the_whole_one_is_stored_whole(run: Run) -> None:
    """Else the newest version would need ever older files."""
    for _ in range(3 * FRAGMENTS):
        run.round()
    run.disk.put(run.outer_step + 1, {0: run.disk.at(0, 7)})
    run.memory.put(run.outer_step + 1, {0: run.memory.at(0, 7)})
    run.outer_step += FRAGMENTS
    late = run.round(anchors=(7, 4, run.outer_step - FRAGMENTS + 1))
    assert f"0000-{late:09d}" in run.names(WHOLE)
    run.forget_but(1)
    run.background()
    run.restart()
    run.check()


def test_anchors_older_than_the_version_before_are_found_again(run: Run) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
    run.round(anchors=(4, 1, 0))
    run.restart()
    run.check()


def test_rolled_back_versions_are_merged_again_and_stored_whole(run: Run) -> None:
    for _ in range(3 * FRAGMENTS):
        run.round()
    run.roll_back((4, 5, 6))
    run.check()
    run.forget_but(1)
    run.background()
    assert run.names(INPUTS) == [] and len(run.names(WHOLE)) == FRAGMENTS
    run.round()
    run.restart()
    run.check()


def test_snapshot_has_all_that_its_versions_are_merged_from(run: Run, tmp_path: Path) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
        run.forget_but(1)
    run.disk.link_into(tmp_path / "snapshot")
    remerge = remerge_for(run.settings, layout())(0, 1)
    run.check(DurableVersions.open(tmp_path / "snapshot", read_only=True, remerge=remerge))
    with pytest.raises(DataError, match="nothing here can merge it again"):
        DurableVersions.open(tmp_path / "snapshot", read_only=True).theta()


def test_reader_of_theta_merges_it_again_without_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
    monkeypatch.setattr(fused, "WORTHWHILE", NUMEL + 1)
    reader = DurableVersions.open(run.folder, read_only=True, remerge=remerge_for(run.settings, layout())(0, 1))
    assert reader.theta_sha256() == run.memory.theta_sha256()


def test_result_is_stored_where_it_is_smaller_than_its_inputs(tmp_path: Path) -> None:
    run = Run(tmp_path / "syncer", config(codec_up="fp32", codec_down="fp32"))
    run.round()  # three packets of fp32, and Theta and momentum are two
    run.restart()
    run.check()
    assert run.names(INPUTS) == []


def test_merge_by_a_rule_without_kernels_is_stored_whole(tmp_path: Path) -> None:
    run = Run(tmp_path / "syncer", config(merge="trimmed_mean"))
    run.round()
    assert run.names(INPUTS) == []


def test_plain_average_is_merged_again(run: Run) -> None:
    run.round(plain=True)
    run.restart()
    run.check()


@pytest.mark.parametrize("damage", ["byte", "missing"])
def test_damaged_inputs_are_named_and_nothing_is_deleted(run: Run, damage: str) -> None:
    for _ in range(2 * FRAGMENTS):
        run.round()
    victim = run.disk.inputs_path(0, 1)
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.unlink() if damage == "missing" else victim.write_bytes(raw)
    before = run.names("*")
    with pytest.raises(DataError, match=victim.stem):
        run.restart()
    assert run.names("*") == before
    assert bool(missing_files(run.folder, run.memory.kept())) == (damage == "missing")
    if damage == "byte":
        with pytest.raises(DataError, match="checksum of tensor"):
            check_version(victim)


def test_other_bytes_from_the_same_inputs_are_refused(run: Run) -> None:
    """An Atoll that merges otherwise must not go on with a Theta that nobody was sent."""
    run.round()
    other = remerge_for(config(merge="mean", embedding_merge="mean"), layout())(0, 1)
    reader = DurableVersions.open(run.folder, read_only=True, remerge=other)
    with pytest.raises(DataError, match="gives other bytes than this run announced"):
        reader.theta()


def test_background_without_space_costs_nothing_but_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Path:
        raise StorageFailed("no space")

    for _ in range(WHOLE_EVERY * FRAGMENTS):
        run.round()
    assert run.later
    with monkeypatch.context() as patched:
        patched.setattr(durable.state, "stage", full)
        run.background()
    assert "could not be written whole" in caplog.text
    run.round()
    run.restart()
    run.check()


@pytest.mark.parametrize("seed", range(6))
def test_any_history_comes_back_bit_for_bit_after_any_kill(tmp_path: Path, seed: int) -> None:
    """Late anchors, versions kept for rollbacks, rollbacks, background work that comes late or never, and kills."""
    chance = random.Random(seed)
    run = Run(tmp_path / "syncer", config(codec_down=chance.choice(["int8", "bf16", "fp32"])), ahead=chance.random() < 0.5)
    for _ in range(120):
        kept = run.memory.kept()[run.outer_step % FRAGMENTS]
        run.round(anchors=tuple(chance.choice(kept[-3:]) for _ in range(chance.randint(1, 3))), plain=chance.random() < 0.1)
        if chance.random() < 0.7:
            run.forget_but(chance.randint(1, 4))
        if chance.random() < 0.03:
            run.roll_back(tuple(chance.choice(versions) for versions in run.memory.kept()))
        for _ in range(chance.randint(0, 3)):
            if run.later:
                run.later.pop(0)()
        if chance.random() < 0.1:
            run.restart()
            run.check()
    run.restart()
    run.check()


# ---------------------------------------------------------------- inputs written while they are merged


@pytest.fixture
def early(tmp_path: Path) -> Run:
    return Run(tmp_path / "early", config(), ahead=True)


def partial_files(run: Run) -> list[str]:
    """After all that was begun has ended."""
    assert run.disk.ahead is not None
    run.disk.ahead.drop(-1)
    run.disk.ahead.begin(run.folder / "last", 0, 1, 0, _some_inputs())
    run.disk.ahead.take(0, 0)
    return sorted(path.name for path in (run.folder / "versions").glob("*.partial"))


def _some_inputs() -> MergeInputs:
    packet = codec("int4").encode(numbers(0, 1.0))
    return MergeInputs(0, False, (1.0,), (0,), (packet,), (torch.empty(0),))


def test_file_written_ahead_says_the_same_as_one_written_after(early: Run, tmp_path: Path) -> None:
    after = Run(tmp_path / "after", config())
    for _ in range(2 * FRAGMENTS):
        early.round()
        after.round()
    assert early.names(INPUTS) == after.names(INPUTS) and len(early.names(INPUTS)) == 2 * FRAGMENTS
    for t in range(1, 2 * FRAGMENTS + 1):
        paths = [run.disk.inputs_path((t - 1) % FRAGMENTS, t) for run in (early, after)]
        assert check_version(paths[0]) == check_version(paths[1])
        assert paths[0].stat().st_size > paths[1].stat().st_size, "the room for its header shows that it was written ahead"


def test_aborted_round_leaves_no_file_and_its_number_can_be_gathered_again(early: Run) -> None:
    t, p = 1, 0
    packet = codec("int4").encode(numbers(5, 1e-3))
    early.syncer.execute(Accept(t, p, 0, 0), Payload("packet", packet.nbytes, (packet, torch.empty(0))))
    early.syncer.execute(Merge(t, p, (Share(0, 1.0, 0, 4),), 0, False), None)
    early.syncer.execute(AbortRound(t, Reason(Why.MERGE_REJECTED)), None)
    assert partial_files(early) == []
    early.round()
    early.restart()
    early.check()


def test_merge_that_cannot_be_repeated_leaves_no_inputs(tmp_path: Path) -> None:
    run = Run(tmp_path / "syncer", config(merge="trimmed_mean"), ahead=True)
    run.round()
    assert run.names(INPUTS) == [] and partial_files(run) == []
    run.restart()
    run.check()


def test_disk_that_refuses_inputs_during_the_merge_is_asked_again_after_it(
    early: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = durable.state.stage

    def full(path: Path, chunks: Any, *, at: int = 0, **named: Any) -> Path:
        if at:
            raise StorageFailed("no space")
        return real(path, chunks, **named)

    monkeypatch.setattr(durable.state, "stage", full)
    early.round()
    assert "written after it" in caplog.text
    early.restart()
    early.check()


def test_header_without_room_is_written_anew(early: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_ahead.files, "padded_header", lambda header, size: None)
    early.round()
    assert early.names(INPUTS) == ["0000-000000001"] and partial_files(early) == []
    early.restart()
    early.check()


def test_kill_while_inputs_are_written_leaves_nothing_that_counts(early: Run) -> None:
    early.round()
    early.disk.begin(4, 0, _some_inputs())
    assert early.disk.ahead is not None
    written = early.disk.ahead.take(4, 0)
    assert written is not None and written.temporary.exists()
    early.restart()
    assert not written.temporary.exists()
    early.check()
