"""What we export, read by other people's code: transformers gives our logits and ids, and lm-evaluation-harness the accuracies
of `atoll eval`. `make test-extras` installs them and runs this; nothing is fetched from anywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.sim.run import run_virtual
from atoll.tasks.trained import Trained, export_hf, open_trained
from atoll.workload.data.corpus import stdlib_corpus

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

EXPERTS = {"mlp": 32, "experts": 4, "top_k": 2}
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "dense, bytes": ({}, {}),
    "dense, tied, bpe": ({"tied": True}, {"tokenizer": "bpe", "vocab": 400, "cache": "off"}),
    "experts, bytes": (EXPERTS, {}),
}


@pytest.fixture(scope="module")
def task(bench_script: Callable[[str], ModuleType]) -> Any:
    """The script that sets both beside each other for real benchmarks."""
    return bench_script("quality/harness_agreement")


@pytest.fixture(scope="module", autouse=True)
def offline(task: Any) -> Iterator[None]:
    """Before they are imported."""
    with task.offline():
        yield


@pytest.fixture(scope="module", params=list(KINDS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    numbers, data = KINDS[request.param]
    directory = tmp_path_factory.mktemp("run")
    sizes = {"width": 32, "layers": 2, "heads": 2, "mlp": 64} | numbers
    config = load(preset_name="decoupled", overrides={
        "learners": 2, "total_steps": 60, "model": {"numbers": sizes}, "inner": {"learning_rate": 0.01},
        "protocol": {"fragments": 6, "local_steps_per_round": 6}, "outer": {"outer_momentum": 0.5},
        "data": {"seq_len": 96, "batch_size": 8, "max_bytes": 500_000, "heldout_batches": 2} | data,
    })  # fmt: skip
    run_virtual(config, ChaosPlan(), directory / "run", tensors=True)
    return open_trained(directory / "run")


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "model"
    export_hf(trained, directory)
    return directory


def test_transformers_gives_our_logits_and_writes_text(trained: Trained, exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, 257, (3, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, trained.model.eval()(tokens), rtol=0, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "def __init__(self"
    ids = tokenizer(text, return_tensors="pt")
    assert ids.input_ids[0].tolist() == trained.tokenizer.encode(text.encode())
    written = theirs.generate(**ids, max_new_tokens=12)
    assert tokenizer.decode(written[0]).startswith(text)
    assert written.shape[1] > ids.input_ids.shape[1]


def test_transformers_gives_the_ids_of_training_of_a_tokenizer_that_would_say_more(tmp_path: Path) -> None:
    """Its file puts a token in front and behind, drops merges by chance, shortens and fills up; training does none of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer

    theirs = Tokenizer(models.BPE(dropout=0.9))
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([text.decode() for text in stdlib_corpus(200_000).documents], trainer)
    theirs.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    theirs.enable_truncation(5)
    theirs.enable_padding(length=64, pad_id=0, pad_token="<s>")
    theirs.save(str(tmp_path / "t.json"))
    config = load(preset_name="diloco", overrides={
        "learners": 2, "total_steps": 2, "protocol": {"local_steps_per_round": 2}, "model": {"numbers": {"layers": 1}},
        "data": {"tokenizer": str(tmp_path / "t.json"), "cache": "off", "max_bytes": 200_000, "heldout_batches": 1},
    })  # fmt: skip
    run_virtual(config, ChaosPlan(), tmp_path / "run", tensors=True)
    export_hf(run := open_trained(tmp_path / "run"), tmp_path / "hf")
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path / "hf"), "def function(self, argument): return argument + 1"
    wanted = run.tokenizer.encode(text.encode())
    for specials in (True, False):
        assert [tokenizer(text, add_special_tokens=specials).input_ids for _ in range(3)] == [wanted] * 3
    assert tokenizer([text, "x"], padding=True).input_ids[0] == wanted
    assert tokenizer.decode(wanted) == text


# ---------------------------------------------------------------- lm-evaluation-harness

