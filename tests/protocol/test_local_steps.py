"""Dynamic local updates: the syncer measures, decides and pulls; what a learner says of its speed counts for nothing."""

from __future__ import annotations

import pytest
from stage import MS, LearnerStage, SyncerStage, of, sent

from atoll.config import Config, load
from atoll.ids import LearnerId, Nanos
from atoll.protocol.vocabulary import Announce, Effect, FixParticipants, Pull, Send, Stage, Tick
from atoll.rules import dynamic_local_steps

H = 8


def dylu(learners: int = 3, *, total_steps: int = 100_000, interval: int = H) -> Config:
    protocol = {"local_steps_per_round": interval, "grace": "none", "pace": 0.0}
    top = {"learners": learners, "total_steps": total_steps, "protocol": protocol, "limits": {"patience_seconds": 0.0}}
    return load(preset_name="dylu", overrides=top)


class Course:
    """Learners that report at paces of their own, and answer every pull at once."""

    def __init__(self, paces: dict[LearnerId, Nanos], *, claims: dict[LearnerId, Nanos] | None = None, **config: int) -> None:
        self.stage = SyncerStage(dylu(len(paces), **config), joined=len(paces))
        self.paces, self.claims = paces, claims or {}
        self.next = dict(paces)
        self.merged: list[tuple[LearnerId, ...]] = []
        self.told: dict[LearnerId, int] = {}
        self.seen: list[Effect] = []

    def run(self, until: Nanos) -> Course:
        while (now := min(self.next.values())) <= until and not self.stage.machine.finished:
            learner = min(m for m, at in self.next.items() if at == now)
            self.next[learner] += self.paces[learner]
            self._after(self.stage.steps(learner, now, nanos=self.claims.get(learner, self.paces[learner])))
        return self

    def _after(self, effects: list[Effect]) -> None:
        while effects:
            self.seen += effects
            for sends in of(effects, Send):
                if isinstance(sends.envelope.body, Announce):
                    self.told[sends.envelope.receiver] = sends.envelope.body.local_steps
            answers: list[Effect] = []
            for fixed in of(effects, FixParticipants):
                if not fixed.fragments:
                    continue
                self.merged.append(fixed.participants)
                for learner in fixed.participants:
                    answers += self.stage.contributes(learner, fixed.outer_step, 0)
                answers += self.stage.stored(fixed.outer_step)
            effects = answers

    def times(self, learner: LearnerId) -> int:
        return sum(learner in who for who in self.merged)


@pytest.mark.parametrize(
    ("own", "paces", "steps"),
    [
        (None, [100, 100], 8), (100, [], 8), (100, [100], 8), (200, [100, 200], 4), (150, [100, 150, 150], 5),
        (3000, [100, 3000, 100], 1), (1, [1, 100, 100], 400), (100, [1, 100, 100], 4),
    ],
)  # fmt: skip
def test_steps_are_h_times_the_share_of_the_fastest_and_at_least_one(own: int | None, paces: list[int], steps: int) -> None:
    assert dynamic_local_steps(H, own, paces) == steps


def test_learner_is_pulled_from_after_its_own_steps_and_alone_is_sent_the_result() -> None:
    course = Course({0: 100 * MS, 1: 100 * MS, 2: 260 * MS}).run(8000 * MS)
    assert course.told == {0: 8, 1: 8, 2: 3}
    alone = next(e for e in of(course.seen, FixParticipants) if e.participants == (2,) and e.fragments)
    assert alone.outer_step in [a.outer_step for a in sent(course.seen, 2, Announce)]  # type: ignore[union-attr]
    assert alone.outer_step not in [a.outer_step for a in sent(course.seen, 0, Announce)]  # type: ignore[union-attr]
    assert Tick(alone.outer_step) in sent(course.seen, 0, Tick)


def test_outer_steps_pass_while_nobody_is_ready_and_pull_from_nobody() -> None:
    course = Course({0: 100 * MS, 1: 100 * MS}).run(700 * MS)
    assert course.stage.machine.outer_step > 3
    assert not sent(course.seen, kind=Pull)


def test_last_outer_step_takes_what_there_is() -> None:
    course = Course({0: 100 * MS, 1: 100 * MS}, total_steps=5).run(2000 * MS)
    assert course.stage.machine.finished
    assert of(course.seen, FixParticipants)[-1].fragments == (0,)


def test_claims_of_step_times_move_nothing() -> None:
    honest = {0: 100 * MS, 1: 100 * MS, 2: 200 * MS}
    plain = Course(honest).run(20_000 * MS)
    for claim in (1, 3_600_000 * MS):
        liar = Course(honest, claims={1: claim}).run(20_000 * MS)
        assert (liar.told, liar.merged) == (plain.told, plain.merged)


def test_liar_that_reports_steps_it_never_took_is_merged_no_more_often() -> None:
    """Ten reports in the time of one: it owes ten times the steps, and the others' intervals are at most halved. What is left is
    that adopting costs a slower learner one of its own, longer steps an interval."""
    honest = Course({0: 100 * MS, 1: 100 * MS, 2: 100 * MS}, interval=40).run(200_000 * MS)
    lying = Course({0: 100 * MS, 1: 10 * MS, 2: 100 * MS}, interval=40).run(200_000 * MS)
    assert honest.told == {0: 40, 1: 40, 2: 40}
    assert lying.told == {0: 20, 1: 200, 2: 20}
    assert lying.times(1) <= 1.1 * lying.times(0)


def test_learner_stages_nothing_before_the_steps_that_it_was_told() -> None:
    stage = LearnerStage(dylu())
    stage.enters()
    stage.hears(Announce(2, 0, -1, (0,), 3))
    stage.steps()  # adopts at this boundary
    assert not of([*stage.steps(), *stage.steps()], Stage)
    assert of(stage.steps(), Stage)


def test_pull_before_the_told_steps_is_answered_from_the_next_boundary() -> None:
    stage = LearnerStage(dylu())
    stage.enters()
    stage.hears(Announce(2, 0, -1, (0,), 5))
    stage.steps()
    assert not sent(stage.hears(Pull(3, (0,))))
    assert [b.outer_step for b in sent(stage.steps()) if hasattr(b, "c_steps")] == [3]
