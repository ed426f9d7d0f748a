"""`atoll export` and `atoll eval` as a user meets them, on a run of either kind."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from atoll.chaos import ChaosPlan
from atoll.cli.app import app
from atoll.config import load, to_toml
from atoll.errors import UserError
from atoll.sim.run import run_virtual
from atoll.store import weights
from atoll.store.durable import DurableVersions
from atoll.store.versions import digest
from atoll.tasks.task import initial_versions, language_task, layout_for
from atoll.tasks.trained import open_trained
from atoll.tensors.access import named_tensors, read_buffers, read_params
from atoll.workload.data.stream import heldout_batches
from atoll.workload.data.tokenizer import ByteTokenizer
from atoll.workload.data.tokens import text_data
from atoll.workload.evaluation.evaluate import heldout_loss
from atoll.workload.evaluation.export import hf_tokenizer

SMALL = {
    "learners": 2, "total_steps": 6, "model": {"numbers": {"width": 16, "layers": 2, "mlp": 24}},
    "protocol": {"fragments": 4, "local_steps_per_round": 4}, "data": {"seq_len": 32, "max_bytes": 200_000, "heldout_batches": 2},
}  # fmt: skip
DDP = {key: SMALL[key] for key in ("learners", "model", "data")} | {"total_steps": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "small"
    run_virtual(load(preset_name="decoupled", overrides=SMALL), ChaosPlan(), directory, tensors=True)
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


def live_run(directory: Path, like: Path) -> Path:
    """A live run's folder as its launcher leaves it at the start, its syncer's home still to be furnished."""
    (directory / "syncer").mkdir(parents=True)
    shutil.copy(like / "config.toml", directory)
    return directory


def cut_run(directory: Path, like: Path, *stored: int) -> Path:
    """One whose syncer had stored fragment 0 at these outer steps, all numbers being that step, when it ended."""
    versions = initial_versions(language_task(load(like / "config.toml")))
    disk = DurableVersions.create(live_run(directory, like) / "syncer", versions)
    for t in stored:
        theta = torch.full_like(versions[0].theta, float(t))
        disk.put(t, {0: replace(versions[0], theta=theta, announced=theta)})
    return directory


def test_weights_have_the_mode_that_the_umask_gives_every_other_file(run: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atoll("export", run, "--hf", tmp_path / "hf")
        run_virtual(load(preset_name="ddp", overrides=DDP), ChaosPlan(), tmp_path / "run", tensors=True)
    finally:
        os.umask(before)
    written = [*(tmp_path / "hf").iterdir(), *(tmp_path / "run").iterdir()]
    assert {path.name for path in written} >= {"model.safetensors", "theta.safetensors", "config.toml"}
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in written} == {path.name: "0o640" for path in written}


def test_live_runs_keep_theta_with_their_syncer_and_cut_ones_their_versions(run: Path, tmp_path: Path) -> None:
    live, cut = live_run(tmp_path / "live", run), cut_run(tmp_path / "cut", run, 2, 5)
    shutil.copy(run / "theta.safetensors", live / "syncer")
    wanted = open_trained(run).model.state_dict()
    found = open_trained(live).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    task = language_task(load(run / "config.toml"))
    first, found = task.build().state_dict(), open_trained(cut).model.state_dict()
    moved = {slot.name for slot in task.layout.fragments[0].params}
    assert moved and moved < set(first)
    assert all(torch.equal(found[name], first[name]) for name in set(first) - moved)
    assert all((found[name] == 5.0).any() for name in moved), "the newest version, not the one before it"


def test_outer_step_is_that_of_the_weights(run: Path, tmp_path: Path) -> None:
    assert open_trained(run).outer_step == 6
    assert open_trained(cut_run(tmp_path / "cut", run, 2, 5)).outer_step == 5
    ended = cut_run(tmp_path / "ended", run, 2, 5)
    shutil.copy(run / "theta.safetensors", ended / "syncer")
    assert open_trained(ended).outer_step == 6, "theta.safetensors is written after the last outer step only"
    summary = ended / "summary.json"  # trained on a tape that was cut: theta.safetensors is there, and the summary knows
    summary.write_text(json.dumps({"total_steps": 4, "preset": "decoupled"}))
    assert open_trained(ended).outer_step == 4
    summary.write_text(json.dumps({"total_steps": 0}))
    assert "(outer step 0 of 6)" in refusal("export", ended, "--hf", tmp_path / "hf")
    summary.write_text("{}")
    assert str(summary) in refusal("export", ended, "--hf", tmp_path / "hf")


def test_run_that_never_trained_is_refused(run: Path, tmp_path: Path) -> None:
    never = cut_run(tmp_path / "never", run)
    wanted = f"run {never}: holds only the weights it began with (outer step 0 of 6); name a run that stored an outer step"
    for words in (("export", never, "--hf", tmp_path / "hf"), ("eval", never), ("eval", never, "--json")):
        assert refusal(*words) == wanted
    assert not (tmp_path / "hf").exists()


def test_run_that_ended_early_is_taken_with_a_warning(run: Path, tmp_path: Path) -> None:
    cut = cut_run(tmp_path / "cut", run, 2, 5)
    warning = f"warning: run {cut}: ended early or still runs; its newest weights are those of outer step 5 of 6"
    for words in (("export", cut, "--hf", tmp_path / "hf"), ("eval", cut), ("eval", cut, "--json")):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert (done.exit_code, done.stderr.splitlines().count(warning)) == (0, 1)
        assert "warning" not in done.stdout
    for words in (("export", run, "--hf", tmp_path / "whole"), ("eval", run)):
        assert "warning" not in CliRunner().invoke(app, [str(word) for word in words]).stderr


def test_json_of_eval_tells_the_outer_step_whether_or_not_it_is_the_last(run: Path, tmp_path: Path) -> None:
    cut = cut_run(tmp_path / "cut", run, 5)
    for directory, reached in ((cut, 5), (run, 6)):
        said = json.loads(atoll("eval", directory, "--json"))
        assert (said["outer_step"], said["total_steps"]) == (reached, 6)


def told_run(directory: Path, like: Path, sha256: str | None) -> Path:
    """A virtual run's folder with a summary that tells this digest."""
    shutil.copytree(like, directory)
    (directory / "summary.json").write_text(json.dumps({"total_steps": 6, "theta_sha256": sha256}))
    return directory


