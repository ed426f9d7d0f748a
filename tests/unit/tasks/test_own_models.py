"""Models of the user's own, `package.module:function`: what they are handed, and what is refused before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import Config, load
from atoll.config.models import SIZES
from atoll.errors import ConfigError
from atoll.tasks.task import Task, language_task
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.evaluation.likelihood import Query, likelihoods
from atoll.workload.models.decoder import language_model_loss

OWN = """
import torch
from torch import nn

handed = []

def make(**numbers):
    handed.append(numbers)
    return short(numbers["vocab"], numbers["context"])

def short(vocab, context):
    return nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, vocab))

def wide(vocab, context, width):
    return short(vocab, context)

class Paired(nn.Sequential):
    def forward(self, tokens):
        return (super().forward(tokens),)

def paired(vocab, context):
    return Paired(*short(vocab, context))

class Shy(Paired):
    def forward(self, tokens):
        assert not tokens.is_meta, "nothing can be known of it beforehand"
        return super().forward(tokens)

def shy(vocab, context):
    return Shy(*short(vocab, context))

class Last(nn.Sequential):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1]

def last(vocab, context):
    return Last(*short(vocab, context))

def nothing(vocab, context):
    return None

number = 5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name}"  # one that nobody has imported
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"broken_{name}.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config(name: str, **numbers: Any) -> Config:
    data = {"seq_len": 16, "batch_size": 2, "heldout_batches": 1, "max_bytes": 100_000}
    return load(preset_name="diloco", overrides={"model": {"name": name, "numbers": numbers}, "data": data})


def task(name: str, **numbers: Any) -> Task:
    return language_task(config(name, **numbers), [name])


def test_function_is_handed_the_texts_numbers_and_those_of_the_recipe_and_no_others(own: str) -> None:
    module = __import__(own)
    for numbers in ({}, {"depth": 3, "context": 32}):
        task(f"{own}:make", **numbers)
        assert module.handed[-1] == {"vocab": 257, "context": 16} | numbers
    assert task(f"{own}:short").build()(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 257)


def test_decoder_without_a_size_is_still_nano() -> None:
    shape: Any = language_task(config("decoder")).build().shape
    assert {key: getattr(shape, key) for key in SIZES["nano"]} == SIZES["nano"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (":f", "must be 'decoder', 'lenet5', 'resnet18', 'vlm', 'custom' or package.module:function"),
        (".a:f", "or package.module:function"),
        ("a..b:f", "or package.module:function"),
        ("a:", "or package.module:function"),
        ("a:b:c", "or package.module:function"),
        ("a b:c", "or package.module:function"),
        ("OWN:gone", "cannot be imported (module 'OWN' has no attribute 'gone')"),
        ("no_such_module:f", "cannot be imported (No module named 'no_such_module')"),
        ("broken_OWN:make", "cannot be imported (invalid syntax (broken_OWN.py, line 1))"),
        ("OWN:number", "has type int; it must be a function that returns the model"),
        ("OWN:nothing", "returned NoneType, not a torch.nn.Module"),
        ("OWN:wide", "is called with vocab, context and the keys of model.numbers (missing a required argument: 'width')"),
        ("OWN:paired", "the model returns a tuple for tokens of shape [1, 16]: it must return logits, [1, 16, entries]"),
        ("OWN:last", "the model returns a tensor of shape [1, 257] for tokens of shape [1, 16]"),
    ],
)
def test_name_that_is_no_model_is_refused_in_one_sentence(own: str, name: str, sentence: str) -> None:
    name = name.replace("OWN", own)
    with pytest.raises(ConfigError) as caught:
        task(name)
    said = str(caught.value)
    assert said.startswith(f"key model.name = {name!r}: ") and sentence.replace("OWN", own) in said and "\n" not in said


def test_number_that_the_function_does_not_take_is_told(own: str) -> None:
    with pytest.raises(ConfigError, match=r"and the keys of model.numbers \(got an unexpected keyword argument 'depth'\)"):
        task(f"{own}:short", depth=3)


def test_output_that_shows_only_in_use_is_refused_wherever_it_is_used(own: str) -> None:
    found = task(f"{own}:shy")
    model, batch = found.build(), found.batch(0, 0, 0)
    assert found.tokenizer is not None
    for use in (
        lambda: language_model_loss(model, batch),
        lambda: heldout_loss(model, [batch]),
        lambda: likelihoods(model, [Query("a", " b")], found.tokenizer, longest=16, vocab=257),
    ):
        with pytest.raises(ConfigError, match=r"^the model returns a tuple for tokens of shape \[\d, \d+\]: it must return log"):
            use()
