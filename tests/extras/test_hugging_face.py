"""What we export, read by other people's code: transformers gives our logits and ids, and lm-evaluation-harness the accuracies
of `atoll eval`. `make test-extras` installs them and runs this; nothing is fetched from anywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.chaos import Plan
from atoll.config import load
from atoll.executor.trained import Trained, check_tasks, evaluate_run, export_hf, open_trained
from atoll.sim.run import run_virtual
from atoll.workload.corpus import stdlib_corpus

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

EXPERTS = {"mlp": 32, "experts": 4, "top_k": 2}
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "dense, bytes": ({}, {}),
    "dense, tied, bpe": ({"tied": True}, {"tokenizer": "bpe", "vocab": 400, "cache": "off"}),
    "experts, bytes": (EXPERTS, {}),
}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Before they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=list(KINDS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    numbers, data = KINDS[request.param]
    directory = tmp_path_factory.mktemp("run")
    sizes = {"width": 32, "layers": 2, "heads": 2, "mlp": 64} | numbers
    config = load(preset_name="decoupled", overrides={
        "learners": 2, "outer_steps": 60, "model": {"numbers": sizes}, "inner": {"learning_rate": 0.01},
        "protocol": {"fragments": 6, "local_steps_per_round": 6}, "outer": {"outer_momentum": 0.5},
        "data": {"seq_len": 96, "batch_size": 8, "max_bytes": 500_000, "heldout_batches": 2} | data,
    })  # fmt: skip
    run_virtual(config, Plan(), directory / "run", tensors=True)
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


# ---------------------------------------------------------------- lm-evaluation-harness

QUESTIONS = """
task: atoll_piqa
dataset_path: json
dataset_kwargs: {data_files: {validation: DATA/piqa.jsonl}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Question: {{ctx}}\\nAnswer:"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
LAST_WORDS = """
task: atoll_lambada
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/lambada.jsonl}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{ctx}}"
doc_to_target: "{{' ' + target}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""


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


def test_harness_agrees_with_atoll_eval(trained: Trained, exported: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_benchmarks(tmp_path)
    (tmp_path / "tasks").mkdir()
    for name, yaml in (("piqa", QUESTIONS), ("lambada", LAST_WORDS)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.replace("DATA", str(tmp_path)), encoding="utf8")
    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=8)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    said: dict[str, Any] | None = simple_evaluate(
        model=model, tasks=["atoll_piqa", "atoll_lambada"], task_manager=manager, bootstrap_iters=0
    )
    assert said is not None
    questions, words = evaluate_run(trained, check_tasks(["piqa", "lambada"], tmp_path, None))
    theirs = said["results"]["atoll_piqa"]
    one = 1.01 / questions.examples
    assert questions.acc == pytest.approx(theirs["acc,none"], abs=one)
    assert questions.acc_norm == pytest.approx(theirs["acc_norm,none"], abs=one)
    assert questions.acc_bytes == pytest.approx(theirs["acc_bytes,none"], abs=one)
    theirs = said["results"]["atoll_lambada"]
    assert words.acc == pytest.approx(theirs["acc,none"], abs=one)
    assert words.perplexity == pytest.approx(theirs["perplexity,none"], rel=1e-3)
