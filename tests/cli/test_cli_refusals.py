"""What cannot work is told before anything is loaded, started or trained, in one sentence; what is done is never written over."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import msgspec
import pytest
from typer.testing import CliRunner

from atoll.cli import resume
from atoll.cli.app import app
from atoll.cli.progress import RunProgress
from atoll.config import load, to_toml
from atoll.config.sections import IMAGE_MODELS
from atoll.errors import RunFailed, UserError
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import DeadlinePassed, Refuse, SyncerState
from atoll.runtime.local.cluster import LocalCluster, error_of
from atoll.runtime.local.failure import Failure
from atoll.store.durable import DurableVersions
from atoll.store.snapshots import begin_syncer, seal_syncer
from atoll.store.tokenizer_file import write_tokenizer_file
from atoll.tasks.task import initial_versions, language_task
from atoll.tasks.vision import VISION_MODELS
from atoll.views.run import RunView, Summary, TokenCounts
from atoll.workload.data.tokenizer import BpeTokenizer

SMALL = [
    "total_steps=4", "learners=2", "data.seq_len=16", "data.batch_size=2", "data.max_bytes=200000", "data.heldout_batches=2",
    "model.numbers={width=16, layers=2, heads=2, mlp=24}",
]  # fmt: skip
TINY = [word for key in SMALL for word in ("--set", key)]
FEW = ["--set", "protocol.fragments=4", "--set", "protocol.local_steps_per_round=4"]
OWN = "own_words:make"
OWN_MODEL = """
from torch import nn

def make(vocab, width, **_):
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, vocab))
"""


pytestmark = pytest.mark.usefixtures("elsewhere")


def atoll(*words: object) -> str:
    """Everything it says; an error comes out as it is."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None:
        raise done.exception
    return done.output


