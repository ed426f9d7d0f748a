"""`bench/quality/experts_and_images.py`: what it counts and prints; its committed lines are of the recipes as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.tasks.registry import task_for
from atoll.workload.models.decoder import Decoder
from atoll.workload.models.moe import route

QUALITY = Path(__file__).parents[2] / "bench" / "quality"
SMALL = ["total_steps=4", "learners=2", "data.batch_size=2", "data.heldout_batches=2"]
TEXT = ["data.max_bytes=300000", "protocol.local_steps_per_round=3", "protocol.fragments=6"]


@pytest.fixture(scope="module")
def task(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/experts_and_images")


def line(name: str, preset: str, seed: int, loss: float, accuracy: float | None = None, **differs: Any) -> dict[str, Any]:
    return {
        "name": name, "preset": preset, "seed": seed, "loss_final": loss, "accuracy": accuracy, "differs": differs,
        "expert_load": [] if accuracy is not None else [[0.2, 0.8], [0.5, 0.5]], "trained_tokens": 1024, "parameters": 1000,
        "learners": 4, "total_steps": 10, "bytes_up": 4000, "bytes_down": 12_000,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["moe", "vqa"])
def test_compared_runs_have_equal_steps_learners_model_data_and_weight_of_a_batch(task: Any, what: str) -> None:
    one, two = (task.settings(what, preset, 1) for preset in task.PRESETS)
    for section in ("seed", "learners", "total_steps", "model", "data"):
        assert getattr(one, section) == getattr(two, section), section
    assert (one.seed, one.inner.accumulate) == (1, two.inner.accumulate)


@pytest.mark.parametrize("what", ["moe", "vqa"])
def test_committed_table_is_of_the_recipe_as_it_is_on_seeds_that_were_not_tuned_on(task: Any, what: str) -> None:
    lines = task.read(QUALITY / "results" / f"{what}.jsonl")
    table = [each for each in lines if each["name"] == task.TABLE]
    assert {(each["preset"], each["seed"]) for each in table} == {(p, s) for p in task.PRESETS for s in task.SEEDS}
    for each in table:
        now = task.differences(task.settings(what, each["preset"], each["seed"]))
        assert each["differs"] == json.loads(json.dumps(now))
    for seed in task.SEEDS:
        tokens = [each["trained_tokens"] for each in table if each["seed"] == seed]
        assert max(tokens) < 1.01 * min(tokens)
    tuned = [each for each in lines if each["name"] != task.TABLE]
    assert {each["seed"] for each in tuned} == {task.TUNED_ON} and task.TUNED_ON not in task.SEEDS
    tries = [sum(each["preset"] == preset for each in tuned) for preset in task.PRESETS]
    assert tries[0] >= tries[1], "data-parallel had as many tries"


def test_run_leaves_a_line_without_paths_that_says_how_tokens_spread_over_experts(task: Any) -> None:
    config = task.settings("moe", "decoupled", 3, [*SMALL, *TEXT, "model.numbers.layers=2"])
    told = json.loads(json.dumps(task.train("tried", config)))
    assert (told["name"], told["seed"], told["tape"], told["run_dir"]) == ("tried", 3, None, None)
    assert told["differs"]["total_steps"] == 4 and "preset" not in told["differs"]
    assert told["trained_tokens"] == told["tokens"]["trained"] // told["fragments"] > 0
    assert told["parameters"] == sum(p.numel() for p in task_for(config).build().parameters())
    assert [len(block) for block in told["expert_load"]] == [4, 4]
    assert all(sum(block) == pytest.approx(1.0, abs=1e-3) for block in told["expert_load"])


def test_expert_load_of_the_first_block_is_what_a_count_by_hand_gives(task: Any) -> None:
    config = task.settings("moe", "decoupled", 0, [*SMALL, *TEXT])
    work = task_for(config)
    model, seen = work.build(), []
    assert isinstance(model, Decoder)
    mlp: Any = model.blocks[0].mlp
    hook = mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].reshape(-1, inputs[0].shape[-1])))
    load = task.expert_load(work, model)
    hook.remove()
    chosen = route(torch.cat(seen), mlp.router.weight, 2)[1].flatten().tolist()
    assert load[0] == [round(chosen.count(e) / len(chosen), 4) for e in range(4)]
    assert not mlp._forward_pre_hooks, "nothing of the listening is left in the model"


def test_images_have_answers_and_no_experts(task: Any) -> None:
    told = task.train("tried", task.settings("vqa", "ddp", 0, SMALL))
    assert told["expert_load"] == [] and task.load_range(told) == "-"
    assert 0.0 <= task.percent(told) <= 100.0
    assert 2.0 <= task.byte_share(told) < 2.7, "fp32 both ways, and a start"


def test_bytes_are_a_share_of_two_a_parameter_each_way_every_step_for_every_learner(task: Any) -> None:
    assert task.byte_share(line("x", "ddp", 0, 1.0)) == pytest.approx(16_000 / (4 * 10 * 1000 * 4))


def test_tables_show_mean_and_spread_of_the_runs_and_the_sweep_with_what_varied(task: Any) -> None:
    lines = [
        line("table", "ddp", 2, 1.5, learners=4), line("table", "ddp", 1, 1.0), line("table", "decoupled", 1, 2.0),
        line("slow", "decoupled", 0, 2.5, **{"inner.learning_rate": 0.1, "data.seq_len": 8}),
        line("fast", "decoupled", 0, 2.25, **{"inner.learning_rate": 0.2, "data.seq_len": 9}), line("only", "ddp", 0, 9.0),
    ]  # fmt: skip
    assert task.comparison(lines).splitlines() == [
        "| preset | seeds | held-out loss | tokens of an expert | trained tokens | bytes of bf16 data-parallel |",
        "| --- | --- | --- | --- | --- | --- |",
        "| ddp | 1, 2 | 1.2500 ± 0.2500 | 20% to 80%; 20% to 80% | 1,024, 1,024 | 10.0% |",
        "| decoupled | 1 | 2.0000 ± 0.0000 | 20% to 80% | 1,024 | 10.0% |",
    ]
    assert task.sweep(lines, "decoupled").splitlines() == [
        "| run | seed | learning_rate | held-out loss |",
        "| --- | --- | --- | --- |",
        "| fast | 0 | 0.2 | 2.2500 |",
        "| slow | 0 | 0.1 | 2.5000 |",
    ]
    answered = [line("table", "ddp", 1, 0.1, 0.9), line("table", "ddp", 2, 0.1, 0.8), line("x", "ddp", 0, 0.5, 0.25)]
    assert "| 85.0 ± 5.0 |" in task.comparison(answered) and "| 25.0 |" in task.sweep(answered, "ddp")
