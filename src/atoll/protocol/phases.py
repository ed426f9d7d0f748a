"""The phases of a learner and what moves it from one to the next.

    JOINING ──enter──▶ BOUNDARY ──train──▶ TRAINING ──step done──▶ BOUNDARY
       ▲                │    │
       └───recover──────┘    └──wait──▶ WAITING ──go on──▶ BOUNDARY        (any but WAITING) ──end──▶ DONE

Weights may be read and written at a boundary and while the learner waits, never while it trains.
"""

from __future__ import annotations

from enum import StrEnum


class LearnerPhase(StrEnum):
    JOINING = "joining"
    BOUNDARY = "boundary"
    TRAINING = "training"
    WAITING = "waiting"
    DONE = "done"


class Turn(StrEnum):
    """What moves a learner from one phase to the next."""

    ENTER = "enter"
    TRAIN = "train"
    STEP_DONE = "step_done"
    WAIT = "wait"
    GO_ON = "go_on"
    RECOVER = "recover"
    END = "end"


JOINING, BOUNDARY, TRAINING, WAITING, DONE = LearnerPhase

NEXT: dict[tuple[LearnerPhase, Turn], LearnerPhase] = {
    (JOINING, Turn.ENTER): BOUNDARY,
    (BOUNDARY, Turn.TRAIN): TRAINING,
    (TRAINING, Turn.STEP_DONE): BOUNDARY,
    (BOUNDARY, Turn.WAIT): WAITING,
    (WAITING, Turn.GO_ON): BOUNDARY,
    **{(phase, Turn.RECOVER): JOINING for phase in (JOINING, BOUNDARY)},
    **{(phase, Turn.END): DONE for phase in (JOINING, BOUNDARY, TRAINING)},
}
"""A wait ends by GO_ON before anything else happens to the learner, so that the tape has its length."""

def after(phase: LearnerPhase, turn: Turn) -> LearnerPhase:
    to = NEXT.get((phase, turn))
    assert to is not None, f"a learner that is {phase}: {turn} makes no sense"
    return to


AT_REST = (BOUNDARY, WAITING)
"""No inner step runs: weights may be read and written."""
