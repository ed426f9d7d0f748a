"""Old files are written over only while nothing else can see them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.store import spare_files
from atoll.store.spare_files import SpareFiles
from atoll.store.tensor_files import stage

SIZE = 1000


@pytest.fixture
def spare() -> SpareFiles:
    return SpareFiles(bytes_max=3 * SIZE, worthwhile_bytes=10)


def file(folder: Path, name: str, size: int = SIZE) -> Path:
    path = folder / name
    path.write_bytes(b"o" * size)
    return path


def written(folder: Path, spare: SpareFiles, size: int = SIZE, at: int = 0) -> tuple[bytes, int]:
    staged = stage(folder / "new", [b"n" * size], at=at, over=spare)
    return staged.read_bytes(), staged.stat().st_ino


def test_file_is_written_over_and_cut_at_its_end(tmp_path: Path, spare: SpareFiles) -> None:
    old = file(tmp_path, "old")
    inode = old.stat().st_ino
    assert spare.keep(old) and not old.exists()
    assert written(tmp_path, spare, SIZE // 2) == (b"n" * (SIZE // 2), inode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.partial"]


def test_room_at_the_start_is_part_of_the_size(tmp_path: Path, spare: SpareFiles) -> None:
    spare.keep(file(tmp_path, "old"))
    content, _ = written(tmp_path, spare, SIZE - 100, at=100)
    assert len(content) == SIZE and content[100:] == b"n" * (SIZE - 100)


@pytest.mark.parametrize("size", [SIZE + 1, SIZE // 2 - 1])
def test_file_of_another_size_stays_where_it_is(tmp_path: Path, spare: SpareFiles, size: int) -> None:
    old = file(tmp_path, "old")
    inode = old.stat().st_ino
    spare.keep(old)
    assert written(tmp_path, spare, size)[1] != inode
    assert (tmp_path / "old.partial").read_bytes() == b"o" * SIZE


def test_smallest_that_fits_is_taken(tmp_path: Path, spare: SpareFiles) -> None:
    for name, size in (("large", 1900), ("small", 1000)):
        assert spare.keep(file(tmp_path, name, size))
    written(tmp_path, spare, 950)
    assert not (tmp_path / "small.partial").exists() and (tmp_path / "large.partial").exists()


def test_file_of_a_snapshot_is_not_kept(tmp_path: Path, spare: SpareFiles) -> None:
    old = file(tmp_path, "old")
    os.link(old, tmp_path / "snapshot")
    assert not spare.keep(old) and old.exists()


def test_file_that_is_linked_later_is_not_written_over(tmp_path: Path, spare: SpareFiles) -> None:
    spare.keep(file(tmp_path, "old"))
    os.link(tmp_path / "old.partial", tmp_path / "snapshot")
    written(tmp_path, spare)
    assert (tmp_path / "snapshot").read_bytes() == b"o" * SIZE


def test_file_that_somebody_reads_is_not_written_over(tmp_path: Path, spare: SpareFiles) -> None:
    old = file(tmp_path, "old")
    with old.open("rb") as reader:
        assert spare.keep(old)
        content, _ = written(tmp_path, spare)
        assert content == b"n" * SIZE
        assert reader.read() == b"o" * SIZE


def test_who_opens_a_file_at_the_moment_of_its_lease_ends_no_process(
    tmp_path: Path, spare: SpareFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells the holder of a lease by SIGIO, whose default is to end the process."""
    told: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, _: told.append(number))
    opens = "import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)"
    real = fcntl.fcntl

    def disturbed(handle: int, command: int, argument: Any = 0) -> Any:
        result = real(handle, command, argument)
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            words = [sys.executable, "-S", "-c", opens, str(tmp_path / "new.partial")]
            assert b"BlockingIOError" in subprocess.run(words, capture_output=True, check=False).stderr
        return result

    monkeypatch.setattr(spare_files.fcntl, "fcntl", disturbed)
    try:
        spare.keep(file(tmp_path, "old"))
        assert written(tmp_path, spare)[0] == b"n" * SIZE
        assert not told
    finally:
        signal.signal(signal.SIGIO, before)


def test_where_there_are_no_leases_nothing_is_kept(tmp_path: Path, spare: SpareFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_files, "HAS_LEASES", False)
    old = file(tmp_path, "old")
    assert not spare.keep(old) and old.exists()


def test_no_more_bytes_are_kept_than_allowed(tmp_path: Path, spare: SpareFiles) -> None:
    assert [spare.keep(file(tmp_path, f"old{n}")) for n in range(4)] == [True, True, True, False]
    spare.close()
    assert [path.name for path in tmp_path.iterdir()] == ["old3"]


def test_old_name_is_gone_from_the_disk_before_a_byte_is_written(
    tmp_path: Path, spare: SpareFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut could leave it there with another version's bytes."""
    spare.keep(file(tmp_path, "old"))

    def refuse(folder: Path) -> None:
        assert (folder / "new.partial").read_bytes() == b"o" * SIZE
        raise OSError("no")

    monkeypatch.setattr(spare_files, "sync_directory", refuse)
    assert written(tmp_path, spare)[0] == b"n" * SIZE
    assert [path.name for path in tmp_path.iterdir()] == ["new.partial"]


def test_file_that_is_gone_is_not_kept(tmp_path: Path, spare: SpareFiles) -> None:
    assert not spare.keep(tmp_path / "none")
