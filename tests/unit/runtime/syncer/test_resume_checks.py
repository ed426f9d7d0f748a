"""A syncer's folder that begins with another run's snapshot: what does not fit it is refused, what is odd is said."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.config import Config, changed, load
from atoll.errors import UserError
from atoll.protocol.vocabulary import SyncerState
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.snapshots import SyncerSnapshots
from atoll.store.snapshots import snapshot_dir
from atoll.tasks.task import language_task

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a syncer that stops closes no file
WORDS = "a lagoon inside a ring of coral keeps still water while the ocean runs past its outer side all day long "


def text(path: Path, word: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{n} {word} {WORDS}\n\n" for n in range(300)), encoding="utf8")
    return path


class Stopped:
    """A run whose syncer left a snapshot of outer step 4."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = text(folder / "here" / "text.txt", "atoll")
        self.config = load(preset_name="decoupled", overrides={
            "learners": 2, "total_steps": 6, "model": {"numbers": {"width": 16, "layers": 2, "mlp": 24}},
            "protocol": {"fragments": 4, "local_steps_per_round": 4},
            "data": {"corpus": str(self.corpus), "seq_len": 16, "batch_size": 2, "cache": "off", "heldout_batches": 2},
        })  # fmt: skip
        home = SyncerDirectory(folder / "syncer", self.config, language_task(self.config))
        snapshots = SyncerSnapshots(home.directory, home.disk, home.run, self.config)
        snapshots.begin(4, SyncerState(4, ((0,),) * 4, ((0, 1), (1, 1)), (), ()))
        snapshots.seal(4, (), complete=True)
        home.close(complete=False)

    def go_on(self, *changes: str) -> Config:
        config = changed(self.config, changes)
        part = snapshot_dir(self.folder / "syncer", 4)
        SyncerDirectory(self.folder / "again", config, language_task(config), resume=part).close(complete=False)
        return config


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Stopped]:
    yield Stopped(tmp_path)
    gc.collect()


def test_moved_text_is_the_same_text(stopped: Stopped, caplog: pytest.LogCaptureFixture) -> None:
    (stopped.folder / "there").mkdir()
    moved = stopped.corpus.rename(stopped.folder / "there" / "text.txt")
    stopped.go_on(f"data.corpus={moved}", "total_steps=9", "protocol.codec_up=int8")
    assert not caplog.records


def test_other_text_is_refused(stopped: Stopped) -> None:
    other = text(stopped.folder / "there" / "text.txt", "tide")
    with pytest.raises(UserError, match=rf"^key data.corpus = '{other}': the resumed run had '{stopped.corpus}', and"):
        stopped.go_on(f"data.corpus={other}")


def test_text_that_changed_under_its_name_is_told(stopped: Stopped, caplog: pytest.LogCaptureFixture) -> None:
    """As for a syncer that comes back to its own folder."""
    text(stopped.corpus, "tide")
    stopped.go_on()
    assert "the data differs from that of the resumed run" in caplog.text


def test_another_number_of_learners_is_taken_and_told(stopped: Stopped, caplog: pytest.LogCaptureFixture) -> None:
    stopped.go_on("learners=3")
    assert "learners = 3: the resumed run had 2, and its data is divided again among 3" in caplog.text


def test_syncer_takes_no_snapshot_of_other_batches(stopped: Stopped) -> None:
    with pytest.raises(UserError, match=r"^key data.batch_size = 4: the resumed run had 2, and"):
        stopped.go_on("data.batch_size=4")
    assert not (stopped.folder / "again" / "versions").exists()


def test_snapshot_that_was_carried_off_alone_is_judged_by_what_it_holds(stopped: Stopped) -> None:
    """Its run's tape is not beside it, and whatever else lies there is a stranger's."""
    alone = stopped.folder / "carried" / "off" / "4"
    alone.parent.mkdir(parents=True)
    snapshot_dir(stopped.folder / "syncer", 4).rename(alone)
    (stopped.folder / "carried" / "run.tape").write_text("a stranger's\n")
    other = changed(stopped.config, ["data.batch_size=4"])
    with pytest.raises(UserError, match=r"^key data.batch_size = 4: "):
        SyncerDirectory(stopped.folder / "again", other, language_task(other), resume=alone)
    SyncerDirectory(stopped.folder / "more", stopped.config, language_task(stopped.config), resume=alone).close(complete=False)
