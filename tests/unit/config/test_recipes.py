"""The recipes: all of them load, the language models have the sizes their comments say, and small versions train."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command import atoll

from atoll.chaos import ChaosPlan
from atoll.config import PRESETS, Config, load, warnings
from atoll.config.models import SIZES
from atoll.sim.run import run_virtual
from atoll.workload.data.corpus import stdlib_corpus
from atoll.workload.data.tokenizer import ByteTokenizer
from atoll.workload.evaluation.export import hf_tokenizer
from atoll.workload.models.decoder import build_model

RECIPES = Path(__file__).parents[3] / "recipes"
RUNS = sorted(path for path in RECIPES.glob("*.toml") if "[[faults]]" not in path.read_text(encoding="utf8"))
BOOKS_ENTRIES = 32_768
"""Of the tokenizer that the recipe's comment counts with; the file itself is not in the project."""

SMALL: dict[str, Any] = {
    "learners": 2, "total_steps": 12, "model": {"numbers": {"width": 16, "layers": 2, "heads": 2, "mlp": 24}},
    "protocol": {"fragments": 4, "local_steps_per_round": 4}, "inner": {"learning_rate": 0.01},
}  # fmt: skip
SMALL_DATA = {"seq_len": 32, "batch_size": 4, "heldout_batches": 2, "cache": "off"}


def parameters(config: Config, vocab: int) -> int:
    numbers = {"vocab": vocab, "context": config.data.seq_len} | config.model.numbers
    return sum(p.numel() for p in build_model("decoder", numbers, seed=0).parameters())


def assert_learns(config: Config, directory: Path) -> None:
    done = run_virtual(config, ChaosPlan(), directory, tensors=True)
    assert done.loss_first is not None and done.loss_final is not None
    assert done.loss_final < done.loss_first - 0.05


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_recipe_loads_without_a_warning_and_begins_by_saying_what_it_is(path: Path) -> None:
    assert warnings(load(path)) == []
    assert path.read_text(encoding="utf8").startswith("# ")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["tiny", "stdlib_10m", "books_35m"])
def test_language_recipes_are_for_every_preset_to_be_compared_on(name: str, preset: str) -> None:
    assert load(RECIPES / f"{name}.toml", preset_name=preset).preset == preset


def test_stdlib_10m_has_ten_million_parameters_and_needs_no_file() -> None:
    config = load(RECIPES / "stdlib_10m.toml")
    assert parameters(config, config.data.vocab) == pytest.approx(10e6, rel=0.01)
    assert (config.preset, config.learners, config.data.corpus, config.data.tokenizer) == ("decoupled", 4, "stdlib", "bpe")


def test_stdlib_10m_made_small_learns(tmp_path: Path) -> None:
    data = SMALL_DATA | {"vocab": 300, "max_bytes": 200_000}
    assert_learns(load(RECIPES / "stdlib_10m.toml", overrides=SMALL | {"data": data}), tmp_path / "run")


def test_books_35m_is_the_published_size_and_two_hundred_million_tokens() -> None:
    config = load(RECIPES / "books_35m.toml")
    assert config.model.numbers == SIZES["35M"]
    assert parameters(config, BOOKS_ENTRIES) == pytest.approx(35.7e6, rel=0.01)
    step = config.learners * config.data.batch_size * config.data.seq_len
    assert (config.learners, step) == (8, 65_536)
    assert config.total_steps * step == pytest.approx(200e6, rel=0.001)


MAIN = RECIPES.parent / "bench" / "quality" / "results" / "main_200M.jsonl"
NOT_OF_THE_TRAINING = ("data.", "cluster.parameters")
"""Files and how often they are looked at; and the size where no tensor says it."""


@pytest.mark.parametrize(
    ("name", "preset", "more"),
    [
        ("decoupled_m8", "decoupled", []),
        ("decoupled_ramp_m8", "decoupled_ramp", []),
        ("diloco_m8_h30", "diloco", []),
        ("async_diloco_m8_h30", "async_diloco", []),
        ("streaming_m8_h30", "streaming", []),
        ("decoupled_m2", "decoupled", ["learners=2", "outer.outer_learning_rate=0.7"]),
    ],
)
def test_books_35m_is_what_the_main_table_was_made_with(name: str, preset: str, more: list[str]) -> None:
    lines = [json.loads(line) for line in MAIN.read_text(encoding="utf8").splitlines()]
    (ran,) = (line["config"] for line in lines if line["name"] == name and line["seed"] == 0)
    has = json.loads(msgspec.json.encode(load(RECIPES / "books_35m.toml", preset_name=preset, assignments=more)))
    differing = {
        f"{section}.{key}": value
        for section in has
        if isinstance(has[section], dict)
        for key, value in has[section].items()
        if value != ran[section].get(key, value) and not f"{section}.{key}".startswith(NOT_OF_THE_TRAINING)
    }
    unused = {"outer.outer_momentum"} if preset == "async_diloco" else set()  # SGD has none
    assert differing.keys() <= unused
    assert all(has[key] == ran[key] for key in ("preset", "learners", "seed", "total_steps"))


def test_books_35m_made_small_learns_from_files_where_it_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    names = ("wiki-train", "gutenberg-train-00", "gutenberg-train-01", "wiki-val", "gutenberg-val")
    for name, document in zip(names, stdlib_corpus(300_000).documents, strict=False):
        line = json.dumps({"text": document.decode()}) + "\n"
        (tmp_path / "data" / f"{name}.jsonl.xz").write_bytes(lzma.compress(line.encode()))
    (tmp_path / "data" / "bpe32k.json.xz").write_bytes(lzma.compress(json.dumps(hf_tokenizer(ByteTokenizer())).encode()))
    monkeypatch.chdir(tmp_path)
    assert_learns(load(RECIPES / "books_35m.toml", overrides=SMALL | {"data": SMALL_DATA}), tmp_path / "run")


def test_books_35m_without_its_data_ends_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "atoll", "train", str(RECIPES / "books_35m.toml"), "--virtual"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("atoll: data.corpus: data/wiki-train.jsonl.xz does not exist: name a file of text, JSON lines")
    assert list(tmp_path.iterdir()) == []
    here = atoll(*words[3:], cwd=tmp_path)
    assert (here.returncode, here.stdout, here.stderr) == (2, done.stdout, done.stderr), "as tests of commands call it"
