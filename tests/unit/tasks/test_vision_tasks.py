"""Recipes on images: each is chosen by its model's name, trains in virtual time, and is measured by accuracy too."""

from __future__ import annotations

import json
import tomllib
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.chaos import ChaosPlan
from atoll.cli.app import app
from atoll.config import PRESETS, Config, load, warnings
from atoll.errors import ConfigError, DataError
from atoll.sim.run import Outputs, run_virtual
from atoll.tasks.registry import task_for
from atoll.views.run import Summary, TokenCounts
from atoll.views.tables import comparison_table, run_table

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = {
    "mnist_lenet5": ["data.corpus=digits", "data.batch_size=16", "data.heldout_batches=30"],
    "cifar10_resnet18": [
        "data.corpus=digits", "data.batch_size=8", "data.heldout_batches=8", "model.numbers={width = 4, depth = 1}",
    ],
}  # fmt: skip


def recipe(name: str, *more: str) -> Config:
    return load(RECIPES / f"{name}.toml", assignments=more)


def train(config: Config) -> Outputs:
    return run_virtual(config, ChaosPlan(), None, tensors=True)


@pytest.mark.parametrize("name", SMALL)
def test_matched_recipes_differ_in_the_outer_step_and_in_how_learners_are_weighed(name: str) -> None:
    diloco, fedavg = (recipe(f"{name}_{preset}") for preset in ("diloco", "fedavg"))
    assert (diloco.preset, fedavg.preset) == ("diloco", "fedavg")
    for section in ("learners", "total_steps", "inner", "model", "data", "seed"):
        assert getattr(diloco, section) == getattr(fedavg, section), section
    assert diloco.protocol.local_steps_per_round == fedavg.protocol.local_steps_per_round
    assert (fedavg.outer.outer_optimizer, fedavg.outer.outer_learning_rate) == ("sgd", 1.0)
    assert diloco.outer.outer_optimizer == "nesterov" and diloco.inner.optimizer == "AdamW"


@pytest.mark.parametrize("name", SMALL)
def test_matched_recipes_differ_in_the_preset_alone(name: str) -> None:
    one, other = (tomllib.loads((RECIPES / f"{name}_{preset}.toml").read_text()) for preset in ("diloco", "fedavg"))
    assert (one.pop("preset"), other.pop("preset")) == ("diloco", "fedavg")
    assert one == other


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", SMALL)
def test_matched_recipes_are_for_every_preset_with_its_own_outer_step(name: str, preset: str) -> None:
    settings = load(RECIPES / f"{name}_diloco.toml", preset_name=preset, assignments=SMALL[name])
    assert warnings(settings) == []
    assert len(task_for(settings).layout.fragments) == settings.protocol.fragments
    if preset in ("ddp", "fedavg"):
        assert settings.outer == PRESETS[preset]().outer  # DiLoCo's rate would halve every step of an average


def test_lenet_recipes_on_digits_learn_and_momentum_outside_helps() -> None:
    """The CPU-sized version: several logical learners in this one process."""
    small = [*SMALL["mnist_lenet5"], "total_steps=60", "learners=3"]
    results = [train(recipe(f"mnist_lenet5_{preset}", *small)) for preset in ("diloco", "fedavg")]
    diloco, fedavg = (result.loss_final or 9.0 for result in results)
    assert diloco < fedavg < (results[1].loss_first or 0.0)
    assert all(result.accuracy is not None and result.accuracy > 0.6 for result in results)


@pytest.mark.parametrize("preset", ["diloco", "fedavg"])
def test_resnet_recipes_on_digits_learn(preset: str) -> None:
    done = train(recipe(f"cifar10_resnet18_{preset}", *SMALL["cifar10_resnet18"], "learners=3", "total_steps=20",
                        "protocol.local_steps_per_round=5"))  # fmt: skip
    assert done.loss_final is not None and done.loss_first is not None and done.loss_final < done.loss_first
    assert done.accuracy is not None and 0.0 <= done.accuracy <= 1.0