def refusal(*words: object) -> str:
    """One sentence, and before it nothing but what is odd about the config."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, UserError), done.output
    assert all(line.startswith("warning: ") for line in done.output.splitlines()) and "\n" not in str(done.exception)
    return str(done.exception)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "own_words.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return [*TINY, "--set", f"model.name={OWN}", "--set", "protocol.fragments=2"]


# ---------------------------------------------------------------- --out


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--virtual"], ["train"], ["train", "--preset", "ddp"], ["sim"], ["simulate", "tape"],
        ["compare", "diloco", "ddp", "--virtual"], ["compare", "diloco", "ddp"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.usefixtures("unbuilt")
def test_folder_that_is_not_empty_is_refused_before_anything_is_loaded(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("mine")
    assert refusal(*command, "--out", "run") == "--out run: is not empty; choose a new folder"
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]
    for path in ("run/config.toml", "run/config.toml/x"):
        assert refusal(*command, "--out", path) == f"--out {path}: run/config.toml is not a folder; choose a new one"


@pytest.mark.usefixtures("unbuilt")
def test_port_for_weights_that_is_taken_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("syncer", *TINY, "--dir", "new", "--bulk-port", port, "--listen")
        assert refusal(*words, "127.0.0.1:0").startswith(f"cannot listen on 127.0.0.1:{port}: ")
        assert refusal(*words, f"127.0.0.1:{port}").startswith(f"--bulk-port {port}: is the port of --listen; ")


def test_training_on_a_tape_does_not_write_over_a_folder_either(tmp_path: Path) -> None:
    atoll("sim", *TINY, *FEW, "--out", "history")
    assert refusal("train", "--tape", "history", "--out", "history").startswith("--out history: ")


def test_empty_folder_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    atoll("sim", *TINY, *FEW, "--out", "run")
    assert (tmp_path / "run" / "run.tape").exists()


@pytest.mark.usefixtures("unbuilt")
def test_twins_folder_is_looked_at_before_the_first_of_the_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run-twin").mkdir()
    (tmp_path / "run-twin" / "x").touch()
    said = refusal("train", "--chaos", "random:1:1:1", "--twin", "--out", "run")
    assert said.startswith("--out run-twin: ")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    said = refusal("train", "--chaos", "random:1:1:1", "--twin", "--out", ".")
    assert said.startswith(f"--out {tmp_path}/run-twin: ")


# ---------------------------------------------------------------- before processes are started


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "rubbish"], "--device rubbish: cannot be used here"),
        (["--device", "rubbish", "--preset", "ddp"], "device 'rubbish': must be cpu, cuda or cuda:N"),
        (["--preset", "ddp", "--set", "protocol.codec_up=bf16"], "key protocol.codec_up = 'bf16': the all-reduce"),
        (["--set", "model.numbers.context=4"], "key model.numbers.context = 4: must be at least data.seq_len = 64"),
        (["--set", "model.name=custom"], "key model.name = 'custom': the learners have the code"),
        (["--virtual", "--set", "model.name=custom"], "key model.name = 'custom': the learners have the code"),
        (["--twin"], "--twin: runs the same again without faults; give faults with --chaos"),
        (["--tape", "h", "--snapshot", "3"], "--tape: goes with"),
        (["--resume", "nope"], "--resume nope: no run is there"),
    ],
)
@pytest.mark.usefixtures("unbuilt")
def test_train_refuses_before_it_builds_and_leaves_no_folder(words: list[str], sentence: str, tmp_path: Path) -> None:
    assert refusal("train", *words, "--out", "run").startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_plan_without_faults_leaves_nothing_to_compare_a_twin_with(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    assert refusal("train", "--twin", "--chaos", "plan.toml").startswith("--twin: runs the same again without faults")


def test_custom_model_on_a_tape_is_refused_as_in_a_live_run(tmp_path: Path) -> None:
    atoll("sim", *TINY, *FEW, "--out", "history")
    assert "learners have the code" in refusal("train", "--tape", "history", "--set", "model.name=custom")


def test_image_models_of_the_config_are_those_that_are_built() -> None:
    assert set(IMAGE_MODELS) == set(VISION_MODELS)


def test_run_fails_by_what_a_process_reported_and_not_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("atoll: a line that begins like a refusal\n")
    refused = error_of(0, 2, Failure("key a = 1: is no b", users_fault=True), log)
    assert isinstance(refused, UserError) and str(refused) == "key a = 1: is no b"
    for code, failure in ((1, Failure("the disk is full", users_fault=False)), (2, None), (-9, None)):
        failed = error_of(0, code, failure, log)
        assert isinstance(failed, RunFailed) and str(log) in str(failed)


# ---------------------------------------------------------------- going on


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A live run of 40 outer steps with a snapshot of the last."""
    run = tmp_path / "stopped"
    config = load(preset_name="decoupled", assignments=[*SMALL[1:], "total_steps=40", "protocol.fragments=4"])
    disk = DurableVersions.create(run / "syncer", initial_versions(language_task(config)))
    syncer_state = SyncerState(40, ((0,),) * 4, ((0, 3), (1, 3)), (), ())
    begin_syncer(run / "syncer", 40, disk, msgspec.json.encode(syncer_state))
    seal_syncer(run / "syncer", 40, (), complete=True, keep=3, config=msgspec.to_builtins(config))
    (run / "config.toml").write_text(to_toml(config))
    return run


@pytest.mark.parametrize("steps", [40, 12])
@pytest.mark.usefixtures("unbuilt")
def test_resumed_run_that_has_nothing_left_to_do_is_refused(stopped: Path, steps: int) -> None:
    wanted = f"key total_steps = {steps}: the snapshot in {stopped} is of step 40 already; give more"
    assert refusal("train", "--resume", stopped, "--set", f"total_steps={steps}") == wanted