@pytest.fixture(scope="module")
def sha256(run: Path) -> str:
    model, config = open_trained(run).model, load(run / "config.toml")
    tensors, fragments = named_tensors(model), layout_for(config, model).fragments
    return digest([read_params(tensors, f) for f in fragments] + [read_buffers(tensors, f) for f in fragments])


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


def test_damaged_weights_are_neither_evaluated_nor_exported(run: Path, sha256: str, tmp_path: Path) -> None:
    whole, damaged = told_run(tmp_path / "whole", run, sha256), told_run(tmp_path / "damaged", run, sha256)
    flip_last_byte(damaged / "theta.safetensors")
    assert "heldout" in atoll("eval", whole)
    for words in (("eval", damaged), ("eval", damaged, "--json"), ("export", damaged, "--hf", tmp_path / "hf")):
        said = refusal(*words)
        assert said.startswith(f"{damaged / 'theta.safetensors'} is damaged or belongs to another run: its SHA-256 is not")
        assert str(damaged / "summary.json") in said and "\n" not in said
    assert not (tmp_path / "hf").exists()


def test_live_weights_are_held_against_the_summary_beside_their_syncer(run: Path, sha256: str, tmp_path: Path) -> None:
    live = live_run(tmp_path / "live", run)
    shutil.copy(run / "theta.safetensors", live / "syncer")
    open_trained(live)
    (live / "summary.json").write_text(json.dumps({"total_steps": 6, "theta_sha256": sha256}))
    open_trained(live)
    flip_last_byte(live / "syncer" / "theta.safetensors")
    assert "is damaged or belongs to another run" in refusal("eval", live)


def test_digest_of_what_a_real_run_tells_fits_its_weights(tmp_path: Path) -> None:
    """Whatever the preset and the precision."""
    for number, words in enumerate((["--preset", "ddp"], ["--set", "model.precision=bf16"], ["--preset", "diloco"])):
        tiny = [f"total_steps={8 if 'diloco' in words else 2}", "learners=2", "data.seq_len=16", "data.max_bytes=200000",
                "data.heldout_batches=1", "model.numbers={width=16, layers=2, heads=2, mlp=24}"]  # fmt: skip
        few = ["protocol.local_steps_per_round=4"] if "diloco" in words else []
        few = ["protocol.fragments=4", "protocol.local_steps_per_round=4"] if "--set" in words else few
        out = tmp_path / str(number)
        atoll("train", "--virtual", *words, *(w for key in tiny + few for w in ("--set", key)), "--out", out)
        assert "heldout" in atoll("eval", out)


