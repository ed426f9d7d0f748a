"""`atoll export` and `atoll eval` as a user meets them, on a run of either kind."""

from __future__ import annotations

import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from atoll.chaos import Plan
from atoll.cli.app import app
from atoll.config import load, to_toml
from atoll.errors import UserError
from atoll.executor.durable import DurableDisk
from atoll.executor.syncer import initial_versions
from atoll.executor.trained import open_trained
from atoll.executor.workbench import language_workbench
from atoll.sim.run import run_virtual
from atoll.workload.bpe import ByteTokenizer
from atoll.workload.export import hf_tokenizer

SMALL = {
    "learners": 2, "outer_steps": 6, "model": {"numbers": {"width": 16, "layers": 2, "mlp": 24}},
    "protocol": {"fragments": 4, "local_steps_per_round": 4}, "data": {"seq_len": 32, "max_bytes": 200_000, "heldout_batches": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "small"
    run_virtual(load(preset_name="decoupled", overrides=SMALL), Plan(), directory, tensors=True)
    return directory


def atoll(*words: object) -> str:
    """Standard output; a UserError comes out as it is."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def refusal(*words: object) -> str:
    with pytest.raises(UserError) as caught:
        atoll(*words)
    return str(caught.value)


def test_export_leaves_the_files_that_transformers_reads(run: Path, tmp_path: Path) -> None:
    said = atoll("export", run, "--hf", tmp_path / "hf")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == names
    assert all(name in said for name in names)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["max_position_embeddings"]) == (["Qwen3ForCausalLM"], 32)
    theta, exported = load_file(run / "theta.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(theta["blocks.1.mlp.up.weight"], exported["model.layers.1.mlp.up_proj.weight"])
    assert "exists and is not an empty folder" in refusal("export", run, "--hf", tmp_path / "hf")


def test_live_runs_keep_theta_with_their_syncer_and_cut_ones_their_versions(run: Path, tmp_path: Path) -> None:
    live, cut = tmp_path / "live", tmp_path / "cut"
    (live / "syncer").mkdir(parents=True)
    cut.mkdir()
    for directory in (live, cut):
        shutil.copy(run / "config.toml", directory)
    shutil.copy(run / "theta.safetensors", live / "syncer")
    wanted = open_trained(run).model.state_dict()
    found = open_trained(live).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    bench = language_workbench(load(run / "config.toml"))
    DurableDisk.create(cut / "syncer", initial_versions(bench))
    first, found = bench.build().state_dict(), open_trained(cut).model.state_dict()
    assert all(torch.equal(found[name], first[name]) for name in first)


def test_hugging_face_tokenizer_goes_along_unpacked(run: Path, tmp_path: Path) -> None:
    content = json.dumps(hf_tokenizer(ByteTokenizer())).encode()
    (tmp_path / "bytes.json.xz").write_bytes(lzma.compress(content))
    shutil.copy(run / "theta.safetensors", tmp_path)
    config = load(run / "config.toml", overrides={"data": {"tokenizer": str(tmp_path / "bytes.json.xz")}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    atoll("export", tmp_path, "--hf", tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == content
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256


def test_runs_that_cannot_be_exported_say_why(run: Path, tmp_path: Path) -> None:
    assert refusal("export", tmp_path, "--hf", tmp_path / "hf").endswith("is no run's folder, it has no config.toml")
    shutil.copy(run / "config.toml", tmp_path)
    assert "holds no weights" in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    tensors = load_file(run / "theta.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, tmp_path / "theta.safetensors")
    assert "tensor norm.weight is missing" in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    for name, sentence in (("custom", "is code of yours"), ("lenet5", "reads pictures"), ("a.b:c", "allow it here")):
        config = load(preset_name="decoupled", overrides=SMALL | {"model": {"name": name}})
        (tmp_path / "config.toml").write_text(to_toml(config))
        assert sentence in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_eval_tells_tasks_and_heldout_loss_as_one_object(run: Path, tmp_path: Path) -> None:
    record = {"ctx": "import", "choices": ["os", "Füße"], "gold": 0}
    (tmp_path / "piqa_val.jsonl").write_text((json.dumps(record) + "\n") * 3)
    (tmp_path / "lambada_openai_test.jsonl").write_text('{"ctx": "class Foo: pass", "target": "x"}\n')
    words = ("eval", run, "--tasks", "piqa,lambada,heldout", "--data", tmp_path, "--limit", 2)
    said = json.loads(atoll(*words, "--json"))
    assert said["run"] == str(run)
    piqa, lambada, heldout = said["results"]
    assert (piqa["task"], piqa["examples"], piqa["file"], piqa["acc_stderr"]) == ("piqa", 2, "piqa_val.jsonl", 0.0)
    assert piqa["acc"] in (0.0, 1.0)
    assert lambada["perplexity"] > 1.0
    bench = language_workbench(load(run / "config.toml"))
    assert heldout["loss"] == pytest.approx(bench.evaluate(open_trained(run).model))
    table = atoll(*words)
    assert "piqa" in table and "perplexity" in table and f"{heldout['loss']:.4f}" in table


def test_eval_refuses_unknown_tasks_and_missing_files_before_it_loads_anything(tmp_path: Path) -> None:
    unknown = refusal("eval", tmp_path, "--tasks", "piqa,mmlu", "--data", tmp_path)
    assert unknown.startswith("--tasks mmlu: no such task; there are hellaswag, piqa, ")
    assert refusal("eval", tmp_path, "--tasks", "piqa").startswith("--data: say in which folder")
    assert "has no file piqa.jsonl or piqa_val.jsonl" in refusal("eval", tmp_path, "--tasks", "piqa", "--data", tmp_path)


def test_commands_end_with_exit_code_2_and_one_sentence(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "atoll", "export", "nowhere", "--hf", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "atoll: run nowhere: is no run's folder, it has no config.toml\n")
