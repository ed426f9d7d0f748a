"""A run's token numbers go on meaning what they meant, whatever becomes of its text and its tokenizer's file."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from atoll.chaos import ChaosPlan
from atoll.cli.app import app
from atoll.config import Data, load
from atoll.errors import DataError, UserError
from atoll.runtime.learner.process import task_for_placement
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.places import Placement
from atoll.sim.run import run_virtual
from atoll.store.tokenizer_file import (
    FILE,
    home_of,
    read_tokenizer_file,
    refuse_other_tokenizer,
    tokenizer_of,
    write_tokenizer_file,
)
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task, language_task
from atoll.tasks.trained import export_hf, open_trained
from atoll.workload.data.tokenizer import BpeTokenizer, ByteTokenizer
from atoll.workload.evaluation.export import hf_tokenizer

SMALL = {
    "learners": 2, "total_steps": 6, "model": {"numbers": {"width": 16, "layers": 2, "mlp": 24}},
    "protocol": {"fragments": 4, "local_steps_per_round": 4},
}  # fmt: skip
WORDS = "a lagoon inside a ring of coral keeps still water while the ocean runs past its outer side all day long "


def text(path: Path, word: str) -> Path:
    path.write_text("\n".join(json.dumps({"text": f"{n} {word} {WORDS * 3}{n * n}"}) for n in range(300)), encoding="utf8")
    return path


def settings(corpus: Path, tokenizer: str) -> dict[str, object]:
    data = {"corpus": str(corpus), "tokenizer": tokenizer, "vocab": 300, "seq_len": 16, "batch_size": 2, "cache": "off",
            "heldout_batches": 2}  # fmt: skip
    return SMALL | {"data": data}


def trained_on(folder: Path, tokenizer: str) -> Path:
    config = load(preset_name="decoupled", overrides=settings(text(folder / "text.jsonl", "atoll"), tokenizer))
    run_virtual(config, ChaosPlan(), folder / "run", tensors=True)
    return folder / "run"


def test_bpe_of_a_run_is_its_own_after_the_text_has_changed(tmp_path: Path) -> None:
    run = trained_on(tmp_path, "bpe")
    before = open_trained(run).tokenizer
    text(tmp_path / "text.jsonl", "something else entirely, zzz zzz zzz qqq")
    after = open_trained(run).tokenizer
    other = language_task(load(run / "config.toml")).tokenizer
    assert other is not None and other.fingerprint != before.fingerprint, "trained anew it would be another"
    assert after.fingerprint == before.fingerprint
    assert after.encode(b"an atoll of coral") == before.encode(b"an atoll of coral")
    export_hf(open_trained(run), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_bytes()) == hf_tokenizer(before)  # type: ignore[arg-type]


def test_hugging_face_tokenizer_of_a_run_is_its_own_after_the_file_has_changed(tmp_path: Path) -> None:
    parts = hf_tokenizer(ByteTokenizer())
    file = tmp_path / "tokenizer.json"
    file.write_bytes(msgspec.json.encode(parts))
    run = trained_on(tmp_path, str(file))
    before = open_trained(run).tokenizer
    vocab = parts["model"]["vocab"]
    turned = dict(zip(vocab, [*list(vocab.values())[1:], 0], strict=True)) | {"<|endoftext|>": vocab["<|endoftext|>"]}
    file.write_bytes(msgspec.json.encode(parts | {"model": parts["model"] | {"vocab": turned}}))
    assert open_trained(run).tokenizer.fingerprint == before.fingerprint
    file.unlink()
    assert open_trained(run).tokenizer.fingerprint == before.fingerprint
    export_hf(open_trained(run), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_bytes()) == parts


def test_held_out_loss_on_text_that_has_changed_is_refused(tmp_path: Path) -> None:
    run = trained_on(tmp_path, "bytes")
    assert CliRunner().invoke(app, ["eval", str(run), "--tasks", "heldout"]).exit_code == 0
    text(tmp_path / "text.jsonl", "tide")
    done = CliRunner().invoke(app, ["eval", str(run), "--tasks", "heldout"])
    assert isinstance(done.exception, UserError) and "has changed since; leave this task out" in str(done.exception)


def test_damaged_file_is_told(tmp_path: Path) -> None:
    run = trained_on(tmp_path, "bpe")
    kept = json.loads((run / FILE).read_bytes())
    (run / FILE).write_text(json.dumps(kept | {"merges": kept["merges"][1:]}))
    with pytest.raises(DataError, match="is damaged"):
        open_trained(run)
    (run / FILE).write_text("{")
    with pytest.raises(DataError, match=r"text\.json is not what a run keeps of its text"):
        open_trained(run)


def test_run_of_images_keeps_none(tmp_path: Path) -> None:
    overrides = {"learners": 2, "model": {"name": "lenet5"}, "data": {"corpus": "digits"}}
    write_tokenizer_file(tmp_path, task_for(load(preset_name="diloco", overrides=overrides)))
    assert not (tmp_path / FILE).exists()


def placed(task: Task) -> Placement:
    assert task.tokenizer is not None
    return Placement(
        learner=0, incarnation=0, key="", run="r", epoch=0, config=msgspec.to_builtins(task.config),
        data_fingerprint=task.fingerprint, layout=task.layout.fingerprint, tokenizer=task.tokenizer.fingerprint,
    )  # fmt: skip


def test_learner_whose_text_gives_another_bpe_does_not_train(tmp_path: Path) -> None:
    """Its vocabulary is as large and its tensors are the same: nothing else would tell."""
    corpus = text(tmp_path / "text.jsonl", "atoll")
    config = load(preset_name="decoupled", overrides=settings(corpus, "bpe"))
    placement = placed(language_task(config))
    assert task_for_placement(config, placement, ()).tokenizer is not None
    text(corpus, "something else entirely, zzz zzz zzz qqq")
    with pytest.raises(UserError, match="gives another tokenizer here than at the syncer"):
        task_for_placement(config, placement, ())


def test_run_does_not_go_on_under_another_tokenizer(tmp_path: Path) -> None:
    task = language_task(load(preset_name="decoupled", overrides=settings(text(tmp_path / "t.jsonl", "atoll"), "bpe")))
    other = replace(task, tokenizer=ByteTokenizer())
    home = home_of(tmp_path / "run" / "syncer" / "snapshots" / "20")
    home.mkdir(parents=True)
    (tmp_path / "run" / FILE).write_text('{"text": "of the user, in a folder above"}', encoding="utf8")
    refuse_other_tokenizer(home, other)  # a run of a time before this was kept
    write_tokenizer_file(home, task)
    refuse_other_tokenizer(home, task)
    refuse_other_tokenizer(home, replace(task, tokenizer=None))
    with pytest.raises(UserError, match="was trained under another tokenizer than data"):
        refuse_other_tokenizer(home, other)


KILLED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A syncer that is killed closes no file."""


