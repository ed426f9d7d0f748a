"""`atoll up --on local`: processes that outlive the command, one of them restarted alone, and none left after `atoll down`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command import atoll
from harness import effects_of, judge
from upped import command, pids_of, processes_of, wait_until, workers_of, write_recipe

from atoll.config import load
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing
from atoll.tape.format import Tape


def rounds_of_both(run: Path) -> int:
    tape = run / "syncer" / "run.tape"
    effects = (e for r in Tape(tape).records() for e in r.effects) if tape.exists() else ()
    return sum(isinstance(e, FixParticipants) and e.participants == (0, 1) for e in effects)


def more_rounds(run: Path, than: int) -> int:
    return rounds_of_both(run) if rounds_of_both(run) > than else 0


def test_run_comes_up_heals_each_process_alone_and_goes_down_whole(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    try:
        command("up", recipe, "--on", "local", "--out", run, cwd=tmp_path)
        before = wait_until(lambda: more_rounds(run, 5), "rounds of both learners")
        first = pids_of(run, tmp_path)
        assert set(first) == {"syncer", "learner-0", "learner-1"}

        again = command("up", recipe, "--on", "local", "--out", run, cwd=tmp_path)
        assert "is up already" in again.stderr and pids_of(run, tmp_path) == first
        other = atoll("up", recipe, "--out", run, "--set", "seed=5", cwd=tmp_path)
        assert other.returncode == 2 and "another config is up there" in other.stderr

        os.kill(first["learner-1"], signal.SIGKILL)
        wait_until(lambda: pids_of(run, tmp_path).get("learner-1", first["learner-1"]) != first["learner-1"], "a new learner 1")
        before = wait_until(lambda: more_rounds(run, before + 5), "rounds after a learner was killed")
        os.kill(first["syncer"], signal.SIGKILL)
        wait_until(lambda: pids_of(run, tmp_path).get("syncer", first["syncer"]) != first["syncer"], "a new syncer")
        wait_until(lambda: more_rounds(run, before + 5), "rounds after the syncer moved to another port")
        second = pids_of(run, tmp_path)
        assert second["learner-0"] == first["learner-0"], "each was restarted alone"
        assert "restarts: 1" in workers_of(run, tmp_path)["learner-1"]["state"]

        assert "joining the run at" in command("logs", "0", "--run", run, cwd=tmp_path).stdout
        assert "learner-1: " in command("logs", "--run", run, cwd=tmp_path).stdout
        assert atoll("logs", "7", "--run", run, cwd=tmp_path).returncode == 2

        command("down", run, cwd=tmp_path)
        assert processes_of(run) == {}
        assert {each["state"].split()[0] for each in workers_of(run, tmp_path).values()} <= {"left", "left,", "ended", "ended,"}
        judge(run, load(recipe), whole=False)
        left = [m for m in effects_of(run, Membership) if m.standing == Standing.LEFT]
        assert {(m.learner, m.reason.why) for m in left} == {(n, Why.LEAVES_FOR_A_WHILE) for n in (0, 1)}
        assert command("down", run, cwd=tmp_path).returncode == 0, "a second time there is nothing to do"
    finally:
        for pid in processes_of(run):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
def test_killed_supervisor_leaves_nothing_running_and_the_run_goes_on_later(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command("up", recipe, "--out", run, cwd=tmp_path)
    before = wait_until(lambda: more_rounds(run, 5), "rounds of both learners")
    os.kill(int((run / "engine" / "lock").read_text()), signal.SIGKILL)
    command("down", run, cwd=tmp_path)
    assert processes_of(run) == {}
    command("up", recipe, "--out", run, cwd=tmp_path)
    wait_until(lambda: more_rounds(run, before + 5), "rounds after it came up again")
    command("down", run, cwd=tmp_path)
    assert processes_of(run) == {}
    judge(run, load(recipe), whole=False)


@pytest.mark.soak
def test_run_that_is_over_ends_its_processes_and_is_not_started_again(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, steps=40), tmp_path / "run"
    command("up", recipe, "--out", run, cwd=tmp_path)
    followed = command("logs", "syncer", "--run", run, "--follow", cwd=tmp_path).stdout
    assert "trained weights" in followed, "--follow ends with the run"
    wait_until(lambda: processes_of(run) == {}, "the end of all processes")
    assert {each["state"] for each in workers_of(run, tmp_path).values()} == {"done"}
    again = atoll("up", recipe, "--out", run, cwd=tmp_path)
    assert again.returncode == 2 and "is over" in again.stderr
