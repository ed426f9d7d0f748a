"""The durable disk: what was put is there, bit for bit, after any crash; what is damaged is named."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from atoll.codecs import Packet, codec
from atoll.errors import DataError, UserError
from atoll.store.durable import PACKETS_MAX, DurableVersions
from atoll.store.lock import lock_directory, refuse_locked
from atoll.store.spare_files import SpareFiles
from atoll.store.tensor_files import StorageFailed, free_bytes
from atoll.store.version_file import check_version, version_sha256
from atoll.store.versions import DIGEST_BLOCK, Version, checksum, digest_part
from atoll.tensors.outer import OuterState

NUMEL = 600
INNER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3)}},
    "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
}


def version(seed: int, *, lossy: bool = True, inner: bool = False) -> Version:
    chance = torch.Generator().manual_seed(seed)
    theta = torch.randn(NUMEL, generator=chance)
    outer = None if inner else OuterState(torch.randn(NUMEL, generator=chance), None, seed)
    if not lossy:
        return Version(theta, torch.randn(2, generator=chance), outer, INNER if inner else None, theta, None)
    packet = codec("int4").encode(torch.randn(NUMEL, generator=chance))
    announced = torch.randn(NUMEL, generator=chance)
    return Version(theta, torch.empty(0), outer, INNER if inner else None, announced, packet)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(equal, a, b))
    if isinstance(a, Version | OuterState | Packet):
        return type(a) is type(b) and all(equal(getattr(a, n), getattr(b, n)) for n in a.__slots__)
    return bool(a == b)


@pytest.fixture
def disk(tmp_path: Path) -> DurableVersions:
    return DurableVersions.create(tmp_path / "syncer", [version(0), version(1)])


def names(disk: DurableVersions) -> list[str]:
    return sorted(path.name for path in (disk.directory / "versions").iterdir())


@pytest.mark.parametrize("lossy", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_versions_come_back_bit_for_bit_from_memory_and_from_a_new_process(tmp_path: Path, lossy: bool, inner: bool) -> None:
    first, second = version(0, lossy=lossy, inner=inner), version(7, lossy=lossy, inner=inner)
    disk = DurableVersions.create(tmp_path, [first])
    disk.put(7, {0: second})
    for each in (disk, DurableVersions.open(tmp_path)):
        assert each.kept() == [[0, 7]] and each.has(0, 7) and not each.has(0, 3)
        assert equal(each.at(0, 0), first) and equal(each.at(0, 7), second)
        assert (each.at(0, 7).announced is each.at(0, 7).theta) is not lossy
        assert equal(each.announced(0, 0), first.announced) and equal(each.packet(0, 0), first.packet)
        assert equal(each.newest(), [replace(second, packet=None)])
        assert equal(each.theta(), ([second.theta], [second.buffers]))
        assert each.theta_sha256() == disk.theta_sha256()
    with pytest.raises(DataError, match="000000003"):
        disk.at(0, 3)


def test_sgd_without_momentum_and_delayed_nesterov_keep_what_they_have(tmp_path: Path) -> None:
    a = replace(version(0), outer=OuterState(None, None, 5))
    b = replace(version(1), outer=OuterState(torch.zeros(NUMEL), torch.ones(NUMEL), 6, torch.full((NUMEL,), 2.0)))
    DurableVersions.create(tmp_path, [a, b])
    disk = DurableVersions.open(tmp_path)
    assert equal([disk.at(0, 0), disk.at(1, 0)], [a, b])


def test_announced_that_is_theta_is_not_written_twice_and_the_library_reads_the_file(tmp_path: Path) -> None:
    disk = DurableVersions.create(tmp_path, [version(0, lossy=False)])
    with safe_open(str(disk.path(0, 0)), "pt") as file:
        assert sorted(file.keys()) == ["buffers", "outer.momentum", "theta"]
        assert torch.equal(file.get_tensor("theta"), version(0, lossy=False).theta)


def test_memory_holds_the_last_packets_and_no_older_theta(disk: DurableVersions) -> None:
    new = version(5)
    assert new.packet is not None
    packet, old = weakref.ref(new.packet.codes), weakref.ref(disk.newest()[0].theta)
    disk.put(1, {0: new})
    del new
    disk.put(2, {1: version(6)})
    gc.collect()
    assert packet() is not None and old() is None
    for t in range(3, 3 + PACKETS_MAX):
        disk.put(t, {1: version(t)})
    gc.collect()
    assert packet() is None
    assert disk.at(0, 1).packet is not None


def test_a_few_older_announcements_are_remembered(tmp_path: Path) -> None:
    disk = DurableVersions.create(tmp_path, [version(p) for p in range(6)])
    disk.put(1, {0: version(10)})
    assert disk.announced(0, 0) is disk.announced(0, 0)
    disk.put(2, {1: version(11)})
    disk.announced(1, 0)
    assert disk.announced(0, 0) is not version(0).announced and torch.equal(disk.announced(0, 0), version(0).announced)
    assert len(disk._older) == 1


def test_same_put_again_is_fine_and_another_under_its_name_is_not(disk: DurableVersions) -> None:
    disk.put(3, {0: version(3), 1: version(4)})
    before = disk.path(0, 3).stat().st_ino
    disk.put(3, {0: version(3), 1: version(4)})
    assert disk.path(0, 3).stat().st_ino == before
    with pytest.raises(DataError, match=r"0000-000000003\.safetensors holds another version 3"):
        disk.put(3, {0: version(9)})
    assert equal(disk.at(0, 3), version(3))


def test_create_may_be_repeated_but_not_on_top_of_a_run(disk: DurableVersions) -> None:
    disk.path(1, 0).unlink()
    DurableVersions.create(disk.directory, [version(0), version(1)])
    disk.put(1, {0: version(5)})
    with pytest.raises(UserError, match="versions already"):
        DurableVersions.create(disk.directory, [version(0), version(1)])


def test_forgotten_versions_are_gone(disk: DurableVersions) -> None:
    disk.put(1, {0: version(5)})
    disk.forget(0, 0)
    disk.forget(0, 0)
    assert disk.kept() == [[1], [0]] and names(disk) == ["0000-000000001.safetensors", "0001-000000000.safetensors"]


# ---------------------------------------------------------------- crashes and damage


def test_retain_clears_orphans_and_temporary_files_and_nothing_of_the_users(disk: DurableVersions) -> None:
    disk.put(1, {0: version(5)})
    disk.put(2, {0: version(6), 1: version(7)})
    folder = disk.directory / "versions"
    (folder / "0001-000000003.safetensors.partial").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    again = DurableVersions.open(disk.directory)
    again.retain([[0, 1], [0]])
    assert names(again) == [
        "0000-000000000.safetensors", "0000-000000001.safetensors", "0001-000000000.safetensors", "notes.txt",
    ]  # fmt: skip
    assert again.kept() == [[0, 1], [0]] and equal(again.newest()[1], replace(version(1), packet=None))
    again.put(2, {0: version(8)})  # gathered anew, with other participants
    assert equal(again.at(0, 2), version(8))


def test_retain_with_a_listed_file_missing_or_damaged_deletes_nothing(disk: DurableVersions) -> None:
    disk.put(1, {0: version(5)})
    before = names(disk)
    missing = r"0000-000000002\.safetensors is missing"
    for kept, why in (([[0, 2], [0]], missing), ([[0]], "2 fragments"), ([[0], []], "2 fragments")):
        with pytest.raises(DataError, match=why):
            DurableVersions.open(disk.directory).retain(kept)
    data = bytearray(disk.path(0, 1).read_bytes())
    data[-3] ^= 1
    disk.path(0, 1).write_bytes(data)
    with pytest.raises(DataError, match=r"0000-000000001\.safetensors is damaged"):
        DurableVersions.open(disk.directory).retain([[0, 1], [0]])
    assert names(disk) == before


def hurt(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "truncated", data[:-1]
    yield "header only", data[:200]
    yield "oversized", data + b"\0"
    yield "foreign", b"PK\x03\x04" + data
    for at in range(8, len(data), 97):
        yield f"bit {at}", data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_damaged_truncated_or_foreign_file_is_named(disk: DurableVersions) -> None:
    path = disk.path(0, 0)
    whole = path.read_bytes()
    assert check_version(path) == version_sha256(path)
    for what, data in hurt(whole):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"0000-000000000\.safetensors"):
            check_version(path)
            pytest.fail(f"not seen: {what}")
        with pytest.raises(DataError, match=r"0000-000000000\.safetensors"):
            DurableVersions.open(disk.directory).at(0, 0)
    path.write_bytes(disk.path(1, 0).read_bytes())
    with pytest.raises(DataError, match="its name is another file's"):
        DurableVersions.open(disk.directory)
    path.unlink()
    with pytest.raises(DataError, match="no version of fragment 0"):
        DurableVersions.open(disk.directory)
    with pytest.raises(DataError, match="no versions"):
        DurableVersions.open(disk.directory / "elsewhere")


class Failing:
    """A function whose call of that number fails."""

    def __init__(self, function: Callable[..., Any], at: int) -> None:
        self.function, self.at, self.calls = function, at, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(28, "No space left on device")
        return self.function(*args)


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace"])
def test_full_disk_at_the_nth_operation_leaves_the_state_before_and_a_retry_works(
    disk: DurableVersions, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The n-th operation fails for every n until none does."""
    before, sha256, fails = names(disk), disk.theta_sha256(), 0
    for n in range(1, 40):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Failing(getattr(os, name), n))
            try:
                disk.put(4, {0: version(4), 1: version(5)})
                break
            except StorageFailed as error:
                fails += 1
                assert "bytes were needed" in str(error) and "are free: No space left on device" in str(error)
        assert names(disk) == before and disk.theta_sha256() == sha256 and disk.kept() == [[0], [0]]
        assert DurableVersions.open(disk.directory).theta_sha256() == sha256
    assert fails == {"open": 3, "write": fails, "fsync": 3, "replace": 2}[name] and fails > 1
    assert equal(DurableVersions.open(disk.directory).at(1, 4), version(5))


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "ftruncate"])
def test_disk_that_fails_while_old_files_are_written_over_stores_all_or_nothing(
    disk: DurableVersions, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The n-th operation fails for every n until none does. Where it was one for an old file, a new file does as well."""
    size, outcomes = disk.path(0, 0).stat().st_size, set[bool]()
    disk.spare = SpareFiles(worthwhile_bytes=1)
    for n in range(1, 40):
        for old in ("a", "b"):
            path = disk.directory / "versions" / f"{old}{n}"
            path.write_bytes(b"o" * size)
            assert disk.spare.keep(path)
        kept, sha256 = disk.kept(), disk.theta_sha256()
        broken = Failing(getattr(os, name), n)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, broken)
            try:
                disk.put(n, {0: version(4 + n), 1: version(5 + n)})
                outcomes.add(True)
            except StorageFailed:
                outcomes.add(False)
                assert not list((disk.directory / "versions").glob("*.partial")), "a full disk needs their room"
                assert disk.kept() == kept and disk.theta_sha256() == sha256
        again = DurableVersions.open(disk.directory)
        assert again.theta_sha256() == disk.theta_sha256() and again.kept() == disk.kept()
        if broken.calls < n:
            break
        disk.spare.close()
    assert n > 2 and outcomes == {True, False}
    assert equal(DurableVersions.open(disk.directory).at(1, n), version(5 + n))
    disk.close()
    assert not list((disk.directory / "versions").glob("*.partial"))


def test_directory_is_synced_once_a_put_and_after_the_files(disk: DurableVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def watched(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    disk.put(1, {1: version(5), 0: version(4)})
    assert synced == ["0000-000000001.safetensors.partial", "0001-000000001.safetensors.partial", "versions"]


def test_killed_between_renames_the_run_goes_on_from_what_the_tape_knows(
    disk: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    def half(source: Path, target: Path, real: Callable[..., Any] = os.replace) -> None:
        real(source, target)
        monkeypatch.setattr(os, "replace", die)

    monkeypatch.setattr(os, "replace", half)
    with pytest.raises(Killed):
        disk.put(1, {0: version(4), 1: version(5)})
    monkeypatch.undo()
    again = DurableVersions.open(disk.directory)
    again.retain([[0], [0]])
    assert again.kept() == [[0], [0]] and len(names(again)) == 2
    again.put(1, {0: version(6), 1: version(7)})


# ---------------------------------------------------------------- the lock


def test_second_syncer_is_refused_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    refusal = pytest.raises(UserError, match=rf"another syncer \(pid {os.getpid()}\) uses it")
    with lock_directory(tmp_path), refusal, lock_directory(tmp_path):
        pytest.fail("two syncers")
    with lock_directory(tmp_path), pytest.raises(UserError, match=r"uses it; stop that one"):
        refuse_locked(tmp_path)
    refuse_locked(tmp_path)
    refuse_locked(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    holder = "import fcntl, os, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", holder, str(tmp_path / "lock")], check=False).returncode == 9
    with lock_directory(tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_free_bytes_of_a_place_and_of_nowhere(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0 and free_bytes(tmp_path / "nowhere") == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_checksum_in_several_threads_is_the_same(threads: int) -> None:
    vector = torch.randn(5 * DIGEST_BLOCK + 77, generator=torch.Generator().manual_seed(1))
    calls: list[tuple[int, int]] = []

    def spread(work: Callable[[int, int], None], count: int) -> None:
        cuts = [count * k // threads for k in range(threads + 1)]
        for left, right in reversed(list(pairwise(cuts))):  # in any order
            calls.append((left, right))
            work(left, right)

    assert checksum([vector], spread=spread) == checksum([vector])
    assert digest_part(vector[: 3 * DIGEST_BLOCK + 5], 0, vector.numel(), spread) == digest_part(
        vector[: 3 * DIGEST_BLOCK + 5], 0, vector.numel()
    )
    assert len(calls) == 2 * threads