@pytest.mark.usefixtures("unbuilt")
def test_syncer_that_resumes_a_snapshot_with_nothing_left_to_do_is_refused(stopped: Path, tmp_path: Path) -> None:
    part = stopped / "syncer" / "snapshots" / "40"
    said = refusal("syncer", stopped / "config.toml", "--resume", part, "--dir", "new", "--listen", "127.0.0.1:0")
    assert said == f"key total_steps = 40: the snapshot in {part} is of step 40 already; give more"
    assert not (tmp_path / "new").exists()


def seal_another(run: Path, snapshot: int, learners: tuple[int, ...] = (), *, complete: bool = True) -> Path:
    config = load(run / "config.toml")
    syncer_state = SyncerState(snapshot, ((0,),) * 4, ((0, 3), (1, 3)), (), ())
    begin_syncer(run / "syncer", snapshot, DurableVersions.open(run / "syncer"), msgspec.json.encode(syncer_state))
    seal_syncer(run / "syncer", snapshot, learners, complete=complete, keep=9, config=msgspec.to_builtins(config))
    return run / "syncer" / "snapshots" / str(snapshot)


@pytest.mark.parametrize("how", ["shorter", "manifest", "flipped"])
@pytest.mark.usefixtures("unbuilt")
def test_run_with_a_damaged_newest_snapshot_does_not_resume_an_older_one_unasked(stopped: Path, how: str) -> None:
    part = seal_another(stopped, 60)
    hurt = next(path for path in sorted((part / "versions").iterdir()) if path.is_file())
    hurt = part / "manifest.json" if how == "manifest" else hurt
    flipped = hurt.read_bytes()[:-1] + bytes([hurt.read_bytes()[-1] ^ 1])
    hurt.unlink()  # versions are hard links: the other snapshot's must stay as they are
    hurt.write_bytes({"shorter": flipped[:-10], "manifest": b"{", "flipped": flipped}[how])
    said = refusal("train", "--resume", stopped, "--set", "total_steps=80")
    assert said.startswith(f"run {stopped}: snapshot 60 is damaged: {hurt}")
    assert said.endswith("; give --snapshot 40 to resume from that one")
    assert "of step 40 already" in refusal("train", "--resume", stopped, "--snapshot", "40", "--set", "total_steps=40")


@pytest.mark.usefixtures("unbuilt")
def test_snapshot_that_was_given_up_is_not_the_newest(stopped: Path) -> None:
    seal_another(stopped, 60, complete=False)
    assert "of step 40 already" in refusal("train", "--resume", stopped, "--set", "total_steps=40")


@pytest.mark.usefixtures("unbuilt")
def test_damaged_part_of_a_learner_is_refused_by_its_path_and_a_missing_one_is_not(stopped: Path) -> None:
    seal_another(stopped, 60, (0,))
    assert "of step 60 already" in refusal("train", "--resume", stopped, "--set", "total_steps=60")
    part = stopped / "learners" / "0" / "snapshots" / "60"
    assert [*resume.what_is_resumed(stopped, 60)][1] == f"warning: {part} is missing: its learner joins as a newcomer"
    part.mkdir(parents=True)
    (part / "manifest.json").write_text("{")
    assert str(part) in refusal("train", "--resume", stopped, "--set", "total_steps=80")


def test_resumed_run_keeps_its_preset(stopped: Path, tmp_path: Path) -> None:
    wanted = f"--preset diloco: the run in {stopped} has preset 'decoupled', and a resumed run keeps it; leave --preset out"
    assert refusal("train", "--resume", stopped, "--preset", "diloco", "--set", "total_steps=50") == wanted
    (tmp_path / "recipe.toml").write_text("learners = 2\n")
    assert refusal("train", "recipe.toml", "--resume", stopped, "--preset", "diloco", "--set", "total_steps=50") == wanted
    assert "of step 40 already" in refusal("train", "--resume", stopped, "--preset", "decoupled")


