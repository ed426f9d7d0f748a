"""Which run a path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UserError
from atoll.tape.folder import find_run


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A live run's folder."""
    for name in ("config.toml", "syncer/run.tape", "syncer/config.toml", "learners/0/0.tape", "learners/1/1.tape"):
        (tmp_path / "live" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "live" / name).touch()
    return tmp_path / "live"


@pytest.mark.parametrize("name", ["", "syncer", "syncer/run.tape", "learners/0/0.tape", "learners/1/1.tape"])
def test_live_run_is_found_by_its_folder_its_syncers_and_its_tapes(live: Path, name: str) -> None:
    found = find_run(live / name)
    assert (found.folder, found.home, found.tape) == (live, live / "syncer", live / "syncer" / "run.tape")


def test_relative_names_are_found_too(live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((live, "."), (live / "syncer", "."), (live / "syncer", "run.tape"), (live / "learners" / "0", "0.tape")):
        monkeypatch.chdir(where)
        assert find_run(Path(name)).folder.resolve() == live


@pytest.mark.parametrize("content", ["run.tape", "versions/x", "theta.safetensors", "config.toml", "snapshots/8/manifest.json"])
@pytest.mark.parametrize("name", ["run", "syncer"])
def test_run_with_one_folder_is_that_folder(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name / content).parent.mkdir(parents=True)
    (tmp_path / name / content).touch()
    found = find_run(tmp_path / name)
    assert found.home == tmp_path / name
    assert found.folder == (tmp_path / name)


def test_what_is_no_run_is_refused_as_the_caller_names_it(live: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "notes.txt", live / "learners"):
        with pytest.raises(UserError) as caught:
            find_run(path, "--resume")
        assert str(caught.value).startswith(f"--resume {path}: no run is there; give ")
