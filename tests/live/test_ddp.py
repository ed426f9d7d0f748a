"""Torch's own data-parallel training in real processes: what it trains, and how it ends when one of them does."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.chaos import ChaosPlan
from atoll.config import Config, load, to_toml
from atoll.errors import ConfigError, RunFailed, TapeError, UserError
from atoll.protocol.vocabulary import StepDone, Stored
from atoll.runtime.ddp.launch import check_supported, run_ddp
from atoll.runtime.ddp.report import DdpOutcome, RankReport, StepFold, Stepped, summary_of
from atoll.runtime.doctor.examine import examine
from atoll.runtime.watch.answers import RunState, Status
from atoll.runtime.watch.source import WatchedRun
from atoll.sim.run import Outputs, config_on_tape, run_virtual
from atoll.tape.folder import RunFolder
from atoll.tape.format import Tape
from atoll.tape.heldout import HeldoutPoint
from atoll.tape.replay import replay
from atoll.tape.weave import open_run
from atoll.views.index.build import build_index
from atoll.views.index.files import IndexReader
from atoll.views.index.rows import LaneState
from atoll.views.run import RunView
from atoll.views.strip import strip_lines

FOREVER = 1_000_000
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc and pidfd")


def tiny(total_steps: int = 8, **sections: Any) -> Config:
    overrides = {
        "total_steps": total_steps, "learners": 2, "data": {"batch_size": 2, "seq_len": 16, "max_bytes": 400_000},
        "model": {"numbers": {"width": 16, "mlp": 32}}, "inner": {"accumulate": 2},
    }  # fmt: skip
    return load(preset_name="ddp", overrides=overrides | sections)


def ranks_of(directory: Path) -> dict[int, int]:
    """Rank to process id, of all ranks of the run in this folder that are alive."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended since
            continue
        if "atoll.runtime.ddp.launch" in words and str(directory) in words:
            found[int(words[words.index(str(directory)) + 1])] = int(path.parent.name)
    return found


# ---------------------------------------------------------------- what it trains


@dataclass(frozen=True)
class Trained:
    """A run of two ranks, what it reported on its way, and the virtual run of the same config."""

    config: Config
    directory: Path
    outcome: DdpOutcome
    steps: list[tuple[int, float | None]]
    points: list[HeldoutPoint]
    virtual: Outputs
    virtual_directory: Path
    watched: list[Status]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory, virtual = tmp_path_factory.mktemp("ddp") / "a run", tmp_path_factory.mktemp("virtual")
    config = tiny(data={"batch_size": 2, "seq_len": 16, "max_bytes": 400_000, "heldout_every": 3})
    steps: list[tuple[int, float | None]] = []
    points: list[HeldoutPoint] = []
    run = WatchedRun(RunFolder(directory, directory))
    watched = [run.status()]

    def progress(step: int, loss: float | None) -> None:
        steps.append((step, loss))
        watched.append(run.status())

    outcome = run_ddp(config, directory, threads=1, progress=progress, on_point=points.append)
    watched.append(run.status())
    return Trained(
        config, directory, outcome, steps, points, run_virtual(config, ChaosPlan(), virtual, tensors=True), virtual, watched
    )


def test_heldout_points_are_those_of_the_virtual_preset_and_no_part_of_the_time(trained: Trained) -> None:
    outcome = trained.outcome
    assert trained.points == list(outcome.points) == summary_of(trained.config, outcome, trained.directory).heldout
    assert [(point.outer_step, point.loss) for point in trained.points] == [
        (point.outer_step, pytest.approx(point.loss, rel=1e-4)) for point in trained.virtual.points
    ]
    assert [point.outer_step for point in trained.points] == [3, 6]
    assert outcome.uptime <= 1 and outcome.goodput <= 1


def test_two_processes_train_what_the_virtual_preset_trains(trained: Trained) -> None:
    outcome, virtual = trained.outcome, trained.virtual
    assert outcome.loss_first == pytest.approx(virtual.loss_first, abs=1e-4)
    assert outcome.loss_final == pytest.approx(virtual.loss_final, abs=1e-4)
    assert outcome.loss_final < outcome.loss_first
    live, simulated = (load_file(where / "theta.safetensors") for where in (trained.directory, trained.virtual_directory))
    assert live.keys() == simulated.keys()
    for name, tensor in live.items():
        assert torch.linalg.vector_norm(tensor - simulated[name]) <= 1e-5 * torch.linalg.vector_norm(simulated[name]), name


@pytest.mark.soak
def test_ranks_merge_the_statistics_of_batch_norm_as_the_virtual_preset_does(tmp_path: Path) -> None:
    data, model = {"corpus": "digits", "batch_size": 4}, {"name": "resnet18", "numbers": {"width": 4, "depth": 1}}
    config = tiny(3, data=data, model=model)
    outcome = run_ddp(config, tmp_path / "live", threads=1)
    virtual = run_virtual(config, ChaosPlan(), tmp_path / "virtual", tensors=True)
    live, simulated = (load_file(tmp_path / kind / "theta.safetensors") for kind in ("live", "virtual"))
    for name, tensor in live.items():
        torch.testing.assert_close(tensor, simulated[name], rtol=1e-3, atol=1e-4, msg=name)
    assert int(live["stem_norm.num_batches_tracked"]) == 6  # two micro-batches in each of three steps
    assert summary_of(config, outcome, tmp_path).accuracy == pytest.approx(virtual.accuracy, abs=0.02)


