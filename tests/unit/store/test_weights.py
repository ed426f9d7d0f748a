"""theta.safetensors and model.safetensors as files: whole or not there, and no more private than the umask asks for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.store import weights
from atoll.store.weights import save_weights

TENSORS = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(7)}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_mode_is_the_umasks_whether_or_not_a_file_was_there(tmp_path: Path, umask: int, mode: int) -> None:
    (tmp_path / "old").touch(mode=0o600)
    before = os.umask(umask)
    try:
        for name in ("new", "old"):
            save_weights(tmp_path / name, TENSORS)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")] == [mode, mode]


def test_tensors_and_metadata_come_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    (tmp_path / "x.safetensors.partial").write_bytes(b"of a run that was killed")
    save_weights(path, TENSORS, {"format": "pt"})
    found = load_file(path)
    assert set(found) == set(TENSORS) and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_weights(path, TENSORS)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "tensor_chunks", full)
    with pytest.raises(OSError, match="No space left"):
        save_weights(path, {"a": torch.zeros(1)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "tensor_chunks", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_weights(tmp_path / "x", TENSORS)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as missing:
        save_weights(tmp_path / "nowhere" / "x", TENSORS)
    assert missing.value.filename == str(tmp_path / "nowhere" / "x")
