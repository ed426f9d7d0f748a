"""Which paths of a syncer's recipe a learner uses: those under the folders that its user allows, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.config import load
from atoll.config.sections import Data
from atoll.errors import DataError, UserError
from atoll.runtime.learner import process
from atoll.runtime.learner.address import Address
from atoll.runtime.learner.process import WorkerOptions, run_worker
from atoll.runtime.syncer.places import Placement
from atoll.workload.data.allowed import allowed_folders, refuse_outside


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a neighbour, a link to it and a link back."""
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "texts").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    (home / "texts" / "a,b.txt").write_text("text")
    (home / "link").symlink_to(other / "deep")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    return home


def allows(folders: list[Path], **data: Any) -> bool:
    try:
        refuse_outside(Data(**data), allowed_folders(folders))
    except DataError as error:
        (key,) = data
        assert str(error).startswith(f"key data.{key} = ") and "--allow-data" in str(error)
        return False
    return True


BUILT_IN = [{}, {"corpus": "digits"}, {"corpus": "digits_grid"}, {"tokenizer": "bpe"}, {"cache": "off"}]


@pytest.mark.parametrize("data", BUILT_IN, ids=str)
def test_built_in_data_needs_no_folder(here: Path, data: dict[str, str]) -> None:
    assert allows([], **data)


@pytest.mark.parametrize("key", ["corpus", "heldout", "tokenizer", "cache"])
@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("texts", True), ("texts/a,b.txt", True), ("texts/*.txt, texts/**/x", True), ("~/texts", True), ("link/x", True),
        ("texts/../texts", True), ("mnist:texts", True), ("{home}/texts", True),
        ("/etc/passwd", False), ("..", False), ("../other", False), ("texts/../../other", False), ("link/../x", False),
        ("texts,/etc/passwd", False), ("texts/*/../../../other", False), ("~root/x", False), ("cifar10:/etc", False),
        ("mnist:../other", False), ("{home}x", False), ("../\0", False),
    ],
)  # fmt: skip
def test_path_is_used_only_below_the_working_directory(here: Path, key: str, path: str, right: bool) -> None:
    assert allows([], **{key: path.format(home=here)}) is right


def test_folders_that_are_named_take_the_place_of_the_working_directory(here: Path) -> None:
    other = here.parent / "other"
    assert allows([other], corpus=str(other / "x")) and allows([other, here], corpus=f"texts,{other}/x")
    assert not allows([other], corpus="texts")
    assert allows([Path("/")], corpus="/etc/passwd")
    with pytest.raises(UserError, match="--allow-data"):
        allowed_folders([here / "missing"])


def test_learner_opens_nothing_that_its_user_does_not_allow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(overrides={"data": {"corpus": "/etc/passwd"}})

    async def placed(*_: object) -> Placement:
        return Placement(
            learner=0, incarnation=0, key="", run="r", epoch=0, config=msgspec.to_builtins(config), data_fingerprint="", layout=""
        )

    def never(*_: object) -> None:
        raise AssertionError("it began to read")

    monkeypatch.setattr(process, "request_place", placed)
    monkeypatch.setattr(process, "task_for_placement", never)
    with pytest.raises(DataError, match="may not use"):
        run_worker(WorkerOptions(Address("127.0.0.1:1", "t")))
    with pytest.raises(AssertionError, match="began"):
        run_worker(WorkerOptions(Address("127.0.0.1:1", "t"), data_folders=[Path("/etc")]))
