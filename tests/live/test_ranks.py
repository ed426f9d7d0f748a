"""Learners of several ranks on gloo, against a real syncer: layouts train together, and ranks live and die together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_loops import Ranks, careful_loop, found_each_other, memory_loop, mistakes, moved_states, prescribed_loop, training_loop
from thread_syncer import ONE_ROUND_A_STEP, UNHURRIED, Syncer, custom, exact

from atoll.config import Config, load
from atoll.protocol.vocabulary import FixParticipants, Goodbye, Membership, Received, Recovered, Standing, StepDone
from atoll.tape.format import Tape

pytestmark = pytest.mark.live


def run_of(syncer: Syncer, kind: str) -> tuple[Any, ...]:
    return kind, syncer.address, syncer.home.token_file, syncer.directory / "learner"


def decoupled(**more: Any) -> Config:
    protocol = ONE_ROUND_A_STEP | {"codec_up": "int4", "error_feedback": True, "fragments": 4}
    return load(preset_name="decoupled", overrides={
        "learners": 2, "total_steps": 60, "model": {"name": "custom"}, "limits": UNHURRIED, "protocol": protocol, **more,
    })  # fmt: skip


def steps_of(tape: Path) -> list[StepDone]:
    return [r.event for r in Tape(tape).records() if isinstance(r.event, StepDone)]


@pytest.mark.soak
def test_rank_that_is_late_finds_the_others_still_there() -> None:
    """Of four ranks that left the group of an invitation as soon as they had it, one time in 300 broke the join of another."""
    assert Ranks(4, found_each_other, 1000).end() == [1000] * 4


def test_learners_of_two_layouts_train_one_loses_a_rank_and_comes_back(start: Callable[[Config], Syncer]) -> None:
    """DDP of 2 and FSDP2 of 2 with AdamW. A rank of the second is killed: its learner goes down, the first trains on, and the
    second comes back as a new incarnation, of three ranks, with the moments of the first. Eleven tokens are learnt by then: what
    still moves is a hundred times what is usual now and then, and a merge that is rejected for it empties all moments."""
    syncer = start(decoupled(total_steps=10**6, limits=UNHURRIED | {"outlier_factor": 1e9}))
    enough = syncer.directory / "enough"
    first = Ranks(2, training_loop, *run_of(syncer, "ddp"), 0, (-1, 0), enough)
    kind, address, token, folder = run_of(syncer, "fsdp2")
    second = Ranks(2, training_loop, kind, address, token, folder.with_name("second"), 1, (1, 6))
    survivor, killed = second.end()
    assert isinstance(survivor, str) and "Error" in survivor and killed[0] == 6, "the last that the killed one said"
    again = Ranks(3, training_loop, kind, address, token, folder.with_name("second"), 1, (-1, 0), None, 15)
    results = again.end()
    enough.touch()
    results += first.end()
    syncer.hear_goodbyes(2)
    syncer.stop()
    for result in results:
        assert isinstance(result, dict), result
        assert result["finite"] and len(set(result["alike"])) == 1
        assert result["losses"][1] < 0.9 * result["losses"][0], result["losses"]
    effects = [e for r in syncer.tape() for e in r.effects]
    merged = [set(e.participants) for e in effects if isinstance(e, FixParticipants) and e.fragments]
    assert {0, 1} in merged, "learners of both layouts were merged"
    assert any(e.learner == 1 and e.standing in (Standing.LOST, Standing.LEFT) for e in effects if isinstance(e, Membership))
    assert [e.source for e in effects if isinstance(e, Recovered) and e.learner == 1][-1] == 0, "it has a peer's state"
    (trained,) = {moments for result in results[:3] for moments in result["moments"]}
    assert trained > results[0]["steps"] == 15, "the peer's steps are in its moments"
    (tape,) = (syncer.directory / "learner").glob("*.tape")
    assert {(s.tokens, s.samples) for s in steps_of(tape)} == {(16, 16)}, "two ranks of 8 tokens are one step of 16"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_state_moves_between_layouts_to_the_last_bit(ranks: int) -> None:
    """Weights, moments and anchors, from a sharded model to whole ones and back into a sharded one."""
    for same in Ranks(ranks, moved_states, exact()).end():
        assert isinstance(same, dict) and len(same) > 10, same
        assert all(same.values()), [what for what, equal in same.items() if not equal]


def test_ranks_whose_loops_end_at_the_same_step_leave_in_order(start: Callable[[Config], Syncer]) -> None:
    """Pulls that come while rank 0 waits for its last rounds are answered by all ranks."""
    syncer = start(decoupled(total_steps=10**6, learners=1))
    results = Ranks(2, prescribed_loop, *run_of(syncer, "fsdp2"), 8).end()
    syncer.hear_goodbyes()
    syncer.stop()
    assert all(isinstance(result, dict) for result in results), results
    farewells = [r.event.envelope.body.reason.detail for r in syncer.tape() if is_goodbye(r.event)]
    assert farewells == ["its loop ended"]


def test_mistakes_of_ranks_take_the_learner_down_with_a_sentence_that_names_them(start: Callable[[Config], Syncer]) -> None:
    syncer = start(decoupled(total_steps=10**6, learners=1))
    zero, one = Ranks(2, mistakes, syncer.address, syncer.home.token_file, syncer.directory / "m").end()
    syncer.hear_goodbyes()
    syncer.stop()
    assert isinstance(zero, dict) and isinstance(one, dict), (zero, one)
    told = "rank 1 of this learner: its loop ended by ZeroDivisionError: of the user's own. A learner's ranks go down together"
    assert zero["raises"].startswith(f"RunFailed: {told}") and one["raises"] == "ZeroDivisionError: of the user's own"
    late = "RunFailed: rank 1 of this learner: has not called learner.step() for 3 s"
    assert zero["misses_a_call"].startswith(late) and one["misses_a_call"].startswith(late)
    for said in (zero, one):
        assert "stepped on ranks 0 of 2 and not on the others" in said["skips_alone"]
        assert "ranks 0 and 1 of this learner have another model" in said["other_model"]
        assert "ranks 0 and 1 of this learner have another optimizer" in said["other_optimizer"]
        assert "one of 2 ranks" in said["plain"] and "the ranks would diverge" in said["plain"]
        assert "ranks 0 and 1 of this learner have another model" in said["pipeline"]
        assert "pipeline stages are not supported" in said["pipeline"]
        assert "the process group had 2 ranks in atoll.join and has 1" in said["other_world"]
        assert "P(sum)" in said["partial"] and "no rank has its values" in said["partial"]
    farewells = [r.event.envelope.body.reason.detail for r in syncer.tape() if is_goodbye(r.event)]
    assert told in " ".join(farewells)


def is_goodbye(event: Any) -> bool:
    return isinstance(event, Received) and isinstance(event.envelope.body, Goodbye)


def test_bf16_skipped_steps_and_evaluations_leave_no_rank_with_old_weights(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom("diloco", learners=1, total_steps=6, limits=UNHURRIED))
    results = Ranks(2, careful_loop, syncer.address, syncer.home.token_file, syncer.directory / "learner").end()
    syncer.end()
    for result in results:
        assert result == {"counted": [True, True, False, True, True, True, True], "stale": 0, "moments": 4}
    assert {s.tokens for s in steps_of(syncer.directory / "learner" / "0.tape")} == {32}


@pytest.mark.soak
def test_example_trains_under_torchrun(start: Callable[[Config], Syncer], tmp_path: Path) -> None:
    syncer = start(custom(learners=1, total_steps=16))
    example = Path(__file__).parents[2] / "examples" / "fsdp2_loop.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    words += ["--syncer", syncer.address, "--token", str(syncer.home.token_file), "--out", str(tmp_path / "l")]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180.0, check=False
    )
    assert done.returncode == 0, done.stderr
    syncer.end()
    steps = steps_of(tmp_path / "l" / "0.tape")
    assert {s.tokens for s in steps} == {2 * 4 * 64} and steps[-1].loss < steps[0].loss


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_no_ranks_peak_memory_grows_with_the_model(ranks: int, start: Callable[[Config], Syncer], tmp_path: Path) -> None:
    """The first learner uploads the model and receives it again; the second takes the state of the first. Of what the model
    grows, a rank has its share of the weights and of the anchors when it has joined, of moments, gradients and the start of a
    round later, and of a second copy while a state is on its way. Rank 0 passes everything on and has no more than the others:
    a fragment, which is a layer here, and what is in flight do not grow. It once had as much again as the model had grown."""
    grown: dict[str, list[list[int]]] = {"joined": [], "served": [], "recovered": []}
    sizes = (8, 56) if ranks == 2 else (8, 104)
    for layers in sizes:
        protocol = {"local_steps_per_round": 2 * layers, "fragmentation": "tensor", "fragments": layers, "overlap": 1}
        limits = UNHURRIED | {"outlier_factor": 1e9, "start_wait_seconds": 0.1}
        syncer = start(decoupled(total_steps=10**6, limits=limits, protocol=protocol))
        enough, common = tmp_path / f"enough{layers}", (layers, syncer.address, syncer.home.token_file)
        first = Ranks(ranks, memory_loop, *common, syncer.directory / "first", 0, enough)
        assert [first.said(rank) for rank in range(ranks)] == ["trains"] * ranks
        late = Ranks(ranks, memory_loop, *common, syncer.directory / "late", 1, None, 2).end()
        enough.touch()
        early = first.end()
        syncer.stop()
        assert 0 in [e.source for r in syncer.tape() for e in r.effects if isinstance(e, Recovered) and e.learner == 1]
        for name, group, when in (("joined", early, "joined"), ("served", early, "end"), ("recovered", late, "end")):
            grown[name].append([rank[when] for rank in group])
    more = (sizes[1] - sizes[0]) * 512 * 512 * 4
    shares = {name: [(large - small) / more for small, large in zip(*both, strict=True)] for name, both in grown.items()}
    for name, copies in (("joined", 2), ("served", 7), ("recovered", 7)):
        assert max(shares[name]) < copies / ranks + 0.6, f"of what the model grew: {shares}, {grown}"
        assert shares[name][0] < max(shares[name][1:]) + 0.6, f"of what the model grew: {shares}, {grown}"
