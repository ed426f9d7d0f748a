"""A tape as points for loggers: one for each step, the same whoever reads it and whenever."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.chaos import ChaosPlan, Kill, KillSyncer
from atoll.config import load
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import DeadlinePassed, FixParticipants, StepDone, Stored
from atoll.sim.run import run_virtual
from atoll.tape.format import Header, Record, Tape
from atoll.tape.heldout import HeldoutPoint
from atoll.views.log_points import HELDOUT, LogFold, LogPoint, identity_of
from atoll.views.run import RunView

HEADER = Header(
    config={"preset": "ddp"}, code_version="", data_fingerprint="", threads=1, torch_version="", cpu_capability="", tensors=True,
    epoch=5 * 10**9, derivable=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    """A learner and the syncer are killed on the way: rounds are gathered again."""
    config = load(overrides={"learners": 3, "total_steps": 60, "protocol": {"fragments": 4, "local_steps_per_round": 8}})
    plan = ChaosPlan((Kill(4.0, 1, 2.0), KillSyncer(12.0, 1.0), KillSyncer(20.0, 1.0)))
    return Tape(run_virtual(config, plan, tmp_path_factory.mktemp("killed"), tensors=False).tape)


def points_of(tape: Tape) -> list[LogPoint]:
    fold = LogFold(tape.header)
    return [point for record in tape.records() for point in fold.feed(record)]


def test_every_step_of_a_run_with_restarts_is_one_point_in_order(killed: Tape) -> None:
    points = points_of(killed)
    assert [point.step for point in points] == list(range(1, 61))
    times = [point.unix_seconds for point in points]
    assert times == sorted(times)
    assert points == points_of(killed), "the same tape gives the same points"


def test_tokens_grow_to_what_was_trained_and_missing_losses_are_left_out(killed: Tape) -> None:
    points, view = points_of(killed), RunView(3).feed(killed.records())
    tokens = [point.values["tokens/trained"] for point in points]
    assert tokens == sorted(tokens) and 0 < tokens[-1] <= view.tokens_done
    assert {len(point.values) for point in points} == {2}, "a run without tensors has no losses"
    assert all(1 <= point.values["round/participants"] <= 3 for point in points)


def test_step_of_ranks_has_the_mean_of_the_losses_of_that_step() -> None:
    fold, number = LogFold(HEADER), 0
    found: list[LogPoint] = []
    for step, losses in ((1, (4.0, 2.0)), (2, (3.0, 1.0))):
        fixed = FixParticipants(step, (0,), (0, 1), Reason(Why.ALL_REPORTED))
        taped = [(-1, DeadlinePassed(), (fixed,)), *((m, StepDone(10, 1, 5, loss), ()) for m, loss in enumerate(losses))]
        for worker, event, effects in (*taped, (-1, Stored(step, ""), ())):
            number += 1
            found += fold.feed(Record(number, step * 10**9, worker, event, effects))
    first, second = (
        LogPoint("rounds", step, 5.0 + step, {"round/participants": 2.0, "tokens/trained": 20.0 * step, "train/loss": loss})
        for step, loss in ((1, 3.0), (2, 2.0))
    )
    assert found == [first, second]
    measured = [HeldoutPoint(2, 1.5), HeldoutPoint(9, 1.0), HeldoutPoint(1, None)]
    assert fold.heldout(measured) == [LogPoint(HELDOUT, 2, 7.0, {"heldout/loss": 1.5})], "known by its step's time"


def test_runs_are_told_apart_and_known_again(killed: Tape) -> None:
    assert identity_of(killed.header, "a") == identity_of(Tape(killed.path).header, "a")
    keys = {identity_of(header, name).key for header in (killed.header, HEADER) for name in ("a", "b")}
    assert len(keys) == 4
    live = Header(**{name: getattr(HEADER, name) for name in HEADER.__struct_fields__} | {"run": "0123abc"})
    assert identity_of(live, "moved").key == identity_of(live, Path("x").name).key == "0123abc"
