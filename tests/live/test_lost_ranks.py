"""The built-in learner loses ranks: it goes on smaller where the others hold a replica, else all its ranks end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import unused_port
from rank_loops import Ranks, built_in_loop
from test_learner_of_ranks import children_of, ended, learner, settings, steps_heard_of, until_steps
from thread_syncer import Syncer

from atoll.config import Config
from atoll.protocol.vocabulary import Goodbye, InnerStep, Received, Resized, Started, StepDone, Stored
from atoll.tape.format import Tape

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")]
STEPS = 12


def events(tape: Path, kind: type[Any]) -> list[Any]:
    return [r.event for r in Tape(tape).records() if isinstance(r.event, kind)]


def inner_steps(tape: Path) -> list[InnerStep]:
    return [e for r in Tape(tape).records() for e in r.effects if isinstance(e, InnerStep)]


@pytest.mark.parametrize(
    ("parallel", "ranks", "dies", "left"),
    [
        ("ddp", 3, {1: ("backward", 3), 2: ("take", 7)}, 1),
        pytest.param("ddp", 4, {2: ("ready", 4)}, 3, marks=pytest.mark.soak),
        ("hsdp", 4, {3: ("ready", 4)}, 2),
        pytest.param("hsdp", 4, {1: ("take", 4), 3: ("backward", 6)}, 0, marks=pytest.mark.soak),
    ],
)
def test_learner_that_loses_ranks_goes_on_with_a_share_of_its_batch(
    start: Callable[[Config], Syncer], parallel: str, ranks: int, dies: dict[int, tuple[str, int]], left: int
) -> None:
    """Wherever in a step the ranks are killed. Those that are left compare their weights and moments when they form
    their group: one that differs ends the learner. Under hsdp a rank of four takes its replica with it, and two that hold the
    same part take the learner."""
    syncer = start(settings(STEPS, clip_norm=0.1, optimizer="AdamW"))
    out = syncer.directory / "own"
    results = Ranks(
        ranks, built_in_loop, parallel, syncer.address, syncer.home.token_file, out, unused_port(), dies
    ).end()  # fmt: skip
    if not left:
        assert isinstance(results[0], str) and "go down together" in results[0]
        return
    assert isinstance(results[0], dict), results
    syncer.end()
    (tape,) = out.glob("*.tape")
    survivors = [result for result in results if isinstance(result, dict)]
    assert [result["ranks"] for result in survivors if result["steps"] >= STEPS] == [left] * left, results
    assert len({result["steps"] for result in survivors if result["steps"] >= STEPS}) == 1
    assert events(tape, Resized)[-1] == Resized(left / ranks)
    assert len(events(tape, Started)) == 1, "the same incarnation"
    counted = {done.samples for done in events(tape, StepDone)}
    assert 6 in counted and round(6 * left / ranks) in counted
    assert inner_steps(tape)[-1].share == left / ranks
    assert len(events(syncer.directory / "run.tape", Stored)) == STEPS


def test_killed_rank_of_the_launcher_is_done_without_and_named(start: Callable[[Config], Syncer]) -> None:
    syncer = start(settings(40))
    process = learner(syncer, "--ranks", "2")
    until_steps(syncer, process, 3)
    os.kill(children_of(process)[1], signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    assert "this learner goes on with 1 of its 2 ranks; lost: 1 (" in " ".join(said.split())
    syncer.end()
    assert events(syncer.directory / "own" / "0.tape", Resized) == [Resized(0.5)]
    words = [sys.executable, "-m", "atoll", "strip", str(syncer.directory / "own" / "0.tape")]
    assert "resized to 50.0%" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("parallel", "killed"), [("ddp", 0), pytest.param("fsdp2", 1, marks=pytest.mark.soak)])
def test_learner_that_cannot_go_on_ends_and_comes_back_as_a_new_incarnation(
    start: Callable[[Config], Syncer], parallel: str, killed: int
) -> None:
    syncer = start(settings(5000))
    process = learner(syncer, "--ranks", "2", "--parallel", parallel)
    until_steps(syncer, process, 3)
    os.kill(children_of(process)[killed], signal.SIGKILL)
    assert f"atoll: rank {killed} of this learner was ended by SIGKILL" in ended(process)
    assert process.returncode == 1
    before = steps_heard_of(syncer)  # the first one may have taken any number before it was killed
    process = learner(syncer, "--ranks", "2", "--parallel", parallel)
    try:
        until_steps(syncer, process, before + 3)
    finally:
        process.kill()
        process.communicate()
    syncer.stop()
    tapes = sorted((syncer.directory / "own").glob("*.tape"))
    assert [tape.stem for tape in tapes] == ["0", "1"]
    assert not any(events(tape, Resized) for tape in tapes)
    if killed:
        reasons = [e.envelope.body.reason.detail for e in events(syncer.directory / "run.tape", Received) if is_goodbye(e)]
        assert any(f"rank {killed} of this learner: " in reason and "go down together" in reason for reason in reasons)


def is_goodbye(event: Received) -> bool:
    return isinstance(event.envelope.body, Goodbye)
