"""What a syncer logs while a run goes on."""

from __future__ import annotations

import pytest

from atoll.config import load
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing
from atoll.runtime.log import PacedLog
from atoll.runtime.syncer.progress import WORDS, SyncerProgress, membership_line, refusals_line
from atoll.views.strip import effect_word


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(seconds_a_step: float, steps: int = 200) -> list[str]:
    clock, said = Clock(), list[str]()
    progress = SyncerProgress(load(assignments=[f"total_steps={steps}"]), said.append, clock)
    for step in range(1, steps + 1):
        progress.reported(step % 4, 2.0 + step % 2)
        progress.fixed(FixParticipants(step, (0,), (0, 2), Reason(Why.DUE)))
        clock.now += seconds_a_step
    return said


def test_progress_lines_come_at_a_bounded_rate() -> None:
    assert len(lines_of(0.01)) == 2, "two seconds in all"
    assert len(lines_of(1.0)) == 10, "every tenth of the run"
    assert 190 / 3 <= len(lines_of(10.0)) <= 200 / 3 + 1, "every thirty seconds"


def test_line_names_the_step_the_learners_of_it_and_the_mean_loss() -> None:
    first, *_ = lines_of(1.0)
    assert first == "step 1 of 200: 2 of 4 learners, train loss 3.0000"


@pytest.mark.parametrize("standing", Standing)
def test_every_standing_has_words_and_the_end_of_a_run_is_no_loss(standing: Standing) -> None:
    change = Membership(1, standing, Reason(Why.DUE))
    assert membership_line(change) == f"learner1 {WORDS[standing]}: due"
    over = Membership(1, Standing.LOST, Reason(Why.RUN_OVER))
    assert membership_line(over) == "learner1 has ended: the run is finished"
    assert effect_word(over) == "learner1 has ended"


def test_refusals_are_words_and_no_dict() -> None:
    line = refusals_line({"token": 2, "payload_too_big": 1})
    assert line == "3 requests and messages were refused (payload too big 1, token 2)"


def test_paced_line_is_due_at_once_and_then_at_its_rate() -> None:
    clock = Clock()
    paced, later = PacedLog(10.0, clock), PacedLog(10.0, clock, at_once=False)
    assert [paced.due(), paced.due(), later.due()] == [True, False, False]
    clock.now += 10.0
    assert [paced.due(), paced.due(), later.due()] == [True, False, True]