def test_loss_that_is_no_number_is_told_and_ends_with_exit_code_2(run: Path, tmp_path: Path) -> None:
    told_run(tmp_path / "run", run, None)
    tensors = load_file(tmp_path / "run" / "theta.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, tmp_path / "run" / "theta.safetensors")
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--json"])
    assert isinstance(done.exception, UserError) and "its loss on heldout is nan" in str(done.exception)
    assert json.loads(done.stdout)["results"][0]["loss"] is None, "the object is there all the same"


def test_task_of_a_model_that_says_no_number_has_no_figure_and_ends_with_exit_code_2(run: Path, tmp_path: Path) -> None:
    told_run(tmp_path / "run", run, None)
    tensors = load_file(tmp_path / "run" / "theta.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, tmp_path / "run" / "theta.safetensors")
    (tmp_path / "piqa.jsonl").write_text('{"ctx": "import", "choices": ["os", "sys"], "gold": 0}\n' * 3)
    (tmp_path / "lambada.jsonl").write_text('{"ctx": "class Foo: pass", "target": "x"}\n' * 3)
    words = ["eval", str(tmp_path / "run"), "--tasks", "lambada,piqa", "--data", str(tmp_path)]
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, words + more)
        assert isinstance(done.exception, UserError)
        assert str(done.exception) == (
            f"run {tmp_path / 'run'}: its acc on lambada is nan: the weights have diverged or are damaged; "
            "train with a lower inner.learning_rate, or restore them"
        )
        assert "piqa" in done.stdout, "whatever else was asked is answered"
    lambada, piqa = json.loads(done.stdout)["results"]
    assert [piqa[key] for key in ("acc", "acc_norm", "acc_bytes", "acc_stderr")] == [None] * 4
    assert (lambada["acc"], lambada["perplexity"], lambada["examples"]) == (None, None, 3)


def test_limit_is_of_the_heldout_sequences_too(run: Path, tmp_path: Path) -> None:
    config, trained = load(run / "config.toml"), open_trained(run)
    batches = heldout_batches(text_data(config.data).tokens, config.data.batch_size, config.data.seq_len, 2)
    for limit, examples in ((3, 3), (8, 8), (11, 11), (100, 16)):
        (heldout,) = json.loads(atoll("eval", run, "--limit", limit, "--json"))["results"]
        assert heldout["examples"] == examples
        assert heldout["loss"] == pytest.approx(heldout_loss(trained.model, [torch.cat(batches)[:limit]]), rel=1e-6)


def test_weights_that_must_not_be_read_are_said_to_be_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told_run(tmp_path / "run", run, None)
    (theta := tmp_path / "run" / "theta.safetensors").chmod(0)
    opened = Path.open

    def refused(path: Path, *words: Any, **more: Any) -> Any:  # root reads whatever the mode
        if path == theta:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert refusal("eval", tmp_path / "run") == f"{theta} cannot be read: Permission denied"


def test_bad_key_in_a_runs_config_is_told_with_its_file(run: Path, tmp_path: Path) -> None:
    config = told_run(tmp_path / "run", run, None) / "config.toml"
    config.write_text(config.read_text().replace("total_steps", "outer_stepps"))
    for words in (("eval", tmp_path / "run"), ("export", tmp_path / "run", "--hf", tmp_path / "hf")):
        assert refusal(*words).startswith(f"{config}: key outer_stepps = 6: no such key")
    config.write_text("garbage")
    assert refusal("eval", tmp_path / "run").startswith(f"recipe {config}: not valid TOML")


@pytest.mark.parametrize("there", [False, True])
def test_export_that_finds_no_room_leaves_nothing_and_works_later(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    where = tmp_path / "deep" / "hf"
    if there:
        where.mkdir(parents=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(weights, "tensor_chunks", full)
        said = refusal("export", run, "--hf", where)
    assert said == f"--hf {where}: cannot be written (No space left on device)"
    assert list(tmp_path.rglob("*")) == ([where.parent, where] if there else [])
    atoll("export", run, "--hf", where)
    assert len(list(where.iterdir())) == 5


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


def test_exported_tokenizer_is_what_training_used_of_the_file(run: Path, tmp_path: Path) -> None:
    """A file that puts a token in front, shortens or fills up would ask the model in words it never saw."""
    said = hf_tokenizer(ByteTokenizer())
    template = {"type": "TemplateProcessing", "special_tokens": {"<|endoftext|>": {
        "id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}, "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}  # fmt: skip
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file = said | {"post_processor": template, "truncation": cut, "model": said["model"] | {"dropout": 0.5}}
    (tmp_path / "t.json").write_text(json.dumps(file))
    shutil.copy(run / "theta.safetensors", tmp_path)
    config = load(run / "config.toml", overrides={"data": {"tokenizer": str(tmp_path / "t.json")}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    atoll("export", tmp_path, "--hf", tmp_path / "hf")
    exported = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert exported.encode("import os").ids == list(b"import os") == open_trained(tmp_path).tokenizer.encode(b"import os")
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_text()) == said


def test_runs_that_cannot_be_exported_say_why(run: Path, tmp_path: Path) -> None:
    assert refusal("export", tmp_path, "--hf", tmp_path / "hf").startswith(f"run {tmp_path}: no run is there")
    shutil.copy(run / "config.toml", tmp_path)
    assert "holds no weights" in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    tensors = load_file(run / "theta.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, tmp_path / "theta.safetensors")
    assert "tensor norm.weight is missing" in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    unfit = {"custom": "is your own code", "lenet5": "reads images", "a.b:c": "has no Hugging Face architecture"}
    for name, sentence in unfit.items():
        config = load(preset_name="decoupled", overrides=SMALL | {"model": {"name": name}, "data": {"corpus": "digits"}})
        (tmp_path / "config.toml").write_text(to_toml(config))
        assert sentence in refusal("export", tmp_path, "--hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_eval_tells_tasks_and_heldout_loss_as_one_object(run: Path, tmp_path: Path) -> None:
    record = {"ctx": "import", "choices": ["os", "Füße"], "gold": 0}
    (tmp_path / "piqa_val.jsonl").write_text((json.dumps(record) + "\n") * 18)
    (tmp_path / "lambada_openai_test.jsonl").write_text('{"ctx": "class Foo: pass", "target": "x"}\n')
    words = ("eval", run, "--tasks", "piqa,lambada,heldout", "--data", tmp_path, "--limit", 16)
    said = json.loads(atoll(*words, "--json"))
    assert said["run"] == str(run)
    piqa, lambada, heldout = said["results"]
    assert (piqa["task"], piqa["examples"], piqa["file"], piqa["acc_stderr"]) == ("piqa", 16, "piqa_val.jsonl", 0.0)
    assert piqa["acc"] in (0.0, 1.0)
    assert lambada["perplexity"] > 1.0
    task = language_task(load(run / "config.toml"))
    assert heldout["loss"] == pytest.approx(task.evaluate(open_trained(run).model))
    assert heldout["examples"] == 2 * load(run / "config.toml").data.batch_size == 16  # sequences, not batches
    table = atoll(*words)
    assert "piqa" in table and "perplexity" in table and f"{heldout['loss']:.4f}" in table


def test_eval_counts_the_heldout_sequences_there_are_where_more_are_asked_for(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "theta.safetensors", tmp_path)
    config = load(run / "config.toml", overrides={"data": {"max_bytes": 20_000, "heldout_batches": 10_000}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    (heldout,) = json.loads(atoll("eval", tmp_path, "--json"))["results"]
    tokens = text_data(config.data).tokens.heldout.numel()
    assert heldout["examples"] == (tokens - 1) // config.data.seq_len < 10_000


def test_eval_refuses_unknown_tasks_and_missing_files_before_it_loads_anything(tmp_path: Path) -> None:
    unknown = refusal("eval", tmp_path, "--tasks", "piqa,mmlu", "--data", tmp_path)
    assert unknown.startswith("--tasks mmlu: no such task; there are hellaswag, piqa, ")
    assert refusal("eval", tmp_path, "--tasks", "piqa").startswith("--data: name the folder")
    assert "has no file piqa.jsonl or piqa_val.jsonl" in refusal("eval", tmp_path, "--tasks", "piqa", "--data", tmp_path)


def test_commands_end_with_exit_code_2_and_one_sentence(tmp_path: Path) -> None:
    done = command.atoll("export", "nowhere", "--hf", "out", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("atoll: run nowhere: no run is there; give a run's folder")


def test_run_that_never_trained_ends_with_exit_code_2(run: Path, tmp_path: Path) -> None:
    cut_run(tmp_path / "never", run)
    done = command.atoll("eval", "never", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("atoll: run never: holds only the weights it began with") and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- torch.distributed.checkpoint


def test_exported_weights_begin_another_run(run: Path, tmp_path: Path) -> None:
    """From its own end the next run has the loss at its beginning, whichever format the weights went through."""
    written = atoll("export", run, "--dcp", tmp_path / "dcp")
    assert ".metadata" in written and ".distcp" in written
    (ended,) = (result["loss"] for result in json.loads(atoll("eval", run, "--json"))["results"])
    (tmp_path / "small.toml").write_text((run / "config.toml").read_text())
    for init in (f"dcp:{tmp_path / 'dcp'}", str(run / "theta.safetensors")):
        words = ("train", tmp_path / "small.toml", "--virtual", "--init", init, "--out", tmp_path / str(len(init)), "--json")
        summary = json.loads(atoll(*words))
        assert summary["loss_first"] == ended


def test_export_asks_for_one_format(run: Path, tmp_path: Path) -> None:
    assert "give --hf DIR or --dcp DIR" in refusal("export", run)
    assert "give --hf DIR or --dcp DIR" in refusal("export", run, "--hf", tmp_path / "a", "--dcp", tmp_path / "b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "exists and is not an empty folder" in refusal("export", run, "--dcp", tmp_path / "full")