def test_recipe_of_another_preset_resumes_nothing(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('preset = "fedavg"\nlearners = 2\n')
    said = refusal("train", "recipe.toml", "--resume", stopped, "--set", "total_steps=50")
    kept = f"the run in {stopped} has preset 'decoupled', and a resumed run keeps it"
    assert said == f"recipe recipe.toml has preset 'fedavg': {kept}; leave the recipe out, or give --preset too"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("data.batch_size=4", "key data.batch_size = 4: the resumed run had 2, and a position in its data is"),
        ("outer.outer_optimizer=delayed_nesterov", "key outer.outer_optimizer = 'delayed_nesterov': the resumed run had"),
        ("protocol.local_steps_per_round=12", "key protocol.local_steps_per_round = 12: the resumed run had 24, and"),
        ("protocol.ramp=0.5", "key protocol.ramp = 0.5 of total_steps = 50: the resumed run ramps over its first 0"),
    ],
)
@pytest.mark.usefixtures("unbuilt")
def test_key_that_a_snapshot_was_counted_by_is_refused_before_anything_is_built(
    stopped: Path, tmp_path: Path, change: str, wanted: str
) -> None:
    changed = ["--set", "total_steps=50", "--set", change]
    assert refusal("train", "--resume", stopped, *changed, "--out", "new").startswith(wanted)
    part = stopped / "syncer" / "snapshots" / "40"
    said = refusal("syncer", stopped / "config.toml", "--resume", part, "--dir", "new", "--listen", "127.0.0.1:0", *changed)
    assert said.startswith(wanted)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("unbuilt")
def test_snapshot_of_more_streams_than_members_may_be_is_refused(stopped: Path) -> None:
    """A learner that goes on with units of stream 1 would name data that cannot be, and never be let in."""
    said = refusal("train", "--resume", stopped, "--learners", 1, "--set", "limits.members_max=1", "--set", "total_steps=50")
    assert said.startswith("key limits.members_max = 1: the snapshot in ") and said.endswith("names learner 1; give at least 2")


def test_refused_resumption_ends_with_code_2(stopped: Path) -> None:
    done = command.atoll("train", "--resume", stopped, "--set", "data.seq_len=8", "--set", "total_steps=50", cwd=stopped)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("atoll: key data.seq_len = 8: the resumed run had 16, and")


def test_other_tokenizer_is_told_before_there_is_a_folder(stopped: Path, tmp_path: Path) -> None:
    task = language_task(load(stopped / "config.toml"))
    write_tokenizer_file(stopped / "syncer", replace(task, tokenizer=BpeTokenizer([(97, 98)])))
    said = CliRunner().invoke(app, ["train", "--resume", str(stopped), "--set", "total_steps=50", "--out", "new"]).exception
    assert isinstance(said, UserError) and "was trained under another tokenizer than data.tokenizer = 'bytes' gives" in str(said)
    assert not (tmp_path / "new").exists()


def test_standstill_by_poison_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(assignments=["learners=2"])
    flaw = Refuse(1, Reason(Why.POISONED, "bytes that cannot be read: it is empty: the learner found NaN or Inf in it"), False)
    with RunProgress(config, RunView(2), quiet=False, clock="") as progress:
        for _ in range(9):
            progress(0, SYNCER, DeadlinePassed(), [flaw])
        assert "NaN" not in capsys.readouterr().out, "a learner may recover"
        for _ in range(9):
            progress(0, SYNCER, DeadlinePassed(), [flaw])
    said = capsys.readouterr().out.replace("\n", " ")
    assert said.count("no step since 10 updates were refused") == 1
    assert "the learner found NaN or Inf in it); lower inner.learning_rate" in said


