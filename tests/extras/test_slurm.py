"""`atoll up --on slurm` on a real Slurm (slurmctld and slurmd of this machine): requeue and cancel are a leave and a return."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import atoll
from slurm_cluster import missing_parts, slurm_cluster
from upped import command, processes_of, wait_until, workers_of, write_recipe

from atoll.config import load
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing
from atoll.tape.format import Record, Tape
from atoll.tape.replay import replay
from atoll.tape.weave import open_run

pytestmark = pytest.mark.extras
PLACEMENT = """
[placement]
leave_seconds = 15.0
[placement.syncer]
resources = { cpus = 1, memory_gb = 0.5 }
[[placement.learners]]
count = 2
resources = { cpus = 1, memory_gb = 0.5 }
"""


def records(run: Path) -> list[Record]:
    tape = run / "syncer" / "run.tape"
    return list(Tape(tape).records()) if tape.exists() else []


def both_train(run: Path, since: int = 0) -> int:
    """How many records there are, once both learners took part in a round after the first `since`."""
    found = records(run)
    together = any(isinstance(e, FixParticipants) and e.participants == (0, 1) for r in found[since:] for e in r.effects)
    return len(found) if together else 0


def left(run: Path, learner: int) -> list[Why]:
    gone = (e for r in records(run) for e in r.effects if isinstance(e, Membership) and e.learner == learner)
    return [e.reason.why for e in gone if e.standing == Standing.LEFT]


def job_of(run: Path, worker: str, cwd: Path) -> str:
    return workers_of(run, cwd)[worker]["where"].split()[1]


@pytest.mark.skipif(bool(missing_parts()), reason=f"Debian's slurm-wlm and munge are not here: {', '.join(missing_parts())}")
def test_run_on_slurm_survives_a_requeue_a_cancel_and_a_requeued_syncer(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, placement=PLACEMENT), tmp_path / "run"
    with slurm_cluster(tmp_path / "slurm"):
        command("up", recipe, "--on", "slurm", "--out", run, cwd=tmp_path)
        seen = wait_until(lambda: both_train(run), "rounds of both learners")
        assert "is up already" in command("up", recipe, "--on", "slurm", "--out", run, cwd=tmp_path).stderr

        subprocess.run(["scontrol", "requeue", job_of(run, "learner-0", tmp_path)], check=True)
        wait_until(lambda: left(run, 0) == [Why.LEAVES_FOR_A_WHILE], "a polite leave of learner 0")
        seen = wait_until(lambda: both_train(run, len(records(run))), "learner 0 back in its place", 240.0)

        before = job_of(run, "learner-1", tmp_path)
        subprocess.run(["scancel", before], check=True)
        wait_until(lambda: left(run, 1) == [Why.LEAVES_FOR_A_WHILE], "a polite leave of learner 1")
        wait_until(lambda: workers_of(run, tmp_path)["learner-1"]["state"] == "cancelled", "the end of its job")
        command("up", recipe, "--on", "slurm", "--out", run, cwd=tmp_path)
        assert job_of(run, "learner-1", tmp_path) != before, "it was submitted again, and it alone"
        seen = wait_until(lambda: both_train(run, len(records(run))), "learner 1 back in its place", 240.0)

        subprocess.run(["scontrol", "requeue", job_of(run, "syncer", tmp_path)], check=True)
        wait_until(lambda: both_train(run, seen + 1), "the run goes on with a requeued syncer", 300.0)

        command("down", run, cwd=tmp_path)
        assert processes_of(run) == {}
        assert "joining the run at" in command("logs", "1", "--run", run, cwd=tmp_path).stdout
        refused = atoll("up", recipe, "--on", "slurm", "--out", tmp_path / "other", "--set", "placement.slurm.partition=none",
                        cwd=tmp_path)  # fmt: skip
        assert refused.returncode == 1 and "sbatch ended with exit code 1" in refused.stderr and "partition" in refused.stderr
    outcome = replay(open_run(run))
    assert outcome.fates is not None and outcome.fates.add_up() and load(recipe).learners == 2