@pytest.mark.soak
def test_model_of_ones_own_is_trained_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank finds wrong with the user's input is raised as the user's."""
    (tmp_path / "own_ranks.py").write_text(
        "from torch import nn\n\n"
        "def make(vocab, width, **_):\n    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, vocab))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = tiny(2, learners=1, model={"name": "own_ranks:make", "numbers": {"width": 16}})
    with pytest.raises(UserError, match="is your own code; allow it here with --allow-model own_ranks:make"):
        run_ddp(config, tmp_path / "refused", threads=1)
    outcome = run_ddp(config, tmp_path / "run", threads=1, allowed=["own_ranks:make"])
    assert outcome.loss_first is not None and outcome.loss_final is not None and outcome.loss_final < outcome.loss_first


def test_outcome_adds_up_and_fits_a_summary(trained: Trained) -> None:
    directory, outcome = trained.directory, trained.outcome
    numbers = sum(tensor.numel() for tensor in load_file(directory / "theta.safetensors").values())
    assert [step for step, _ in trained.steps] == list(range(1, 9))
    assert all(loss is not None and 0 < loss < 10 for _, loss in trained.steps)
    assert outcome.tokens == 8 * 2 * 2 * 2 * 16, "steps, ranks, micro-batches, samples, tokens"
    assert outcome.bytes_up == outcome.bytes_down == 2 * 8 * numbers * 4, "a ring of two sends every gradient once, as fp32"
    assert 0 < outcome.goodput < 1 and outcome.goodput <= outcome.uptime <= 1
    spent = sum(rank.stepping_seconds + rank.waited_seconds for rank in outcome.ranks)
    assert spent <= 2 * outcome.seconds
    assert outcome.goodput == pytest.approx((spent - outcome.waited_seconds) / (2 * outcome.seconds))
    summary = summary_of(trained.config, outcome, directory)
    assert (summary.preset, summary.total_steps, summary.participants) == ("ddp", 8, {"2": 8})
    assert summary.tokens.trained == summary.tokens.merged == outcome.tokens
    assert summary.theta_sha256 == outcome.theta_sha256


def test_tape_has_every_step_and_loss_of_every_rank(trained: Trained) -> None:
    tape = Tape(trained.directory / "run.tape")
    records = list(tape.records())
    assert not tape.cut and [r.now for r in records] == sorted(r.now for r in records) and records[0].now >= 0
    done = [(r.worker, r.event) for r in records if isinstance(r.event, StepDone)]
    losses = [[e.loss for rank, e in done if rank == wanted] for wanted in (0, 1)]
    assert [pytest.approx(loss) for _, loss in trained.steps] == [(a + b) / 2 for a, b in zip(*losses, strict=True)]
    view = RunView(2, from_first_step=True).feed(records)
    outcome = trained.outcome
    assert (dict(view.participants), view.outer_step, view.tokens_done) == ({2: 8}, 8, outcome.tokens)
    assert view.waited / 1e9 == pytest.approx(outcome.waited_seconds, abs=1e-6)
    assert sum(e.samples for _, e in done) == 8 * 2 * 2 * 2, "steps, ranks, micro-batches, samples"
    assert summary_of(trained.config, outcome, trained.directory).tape == str(tape.path)


def test_strip_and_doctor_read_the_tape_and_replay_says_why_it_does_not(trained: Trained) -> None:
    lines = list(strip_lines(open_run(trained.directory).records()))
    assert len(lines) == 8 * 4 and "round 1 {0} by {0,1}; merge 0@1 of 2" in lines[0]
    assert not examine(trained.directory).problems
    with pytest.raises(TapeError, match=r"run\.tape: is of torch's data-parallel training, which no machine decides"):
        replay(open_run(trained.directory))
    with pytest.raises(UserError, match=r"is of torch's data-parallel training; --tape takes a virtual run's"):
        config_on_tape(Tape(trained.directory / "run.tape"), {}, [])


def test_page_shows_it_live_and_after_its_end(trained: Trained) -> None:
    before, *live, after = trained.watched
    assert (before.state, after.state) == (RunState.STARTING, RunState.FINISHED)
    assert [(status.state, status.rounds) for status in live] == [(RunState.LIVE, step) for step, _ in trained.steps]
    assert [status.loss for status in live] == [pytest.approx(loss) for _, loss in trained.steps]
    assert not after.virtual and [lane.state for lane in after.lanes] == [LaneState.TRAINING] * 2
    index = IndexReader(trained.directory / "index")
    rows = index.rows(0, index.rounds)
    assert all(row.merged == (0, 1) and row.text == "all 2 ranks reduced their gradients" for row in rows)
    assert rows[-1].fates.trained == rows[-1].fates.merged == trained.outcome.tokens
    waited = sum(lane.nanos[LaneState.WAITING] for row in rows for lane in row.learners)
    assert waited / 1e9 == pytest.approx(trained.outcome.waited_seconds, rel=0.05)


def test_index_built_from_the_tape_is_the_one_that_was_appended(trained: Trained, tmp_path: Path) -> None:
    build_index(Tape(trained.directory / "run.tape"), tmp_path)
    appended = trained.directory / "index"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in appended.iterdir()
    }


def test_folder_holds_the_config_and_a_report_a_rank_and_is_not_used_twice(trained: Trained) -> None:
    directory = trained.directory
    assert (directory / "config.toml").read_text() == to_toml(trained.config)
    assert {path.name for path in directory.glob("rank-*.json")} == {"rank-0.json", "rank-1.json"}
    assert not (directory / "rendezvous").exists()
    with pytest.raises(UserError, match=rf"^--out {re.escape(str(directory))}: "):
        run_ddp(tiny(), directory, threads=1)


def test_uptime_counts_only_what_all_ranks_waited_at_once() -> None:
    fold = StepFold(2)
    assert fold.add(Stepped(0, 0, 10, 40, 50, 3.0)) is None
    assert fold.add(Stepped(0, 5, 30, 45, 50, 5.0)) == 4.0
    assert (fold.first, fold.last, fold.all_waiting, fold.steps) == (0, 50, 10, 1)


# ---------------------------------------------------------------- how it ends


@on_linux
def test_killed_rank_ends_the_run_with_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    def kill_one(step: int, _: float | None) -> None:
        if step == 3:
            os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"^ddp: rank 1 was killed by signal 9, and data-parallel training cannot go on"):
        run_ddp(tiny(FOREVER), tmp_path, threads=1, progress=kill_one)
    assert ranks_of(tmp_path) == {}
    tape = Tape(tmp_path / "run.tape")
    assert sum(isinstance(r.event, Stored) for r in tape.records()) >= 3 and tape.cut, "it did not end"


@pytest.mark.soak
@on_linux
def test_interrupt_ends_every_rank(tmp_path: Path) -> None:
    def interrupt(step: int, _: float | None) -> None:
        assert set(ranks_of(tmp_path)) == {0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ddp(tiny(FOREVER, learners=1), tmp_path, threads=1, progress=interrupt)
    assert ranks_of(tmp_path) == {}


@pytest.mark.soak
@on_linux
def test_ranks_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny(FOREVER, learners=1)))
    program = (
        "import sys; from pathlib import Path; from atoll.config import load; from atoll.runtime.ddp.launch import run_ddp\n"
        "say = lambda step, loss: step > 1 or print(step, flush=True)\n"
        "run_ddp(load(Path(sys.argv[1])), Path(sys.argv[2]), threads=1, progress=say)"
    )
    with subprocess.Popen([sys.executable, "-c", program, recipe, tmp_path / "run"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"1\n"
        pids = ranks_of(tmp_path / "run")
        handles = [os.pidfd_open(pid) for pid in pids.values()]
        parent.kill()
    assert len(handles) == 1
    for handle in handles:  # readable once the process has ended
        assert select.select([handle], [], [], 10.0)[0]
        os.close(handle)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("data.samples_by_learner", {"data": {"samples_by_learner": [2, 3]}}),
        ("protocol.fragmentation", {"protocol": {"fragmentation": "balanced", "fragments": 2}}),
        ("protocol.codec_up", {"protocol": {"codec_up": "bf16"}}),
        ("protocol.aggregation_weighting", {"protocol": {"aggregation_weighting": "tokens"}}),
        ("protocol.elastic", {"protocol": {"elastic": True}}),
        ("protocol.snapshot_interval", {"protocol": {"snapshot_interval": 4}}),
    ],
)
def test_what_torch_cannot_do_is_refused_by_its_key(key: str, sections: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^key {key} = "):
        run_ddp(tiny(**sections), tmp_path / "run", threads=1)
    assert not (tmp_path / "run").exists()


def test_another_preset_is_refused_and_equal_batches_by_learner_are_not() -> None:
    with pytest.raises(ConfigError, match=r"^key protocol\.contribution = 'weights'"):
        check_supported(load(preset_name="diloco"))
    check_supported(tiny(data={"samples_by_learner": [3, 3]}))


@pytest.mark.parametrize("device", ["cuda:4095", "tpu", "cuda:", "cuda:x"])
def test_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^device '{device}': "):
        run_ddp(tiny(), tmp_path / "run", threads=1, device=device)
    assert not (tmp_path / "run").exists()


def test_rank_that_cannot_be_spawned_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(RunFailed, match=r"^ddp: rank 0 could not be started \(No such file"):
        run_ddp(tiny(), tmp_path / "run", threads=1)


def test_ranks_that_end_with_different_models_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(*_: object) -> list[RankReport]:
        return [RankReport(rank, "cpu", 8, 1, 1.0, 0.0, 0, f"digest {rank}", None, None) for rank in range(2)]

    monkeypatch.setattr("atoll.runtime.ddp.launch._follow", differing)
    with pytest.raises(RunFailed, match="different models"):
        run_ddp(tiny(), tmp_path / "run", threads=1)
