"""The lock of a directory: whether it is held is seen without taking it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UserError
from atoll.store import lock
from atoll.store.lock import is_held, lock_directory


def test_lock_is_seen_while_it_is_held_and_not_after(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with lock_directory(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(UserError, match="another syncer"), lock_directory(tmp_path):
            pass
    assert (tmp_path / "lock").exists() and not is_held(tmp_path)


def test_without_a_table_of_locks_the_number_in_the_file_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def without_table(self: Path, *words: str, **named: str) -> str:
        if str(self) == "/proc/locks":
            raise FileNotFoundError(self)
        return read(self, *words, **named)

    monkeypatch.setattr(lock.Path, "read_text", without_table)
    with lock_directory(tmp_path):
        assert is_held(tmp_path)
    for number in ("", "-1", "0", "999999999", "x"):
        (tmp_path / "lock").write_text(number)
        assert not is_held(tmp_path)