@pytest.mark.parametrize("preset", ["decoupled", "ddp", "streaming"])
def test_vision_language_recipe_learns_in_every_kind_of_preset(preset: str) -> None:
    more = ["total_steps=9", "data.heldout_batches=8", "data.batch_size=4", "learners=2", "model.numbers.width=32"]
    more += [] if preset == "ddp" else ["protocol.local_steps_per_round=3"]
    more += ["protocol.fragments=6"] if preset == "decoupled" else []
    done = train(load(RECIPES / "digits_vqa.toml", preset_name=preset, assignments=more))
    assert done.loss_final is not None and done.loss_first is not None and done.loss_final < done.loss_first - 0.4
    assert done.accuracy is not None


def test_batches_of_uneven_learners_and_their_counts() -> None:
    for name in ("mnist_lenet5_diloco", "digits_vqa"):
        sized = ["data.corpus=digits"] if name.startswith("mnist") else []
        task = task_for(recipe(name, *sized, "learners=2", "data.samples_by_learner=[2, 5]", "protocol.fragments=1",
                                     "protocol.fragmentation=whole"))  # fmt: skip
        batches = [task.batch(m, 0, 0) for m in (0, 1)]
        assert [task.count(b)[1] for b in batches] == [2, 5]
        assert type(batches[0]) is type(batches[1])
        assert task.count(batches[1])[0] == 5 if sized else task.count(batches[1])[0] > 5
        assert float(task.loss(task.build(), batches[0]).detach()) > 0


@pytest.mark.parametrize(
    ("name", "sets", "says"),
    [
        ("digits_vqa", ["data.corpus=digits"], "needs digits_grid or easy_vqa:DIR"),
        ("digits_vqa", ["data.augment=crop"], "data.augment = 'crop'"),
        ("digits_vqa", ["model.numbers.patch=3"], "patches must divide"),
        ("mnist_lenet5_diloco", ["data.corpus=digits_grid"], "needs digits, mnist:DIR or cifar10:DIR"),
        ("mnist_lenet5_diloco", ["data.corpus=digits", "model.numbers.classes=3"], "follows from the data"),
        ("mnist_lenet5_diloco", ["data.corpus=digits", "model.numbers.depth=3"], "has no number depth"),
        ("cifar10_resnet18_diloco", ["data.corpus=digits", "data.batch_size=1"], "at least 2 images"),
        ("tiny", ["data.corpus=mnist:data"], "holds images; model.name must be lenet5, resnet18, vlm"),
        ("tiny", ["data.augment=crop"], "is for images"),
        ("digits_vqa", ["model.numbers.vocab=256"], r"key model.numbers.vocab = 256: the tokenizer has 257 entries"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str, sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        task_for(recipe(name, *sets))
    assert "\n" not in str(caught.value)


def test_text_may_lie_in_a_file_whose_name_looks_like_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind a colon is a folder for sources of images alone: of a text's name it is letters."""
    monkeypatch.chdir(tmp_path)
    config = recipe("tiny", "data.corpus=foo:~nobody-of-this-name")
    with pytest.raises(DataError, match=r"data.corpus: foo:~nobody-of-this-name does not exist"):
        task_for(config)
    (tmp_path / "foo:~nobody-of-this-name").write_bytes(b"some words of a text\n\n" * 2000)
    assert task_for(config).tokenizer is not None


def test_summary_on_the_command_line_has_accuracy(tmp_path: Path) -> None:
    sets = [*SMALL["mnist_lenet5"], "total_steps=4", "learners=2", "protocol.local_steps_per_round=2"]
    command = ["train", str(RECIPES / "mnist_lenet5_diloco.toml"), "--virtual", "--json", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command + [word for key in sets for word in ("--set", key)])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert 0.0 < told["accuracy"] < 1.0


def test_tables_show_accuracy_only_where_there_is_one() -> None:
    from rich.console import Console

    def told(accuracy: float | None) -> str:
        s = Summary(
            preset="diloco", learners=1, seed=0, total_steps=1, goodput=1.0, uptime=1.0, waited_seconds=0.0, participants={},
            tokens=TokenCounts(0, 0, 0, 0, {}), recoveries=[], bytes_up=0, bytes_down=0, loss_first=2.0, loss_final=1.0,
            theta_sha256=None, tape=None, run_dir=None, clock="virtual", seconds=1.0, fragments=1, accuracy=accuracy,
        )  # fmt: skip
        console = Console(record=True, width=200, file=StringIO())
        console.print(run_table(s), comparison_table([s]))
        return console.export_text()

    assert told(0.875).count("87.50%") == 2
    assert "accuracy" not in told(None)
