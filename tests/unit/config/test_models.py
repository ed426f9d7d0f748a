"""What a recipe says of a model: sizes by name, and what is refused before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.config import changed, from_builtins, load, to_toml
from atoll.config.models import BYTE_VOCAB, IMAGE_SOURCES, NUMBERS, QUESTION_SOURCES, SIZED, SIZES, DecoderShape
from atoll.config.resuming import refuse_changed
from atoll.config.sections import IMAGE_MODELS
from atoll.errors import ConfigError
from atoll.tasks.registry import task_for
from atoll.tasks.vision import VISION_MODELS
from atoll.workload.data.images import SOURCES, load_images
from atoll.workload.data.questions import load_questions
from atoll.workload.models.decoder import MODELS, build_model, rule_of

# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("size", SIZES)
def test_size_stands_for_its_numbers_and_the_recorded_config_holds_them(size: str) -> None:
    config = load(assignments=[f"model.size={size}"])
    assert (config.model.size, config.model.numbers) == ("", SIZES[size])
    assert config == load(overrides={"model": {"numbers": SIZES[size]}})
    DecoderShape(vocab=257, **SIZES[size])  # type: ignore[arg-type]


def test_numbers_win_over_the_size_beside_them_after_them_and_in_any_order_of_set(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text('[model]\nsize = "35M"\nnumbers.layers = 8\n')
    expected = SIZES["35M"] | {"layers": 8}
    assert load(recipe).model.numbers == expected
    assert load(recipe, assignments=["model.numbers.heads=16"]).model.numbers == expected | {"heads": 16}
    for given in (["model.size=35M", "model.numbers.layers=8"], ["model.numbers.layers=8", "model.size=35M"]):
        assert load(assignments=given).model.numbers == expected


def test_size_of_a_later_layer_replaces_the_whole_shape_of_the_earlier(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text('[model]\nsize = "moe_nano"\n')
    assert load(recipe, assignments=["model.size=35M"]).model.numbers == SIZES["35M"]
    recipe.write_text(to_toml(load(recipe)))  # as a run records it: numbers alone
    assert load(recipe, assignments=["model.size=35M"]).model.numbers == SIZES["35M"]
    assert changed(load(recipe), ["model.size=tiny"]).model.numbers == SIZES["tiny"]


def test_recorded_config_is_complete_and_a_run_resumes_under_either_spelling(tmp_path: Path) -> None:
    named, spelt = load(assignments=["model.size=tiny"]), load(overrides={"model": {"numbers": SIZES["tiny"]}})
    (tmp_path / "config.toml").write_text(to_toml(named))
    assert load(tmp_path / "config.toml") == named == from_builtins(msgspec.to_builtins(named)) == spelt
    refuse_changed(msgspec.to_builtins(named), spelt)
    with pytest.raises(ConfigError, match=r"^key model\.numbers = "):
        refuse_changed(msgspec.to_builtins(named), load(assignments=["model.size=small"]))


def test_fragments_by_layer_follow_from_the_size() -> None:
    assert load(preset_name="streaming", assignments=["model.size=35M"]).protocol.fragments == 6 // 3 + 1


def test_unknown_size_is_refused_with_the_list_and_one_of_another_model_by_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load(assignments=["model.size=36M"])
    assert str(caught.value) == f"key model.size = '36M': no such size; choose one of {', '.join(SIZES)}"
    with pytest.raises(ConfigError, match=r"^key model\.size = 'tiny': sizes are for model\.name = 'decoder' or 'vlm'"):
        load(assignments=["model.size=tiny", "model.name=lenet5", "data.corpus=digits"])
    with pytest.raises(ConfigError, match=r"^key model\.size = 35: expected `str`"):
        load(assignments=["model.size=35"])


# ---------------------------------------------------------------- tables without torch, and the builders'


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_table_are_those_of_the_builders_signature(name: str) -> None:
    builder: Callable[..., Any] = (MODELS | VISION_MODELS)[name]
    found = {key: rule_of(p) for key, p in inspect.signature(builder).parameters.items() if key != "seed"}
    kinds = {key: (rule.kind, rule.least if rule.kind is not bool else 0) for key, rule in found.items()}
    assert {key: tuple(rule) for key, rule in NUMBERS[name].items()} == kinds


def test_names_and_sources_of_the_tables_are_those_that_are_built_and_read() -> None:
    assert set(IMAGE_MODELS) == set(VISION_MODELS) == set(NUMBERS) - {"decoder"}
    assert set(IMAGE_SOURCES) == set(SOURCES) and set(SIZED) <= set(NUMBERS)
    for load_source, sources in ((load_images, QUESTION_SOURCES), (load_questions, IMAGE_SOURCES)):
        for source in sources:
            with pytest.raises(ConfigError, match=r"^key data\.corpus"):
                load_source(source)
    assert load().data.tokenizer == "bytes" and build_model("decoder", SIZES["nano"] | {"vocab": BYTE_VOCAB}, 0) is not None


# ---------------------------------------------------------------- `atoll config` refuses what `atoll train` refuses

PAIRS = [
    (["model.name=decodr"], "key model.name = 'decodr': must be 'decoder', 'lenet5', 'resnet18', 'vlm', 'custom' or package"),
    (["model.name=mlp"], "key model.name = 'mlp': must be"),
    (["model.size=huge"], "key model.size = 'huge': no such size"),
    (["model.numbers.depth=3"], "key model.numbers.depth = 3: model 'decoder' has no number depth; it takes vocab, width"),
    (["model.numbers.width=33"], "key model.numbers.width = 33 with model.numbers.heads = 2: the width must be a multiple"),
    (["model.numbers.layers=0"], "key model.numbers.layers = 0: must be at least 1"),
    (["model.numbers.layers=2.5"], "key model.numbers.layers = 2.5: must be a whole number"),
    (["model.numbers.tied=1"], "key model.numbers.tied = 1: must be true or false"),
    (["model.numbers.top_k=3"], "key model.numbers.top_k = 3: is for a model with experts"),
    (["model.numbers.experts=4", "model.numbers.mlp=20"], "key model.numbers.mlp = 20: must be a multiple of 8"),
    (["model.numbers.vocab=100"], "key model.numbers.vocab = 100: the tokenizer has 257 entries"),
    (["model.numbers.context=4"], "key model.numbers.context = 4: must be at least data.seq_len"),
    (["data.augment=crop"], "key data.augment = 'crop': is for images"),
    (["model.name=lenet5"], "key data.corpus = 'stdlib': an image classifier needs digits"),
    (["model.name=vlm"], "key data.corpus = 'stdlib': a vision-language model needs digits_grid"),
    (["model.name=lenet5", "data.corpus=digits", "model.numbers.depth=3"], "key model.numbers.depth = 3: model 'lenet5' has no"),
    (["model.name=resnet18", "data.corpus=digits", "data.batch_size=1"], "key data.batch_size = 1: batch normalisation needs"),
    (["model.name=vlm", "data.corpus=digits_grid", "data.augment=crop"], "key data.augment = 'crop': a mirrored image has"),
]


@pytest.mark.parametrize(("assignments", "sentence"), PAIRS, ids=[" ".join(pair[0]) for pair in PAIRS])
def test_config_refuses_a_model_that_train_refuses(
    assignments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [word for assignment in assignments for word in ("--set", assignment)]
    said = []
    for command in (["config"], ["train", "--virtual"]):
        done = CliRunner().invoke(app, [*command, *sets])
        assert isinstance(done.exception, ConfigError), done.output
        said.append(str(done.exception))
    assert said[0] == said[1] and said[0].startswith(sentence)


@pytest.mark.parametrize(
    "assignments", [[], ["model.size=tiny"], ["model.numbers={experts = 4}"], ["model.name=lenet5", "data.corpus=digits"]]
)  # fmt: skip
def test_model_that_config_accepts_is_one_that_is_built(assignments: list[str]) -> None:
    small = ["data.max_bytes=100000", "data.heldout_batches=1"] if not any("corpus" in a for a in assignments) else []
    config = load(preset_name="diloco", assignments=[*assignments, *small])
    assert task_for(config).build() is not None