@KILLED
def test_syncer_that_comes_back_takes_no_other_tokenizer(tmp_path: Path) -> None:
    """Learners that are still there would train on under the old one, and newcomers under the new."""
    corpus = text(tmp_path / "text.jsonl", "atoll")
    config = load(preset_name="decoupled", overrides=settings(corpus, "bpe"))
    SyncerDirectory(tmp_path / "syncer", config, language_task(config)).close(complete=False)
    SyncerDirectory(tmp_path / "syncer", config, language_task(config)).close(complete=False)
    text(corpus, "something else entirely, zzz zzz zzz qqq")
    with pytest.raises(UserError, match="was trained under another tokenizer than data"):
        SyncerDirectory(tmp_path / "syncer", config, language_task(config))
    gc.collect()


@KILLED
def test_syncer_that_comes_back_to_other_text_warns_and_keeps_its_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = text(tmp_path / "text.jsonl", "atoll")
    config = load(preset_name="decoupled", overrides=settings(corpus, "bytes"))
    home = SyncerDirectory(tmp_path / "syncer", config, language_task(config))
    began = home.data_fingerprint
    home.close(complete=False)
    text(corpus, "tide")
    again = SyncerDirectory(tmp_path / "syncer", config, language_task(config))
    again.close(complete=False)
    assert again.data_fingerprint == began
    assert "the text has changed since the run began" in caplog.text
    del home, again
    gc.collect()


def test_bpe_without_any_merge_is_no_byte_tokenizer(tmp_path: Path) -> None:
    overrides = settings(text(tmp_path / "text.jsonl", "atoll"), "bpe")
    config = load(preset_name="decoupled", overrides=overrides, assignments=["data.vocab=257"])
    run_virtual(config, ChaosPlan(), tmp_path / "run", tensors=True)
    assert isinstance(open_trained(tmp_path / "run").tokenizer, BpeTokenizer)


KEPT = (
    b'{"kind":"bpe","tokenizer":"8ae6fceb54cacc9b02f9de6c98d8b1d5feff848edaa5a22f7a196c1a5ed42302","data":"d",'
    b'"merges":[[104,101],[116,257],[32,258],[32,101],[110,100],[260,261],[32,195]],"hugging_face":""}'
)
"""As Atoll wrote it when it trained a BPE with code of its own."""


def test_tokenizer_kept_by_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(KEPT)
    found = read_tokenizer_file(tmp_path)
    assert found is not None
    tokenizer = tokenizer_of(*found, Data())
    assert tokenizer.encode(b"the end") == [258, 262]
    assert tokenizer.decode([258, 262]) == b"the end"


def test_merges_that_were_tampered_with_name_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(KEPT.replace(b"116,257", b"116,999"))
    found = read_tokenizer_file(tmp_path)
    assert found is not None
    with pytest.raises(DataError, match=r"text\.json is damaged: a BPE cannot merge 116 and 999"):
        tokenizer_of(*found, Data())
