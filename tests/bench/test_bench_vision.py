"""`bench/quality/vision.py`: what it runs, keeps and prints; its committed lines are of the rows as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.config import load

ROOT = Path(__file__).parents[2]
TINY = ("learners=2", "total_steps=2", "data.batch_size=4", "data.heldout_batches=2")


@pytest.fixture(scope="module")
def task(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/vision")


@pytest.fixture(scope="module")
def committed(task: Any) -> dict[str, dict[str, Any]]:
    lines = task.read(ROOT / "bench" / "quality" / "results" / "vision.jsonl")
    found = {line["name"]: line for line in lines}
    assert len(found) == len(lines), "a run is there once"
    return found


@pytest.fixture
def tiny(task: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two rows, one of them on files."""
    rounds = ("protocol.local_steps_per_round=1",)
    monkeypatch.setattr(task, "TRIES", ())
    monkeypatch.setattr(task, "SWEPT", "digits")
    monkeypatch.setattr(task, "ROWS", {
        "files": task.Row("on files", task.LENET, TINY, rounds),
        "digits": task.Row("on digits", task.LENET, (*task.DIGITS, *TINY), rounds, ((0.7, 0.9), (1.0, 0.5))),
    })  # fmt: skip
    return task


def write_mnist(folder: Path) -> None:
    folder.mkdir()
    for side, count in (("train", 20), ("t10k", 8)):
        pixels = torch.arange(count * 64, dtype=torch.uint8).reshape(count, 8, 8)
        for name, values in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", torch.arange(count, dtype=torch.uint8) % 10)):
            lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
            header = bytes((0, 0, 8, values.ndim)) + lengths
            (folder / f"{side}-{name}").write_bytes(header + values.numpy().tobytes())


def test_runs_of_a_row_share_data_model_and_steps_and_the_pair_its_rounds_too(task: Any) -> None:
    for key, row in task.ROWS.items():
        fedavg, *diloco, ddp = (task.settings(run) for run in task.of_row(key, row.outers))
        for other in (*diloco, ddp):
            for section in ("seed", "learners", "total_steps", "model", "data", "inner"):
                assert getattr(fedavg, section) == getattr(other, section), (key, section)
        for each in diloco:
            assert each.protocol.local_steps_per_round == fedavg.protocol.local_steps_per_round > 1, key
        assert ddp.protocol.local_steps_per_round == 1, key
        assert [(each.outer.outer_learning_rate, each.outer.outer_momentum) for each in diloco] == list(row.outers)
        assert (fedavg.outer.outer_optimizer, fedavg.outer.outer_learning_rate) == ("sgd", 1.0)


def test_row_that_says_so_is_the_recipes_as_they_are(task: Any) -> None:
    for run in task.of_row("lenet_mnist", task.ROWS["lenet_mnist"].outers):
        assert task.settings(run) == load(ROOT / "recipes" / "mnist_lenet5_diloco.toml", preset_name=run.preset)


def test_committed_lines_are_of_the_rows_as_they_are(task: Any, committed: dict[str, dict[str, Any]]) -> None:
    runs = task.runs()
    assert set(committed) == set(runs)
    for name, line in committed.items():
        assert line["differs"] == json.loads(json.dumps(task.differences(task.settings(runs[name])))), name
        assert (line["tape"], line["run_dir"], line["clock"]) == (None, None, "virtual")


def test_docs_have_the_tables_of_the_committed_lines(task: Any, committed: dict[str, dict[str, Any]]) -> None:
    text = (ROOT / "docs" / "research" / "vision.md").read_text(encoding="utf8")
    assert task.comparison(committed) in text
    assert task.sweep(committed) in text


def test_missing_runs_are_made_once_and_those_on_files_only_with_a_folder(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["--out", str(out), "--only", "digits_fedavg,digits_diloco_0.7*,files_d*"]
    tiny.main(words)
    assert [line["name"] for line in tiny.read(out)] == ["digits_fedavg", "digits_diloco_0.7_0.9"]
    told = capsys.readouterr()
    assert "files_ddp: left out, it needs --data" in told.err and "| on files | - | - | - | - |" in told.out
    write_mnist(tmp_path / "mnist")
    tiny.main([*words, "--data", str(tmp_path)])
    lines = tiny.read(out)
    assert [line["name"] for line in lines[2:]] == ["files_diloco_1.0_0.5", "files_ddp"]
    assert {line["differs"]["data.corpus"] for line in lines} == {"digits", "mnist:data/mnist"}
    assert str(tmp_path) not in out.read_text(encoding="utf8"), "where the files lay is nobody's business"
    assert all(line["total_steps"] == 2 and 0.0 <= line["accuracy"] <= 1.0 and line["parameters"] for line in lines)
    capsys.readouterr()
    tiny.main([*words, "--show"])
    assert tiny.read(out) == lines
    assert capsys.readouterr().out.startswith("| run | FedAvg | DiLoCo | data-parallel | seconds a run |")


def test_runs_are_named_and_picked_by_name(task: Any, capsys: pytest.CaptureFixture[str]) -> None:
    task.main(["--list", "--only", "resnet_cifar10_*"])
    assert capsys.readouterr().out.split() == [
        "resnet_cifar10_fedavg", "resnet_cifar10_diloco_0.7_0.9", "resnet_cifar10_diloco_1.0_0.5", "resnet_cifar10_ddp",
    ]  # fmt: skip
    needs = [task.needs_files(task.settings(run)) for run in task.runs().values()]
    assert needs == sorted(needs) and set(needs) == {False, True}
    with pytest.raises(SystemExit):
        task.main(["--only", "nothing"])


def test_tables_show_loss_accuracy_and_which_outer_settings(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ROWS", {task.SWEPT: task.Row("this", "r", outers=((0.7, 0.9), (1.0, 0.5)))})
    lines = {
        task.Run(task.SWEPT, preset, outer).name: {"loss_final": loss, "accuracy": right, "wall_seconds": took}
        for preset, outer, loss, right, took in (
            ("fedavg", None, 0.1299, 0.9, 10.4), ("diloco", (1.0, 0.5), 0.25, 0.5, 1000.6), ("diloco", (0.7, 0.3), 2.0, 0.1, 9.0),
        )
    }  # fmt: skip
    assert task.comparison(lines).splitlines()[2:] == [
        "| this | 0.130, 90.0% | - (0.7 / 0.9); 0.250, 50.0% (1.0 / 0.5) | - | 10 to 1,001 |"
    ]
    assert task.sweep(lines).splitlines() == [
        "| outer rate | momentum 0.3 | momentum 0.5 | momentum 0.9 |",
        "| --- | --- | --- | --- |",
        "| 0.7 | 2.000, 10.0% | - | - |",
        "| 1.0 | - | 0.250, 50.0% | - |",
    ]
