"""The built-in learner on several ranks: it ends where one process does, and its ranks live and die together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from thread_syncer import PATIENCE_SECONDS, UNHURRIED, Syncer

from atoll.config import Config, load
from atoll.errors import UserError
from atoll.protocol.vocabulary import Received, Report, Stored
from atoll.runtime.join.built_in import mesh_shape
from atoll.runtime.ranks.launch import launch
from atoll.tape.format import Tape
from atoll.tasks.registry import task_for

pytestmark = pytest.mark.live
SMALL = {"numbers": {"width": 32, "layers": 2, "heads": 2, "mlp": 64}}
TEXT = {"max_bytes": 60_000, "seq_len": 32, "batch_size": 6, "heldout_batches": 2}


def settings(steps: int, **inner: object) -> Config:
    """Every merge is waited for, so two runs can be compared."""
    return load(preset_name="streaming", overrides={
        "learners": 1, "total_steps": steps, "model": SMALL, "data": TEXT, "limits": UNHURRIED, "inner": inner,
        "protocol": {"local_steps_per_round": 4, "fragmentation": "sub_tensor", "fragments": 4, "codec_up": "fp32"},
    })  # fmt: skip


def learner(syncer: Syncer, *words: str) -> subprocess.Popen[str]:
    argv = ["learner", "--syncer", syncer.address, "--token", str(syncer.home.token_file), "--out", str(syncer.directory / "own")]
    return subprocess.Popen(
        [sys.executable, "-m", "atoll", *argv, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=3 * PATIENCE_SECONDS)
    return said


def theta_after(syncer: Syncer, *words: str) -> torch.Tensor:
    process = learner(syncer, *words)
    said = ended(process)
    assert process.returncode == 0, said
    syncer.end()
    return flat(load_file(syncer.directory / "theta.safetensors"))


def flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for _, tensor in sorted(tensors.items())])


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        ("2", "fsdp2"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("2", "ddp"), ("4", "fsdp2"), ("4", "hsdp")]),
    ],
)
def test_several_ranks_train_what_one_process_trains(start: Callable[[Config], Syncer], ranks: str, parallel: str) -> None:
    """The same samples in other sums: weights differ in their last bits. Four ranks have one or two of six samples each."""
    config = settings(12, accumulate=2, clip_norm=0.1, learning_rate=0.003)
    first = start(config)
    one, several = theta_after(first), theta_after(start(config), "--ranks", ranks, "--parallel", parallel)
    moved = one - flat(dict(task_for(config).build().named_parameters()))
    assert float((several - one).norm()) < 1e-2 * float(moved.norm())
    (tape,) = (first.directory.parent / "syncer1" / "own").rglob("0.tape")
    assert not Tape(tape).header.tensors, "its weights cannot be trained again by one process"


def steps_heard_of(syncer: Syncer) -> int:
    """By the syncer, of all incarnations."""
    return sum(isinstance(r.event, Received) and isinstance(r.event.envelope.body, Report) for r in syncer.tape())


def until_steps(syncer: Syncer, process: subprocess.Popen[str], count: int) -> None:
    """Until the syncer has heard of so many steps."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while steps_heard_of(syncer) < count:
        assert process.poll() is None, ended(process)
        assert time.monotonic() < ends, "the learner takes no steps"
        time.sleep(0.2)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_killed_launcher_leaves_no_rank(start: Callable[[Config], Syncer]) -> None:
    syncer = start(settings(5000))
    process = learner(syncer, "--ranks", "2")
    until_steps(syncer, process, 3)
    ranks = children_of(process)
    process.kill()
    process.communicate()
    ends = time.monotonic() + PATIENCE_SECONDS
    while any(map(is_running, ranks)):
        assert time.monotonic() < ends, "a rank outlives its launcher"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ranks_that_are_still_starting_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """They are held up in the import of torch, which the launcher does without."""
    tell = "from pathlib import Path; Path(__file__).with_name(str(os.getpid())).touch()"
    (tmp_path / "torch.py").write_text(f"import os, threading; {tell}; threading.Event().wait()")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    argv = [sys.executable, "-m", "atoll", "learner", "--syncer", "127.0.0.1:9", "--ranks", "2"]
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + PATIENCE_SECONDS
    while len(ranks := [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]) < 2:
        assert process.poll() is None and time.monotonic() < ends, "no ranks were started"
        time.sleep(0.05)
    process.kill()
    process.communicate()
    ends = time.monotonic() + 20.0
    try:
        while any(map(is_running, ranks)):
            assert time.monotonic() < ends, "a rank outlives its launcher"
            time.sleep(0.05)
    finally:
        for pid in filter(is_running, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
def test_a_learner_of_ranks_that_is_asked_to_leave_delivers_and_leaves(start: Callable[[Config], Syncer]) -> None:
    syncer = start(settings(5000))
    process = learner(syncer, "--ranks", "2", "--parallel", "fsdp2", "--left-code", "7")
    until_steps(syncer, process, 3)
    process.send_signal(signal.SIGTERM)
    said = ended(process)
    assert process.returncode == 7, said
    syncer.hear_goodbyes()
    assert any(isinstance(r.event, Stored) for r in syncer.tape())


def trained(out: Path, *words: str) -> torch.Tensor:
    """Theta of a whole local run, of one learner that waits for every merge."""
    sets = {
        "learners": 1, "total_steps": 16, "protocol.snapshot_interval": 4, "protocol.local_steps_per_round": 4,
        "protocol.codec_up": "int4", "protocol.error_feedback": "true", "inner.optimizer": "AdamW",
        "data.max_bytes": 60_000, "data.seq_len": 32, "data.batch_size": 6, "data.heldout_batches": 2,
    }  # fmt: skip
    argv = [sys.executable, "-m", "atoll", "train", "--preset", "diloco", "--out", str(out), *words]
    argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=6 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return flat(load_file(out / "syncer" / "theta.safetensors"))


@pytest.mark.soak
def test_snapshot_of_ranks_resumes_to_the_bit_and_at_any_other_layout(tmp_path: Path) -> None:
    two = ("--ranks", "2", "--parallel", "fsdp2")
    whole = trained(tmp_path / "whole", *two)
    resumed = ("--resume", str(tmp_path / "whole"), "--snapshot", "8")
    assert torch.equal(trained(tmp_path / "again", *two, *resumed), whole)
    for name, words in {"one": (), "three": ("--ranks", "3", "--parallel", "fsdp2"), "ddp": ("--ranks", "2")}.items():
        other = trained(tmp_path / name, *words, *resumed)
        assert not torch.equal(other, whole), "sums of other ranks differ in their last bits"
        assert float((other - whole).norm()) < 1e-3 * float(whole.norm()), name


@pytest.mark.soak
def test_what_ranks_cannot_do_is_one_sentence(start: Callable[[Config], Syncer]) -> None:
    process = learner(start(settings(4, optimizer="Muon")), "--ranks", "2", "--parallel", "fsdp2")
    said = ended(process)
    assert process.returncode == 2
    assert "atoll: key inner.optimizer = 'Muon': turns whole matrices" in said
    assert said.count("Muon") == 1, "one rank speaks for all"


@pytest.mark.parametrize(
    ("parallel", "ranks", "of_machine", "shape"),
    [("fsdp2", 3, 3, (3,)), ("hsdp", 4, 0, (2, 2)), ("hsdp", 4, 4, (2, 2)), ("hsdp", 16, 8, (2, 8)), ("hsdp", 2, 2, (2, 1)),
     ("hsdp", 24, 8, (3, 8))],
)  # fmt: skip
def test_machines_hold_the_same_under_hsdp(parallel: str, ranks: int, of_machine: int, shape: tuple[int, ...]) -> None:
    assert mesh_shape(parallel, ranks, of_machine) == shape


@pytest.mark.parametrize(("ranks", "of_machine"), [(1, 1), (3, 0), (5, 2)])
def test_uneven_groups_are_refused(ranks: int, of_machine: int) -> None:
    with pytest.raises(UserError, match="give an even number of ranks"):
        mesh_shape("hsdp", ranks, of_machine)


def test_ranks_that_disagree_with_the_environment_are_refused() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "atoll", "learner", "--ranks", "3"], env=os.environ | {"WORLD_SIZE": "2"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert "--ranks 3: WORLD_SIZE is 2, so the ranks are there already" in " ".join(told.stderr.split())


@pytest.mark.soak
def test_launch_returns_what_rank_0_returned() -> None:
    assert launch(2, ["learner", "--no-such-option"]) == 2