def test_folder_that_is_no_runs_is_told_with_a_recipe_too(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("learners = 2\n")
    assert refusal("train", "recipe.toml", "--resume", "nope").startswith("--resume nope: no run is there")


def test_written_out_config_is_compared_with_no_other_preset(stopped: Path) -> None:
    path = stopped / "config.toml"
    wanted = f"preset = 'diloco': {path} is for preset 'decoupled'"
    assert refusal("compare", "diloco", "decoupled", "--recipe", path).startswith(wanted)
    assert refusal("config", path, "--preset", "diloco").startswith(wanted)


def test_twin_of_a_resumed_run_is_resumed_too(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Any] = []

    def run_live(*words: Any, **more: Any) -> Summary:
        began.append((words[1].faults != (), words[-1]))
        words[2].mkdir()
        return summary("decoupled", words[2])

    monkeypatch.setattr("atoll.cli.train.run_live", run_live)
    plan = ["--chaos", "random:1:1:1", "--twin"]
    atoll("train", "--resume", stopped, *plan, "--set", "total_steps=50", "--out", "run")
    assert began == [(True, (stopped, 40)), (False, (stopped, 40))]


# ---------------------------------------------------------------- models of one's own


def test_own_model_trains_in_virtual_time_on_a_tape_too_and_replays(own: list[str], tmp_path: Path) -> None:
    said = refusal("train", "--virtual", *own, "--out", "run")
    assert said == f"key model.name = {OWN!r}: is your own code; allow it here with --allow-model {OWN}"
    atoll("train", "--virtual", *own, "--allow-model", OWN, "--out", "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss_final"] > 0
    assert "every Theta as recorded" in atoll("replay", "run", "--weights", "--allow-model", OWN)
    atoll("train", "--tape", "run", "--allow-model", OWN, "--out", "again")
    assert (tmp_path / "again" / "theta.safetensors").exists()
    said = refusal("export", "run", "--hf", "hf")
    assert said == f"run run: model.name = {OWN!r} has no Hugging Face architecture; only 'decoder' has one"


def test_comparison_hands_what_is_allowed_to_every_run(own: list[str], tmp_path: Path) -> None:
    assert "allow it here with --allow-model" in refusal("compare", "diloco", "ddp", "--virtual", *own)
    assert "ddp" in atoll("compare", "diloco", "ddp", "--virtual", *own, "--allow-model", OWN)


def test_ranks_of_data_parallel_are_told_what_is_allowed(own: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def run_ddp(*_: Any, allowed: Any, **more: Any) -> None:
        given.append(allowed)
        raise RunFailed("enough")

    monkeypatch.setattr("atoll.runtime.ddp.launch.run_ddp", run_ddp)
    words = ["train", "--preset", "ddp", *own, "--out", "run"]
    assert "allow it here with --allow-model" in refusal(*words)
    with pytest.raises(RunFailed, match="enough"):
        atoll(*words, "--allow-model", OWN)
    assert given == [[OWN]] and not (tmp_path / "run").exists()


def test_permission_that_is_not_needed_does_no_harm(tmp_path: Path) -> None:
    atoll("train", "--virtual", *TINY, *FEW, "--allow-model", OWN, "--out", "run")


# ---------------------------------------------------------------- comparisons


def summary(preset: str, directory: Path) -> Summary:
    return Summary(
        preset=preset, learners=2, seed=0, total_steps=4, goodput=1.0, uptime=1.0, waited_seconds=0.0, participants={},
        tokens=TokenCounts(0, 0, 0, 0, {}), recoveries=[], bytes_up=1, bytes_down=1, loss_first=3.0, loss_final=2.5,
        theta_sha256=None, tape=None, run_dir=str(directory), clock="wall", seconds=1.0, fragments=1,
    )  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Runs are over as soon as they begin; `streaming` fails."""
    names: list[str] = []

    def run_virtually(settings: Any, plan: Any, directory: Path, **_: Any) -> Summary:
        if settings.preset == "streaming":
            raise RunFailed("streaming ended badly")
        names.append(settings.preset)
        return summary(settings.preset, directory)

    monkeypatch.setattr("atoll.cli.compare.run_virtually", run_virtually)
    yield names


@pytest.mark.usefixtures("unbuilt")
def test_figure_that_cannot_be_drawn_is_told_before_the_first_run(ran: list[str]) -> None:
    said = refusal("compare", "diloco", "--virtual", "--figure", "plot.gif2")
    assert (said, ran) == ("figure plot.gif2: its name must end in .png or .svg", [])


def test_table_is_printed_before_the_figure_is_drawn(ran: list[str]) -> None:
    done = CliRunner().invoke(app, ["compare", "diloco", "--virtual", *TINY, "--figure", "nowhere/plot.png"])
    assert isinstance(done.exception, UserError) and "2.5000" in done.stdout


def test_preset_that_cannot_be_built_is_told_before_the_first_run(ran: list[str], tmp_path: Path) -> None:
    said = refusal("compare", "diloco", "decoupled", "--virtual", *TINY, "--set", "model.numbers.layers=1", "--out", "both")
    assert said.startswith("section protocol: fragments = 24 is more than the 14 trainable tensors") and ran == []
    assert not (tmp_path / "both").exists()


def test_live_comparison_looks_at_what_torch_can_do_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "run", lambda _: pytest.fail("started"))
    said = refusal("compare", "diloco", "ddp", *TINY, "--set", "protocol.codec_up=bf16")
    assert said.startswith("key protocol.codec_up = 'bf16': the all-reduce")


@pytest.mark.parametrize("as_json", [False, True])
def test_comparison_that_breaks_off_shows_what_is_done_and_then_fails(ran: list[str], as_json: bool, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[for.streaming.protocol]\nlayers_per_fragment = 1\n")
    words = ["compare", "diloco", "streaming", "ddp", "--virtual", "--recipe", "recipe.toml", *TINY]
    done = CliRunner().invoke(app, [*words, "--json"] if as_json else words)
    assert isinstance(done.exception, RunFailed) and ran == ["diloco"]
    if as_json:
        assert [each["preset"] for each in json.loads(done.stdout)] == ["diloco"]
    else:
        assert "diloco" in done.stdout and "2.5000" in done.stdout


def test_rollback_names_what_it_can_and_cannot_return_to(tmp_path: Path) -> None:
    """Of a virtual run nothing; of a folder without a run nothing either."""
    done = CliRunner().invoke(app, ["sim", "--set", "total_steps=5", "--set", "learners=2", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    for folder, word in ((tmp_path / "run", "virtual"), (tmp_path, "no run is there")):
        with pytest.raises(UserError, match=word):
            CliRunner().invoke(app, ["rollback", str(folder), "--to", "3"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["syncer", "--shard-at", "10.0.0.2:7177"], "give --keys DIR"),
        (["syncer", "--shard-at", "10.0.0.2", "--keys", "keys"], "must be host:port"),
        (["syncer", "--shard-at", "a:1", "--shard-at", "a:1", "--keys", "keys"], "names a shard twice"),
        (["syncer", "--shard-at", "a:0", "--keys", "keys"], "give the port that `atoll shard` says"),
        (["syncer", "--shard-at", "127.0.0.1:1", "--listen", "0.0.0.0:7077", "--keys", "keys"], "or --hide-shards"),
        (["syncer", "--hide-shards"], "--hide-shards: is for shards on other machines"),
        (["syncer", "--hide-shards", "--shards", "2"], "--hide-shards: is for shards on other machines"),
        (["syncer", "--shard-at", "a:1", "--shards", "3", "--keys", "keys"], "leave --shards out"),
        (["shard", "--dir", "new"], "--listen: is missing"),
        (["shard", "--dir", "new", "--listen", "127.0.0.1:0"], "atoll keys --shards"),
        (["shard", "--dir", "new", "--listen", "127.0.0.1:0", "--keys", "none"], "shard-0.pem: no such file"),
        (["train", *TINY, "--virtual", "--shards", "2"], "does not go with --virtual"),
        (["train", *TINY, "--preset", "ddp", "--shards", "2"], "has no syncer"),
    ],
)
def test_shards_that_cannot_be(words: list[str], says: str) -> None:
    assert says in refusal(*words)
    assert not Path("new").exists()