def write_benchmarks(directory: Path, count: int = 60) -> None:
    """Lines of the standard library to be told from those of another place; and words that this code likes to end on."""
    text = b"".join(stdlib_corpus(500_000).documents[:4]).decode()
    lines = [line for line in text.splitlines() if len(line.strip()) > 30]
    questions, words = [], []
    for index in range(count):
        context, right = lines[index], lines[index + 1]
        wrong = lines[-1 - index][::-1] if index % 2 else lines[-1 - index] + " … "
        gold = index % 3 % 2
        choices = [wrong, right] if gold else [right, wrong]
        questions.append({"ctx": context, "choices": choices, "gold": gold})
        before, _, last = lines[index].strip().rpartition(" ")
        words.append({"ctx": f"{lines[index + 1]} {before}", "target": "self" if index % 4 == 0 else last})
        if index % 5 == 0:  # what a byte-level model learns first
            words[-1] = {"ctx": "x = 1\n" * 4 + "x =", "target": " "}
    for name, rows in (("piqa", questions), ("lambada", words)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def test_harness_agrees_with_atoll_eval(trained: Trained, task: Any, tmp_path: Path) -> None:
    write_benchmarks(tmp_path)
    found = task.agreement(trained, ["piqa", "lambada"], tmp_path)
    told = {"piqa": ("questions", "acc", "acc_norm", "acc_bytes"), "lambada": ("questions", "acc", "perplexity")}
    assert [(pair.task, pair.metric) for pair in found] == [(task, metric) for task in told for metric in told[task]]
    assert all(pair.agree for pair in found), found
    assert {pair.examples + pair.too_long for pair in found} == {60}


OF_EACH_TASK: dict[str, dict[str, Any]] = {
    "piqa": {"ctx": "open a file", "choices": ["call open()", "call close() twice"]},
    "arc_easy": {"ctx": "Which is a number?", "choices": ["int", "str", "list", "dict"]},
    "arc_challenge": {"ctx": "Which is not a number?", "choices": ["int", "float", "list"]},
    "copa": {"ctx": "The test failed.", "question": "cause", "choices": ["The code was wrong.", "The sun shone."]},
    "lambada": {"ctx": "import os import sys import", "target": "re"},
    "hellaswag": {
        "label": "Coding", "ctx_a": "A man [title] types.", "ctx_b": "he", "choices": ["[step] runs it.", "eats", "is", "rests."],
    },
    "winogrande": {"ctx": "The list fits the tuple because _ is small.", "choices": ["the list", "the tuple"]},
    "openbookqa": {"ctx": "A loop ends with", "choices": ["break", "class", "import", "def it"]},
    "siqa": {"passage": "Kim wrote a test.", "ctx": "Why?", "choices": ["to be sure", "to eat", "for no reason at all"]},
    "boolq": {"passage": "Sets have no order.", "ctx": "do sets have an order", "choices": ["no", "yes"]},
}  # fmt: skip


def test_harness_asks_every_task_in_our_words(trained: Trained, task: Any, tmp_path: Path) -> None:
    assert set(OF_EACH_TASK) == set(task.TASKS)
    for name, record in OF_EACH_TASK.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record | {"gold": 0}) + "\n", encoding="utf8")
    found = task.agreement(trained, list(OF_EACH_TASK), tmp_path)
    asked = {pair.task: (pair.ours, pair.theirs) for pair in found if pair.metric == "questions"}
    assert asked == {name: (len(record.get("choices", [0])),) * 2 for name, record in OF_EACH_TASK.items()}
    assert all(pair.agree for pair in found), found


def test_disagreement_shows(task: Any) -> None:
    assert task.Pair("piqa", 50, "acc", 0.50, 0.52, 0).agree, "one example"
    assert not task.Pair("piqa", 50, "acc", 0.50, 0.54, 0).agree, "two"
    assert not task.Pair("piqa", 50, "questions", 100, 99, 0).agree
    assert task.Pair("lambada", 50, "perplexity", 1000.9, 1000.0, 0).agree
    assert not task.Pair("lambada", 50, "perplexity", 1002.0, 1000.0, 0).agree
