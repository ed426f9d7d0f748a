"""A run that nobody trained: the index of any number of learners and rounds, with a loss that falls and faults that come."""

from __future__ import annotations

import math
import random
from pathlib import Path

from atoll.config import load
from atoll.executor.environment import tape_header
from atoll.ids import SECOND, Nanos
from atoll.views.index.files import Complete, IndexWriter
from atoll.views.index.rows import Discarded, EventKind, EventRow, LaneState, LearnerBin, RoundRow, TokenFates

ROUND: Nanos = SECOND
AWAY_ROUNDS = 90
TOKENS = 4096


def make_run(directory: Path, *, learners: int, rounds: int, seed: int = 0) -> None:
    """Every learner takes a step in each round. Now and then one is lost, comes back after a while, and recovers."""
    config = load(preset_name="decoupled", overrides={"learners": learners, "total_steps": rounds})
    header = tape_header(config, data_fingerprint="", tensors=False, plan=[])
    writer, chance = IndexWriter(directory / "index", header), random.Random(seed)
    (directory / "run.tape").touch()
    away: dict[int, int] = {}
    trained = merged = 0
    for step in range(1, rounds + 1):
        at, lost, recovered = step * ROUND, 0, 0
        for learner in [m for m, back in away.items() if back == step]:
            del away[learner]
            recovered += 1
            _say(writer, at - ROUND // 2, EventKind.STANDING, learner, step, "is joining: joins", LaneState.JOINING)
            source = f"learner{(learner + 1) % learners}"
            _say(writer, at, EventKind.RECOVERED, learner, step, f"recovered from {source} in 0.50 s", None)
            _say(writer, at, EventKind.STANDING, learner, step, f"is in sync: stands at outer step {step}", LaneState.TRAINING)
        if chance.random() < learners / 4800 and len(away) < learners // 2:
            learner = chance.choice([m for m in range(learners) if m not in away])
            away[learner] = step + 1 + chance.randrange(AWAY_ROUNDS)
            lost += 1
            _say(writer, at, EventKind.STANDING, learner, step, "is lost: the connection broke", LaneState.LOST)
        present = [m for m in range(learners) if m not in away]
        late = chance.choice(present) if chance.random() < 0.1 else None
        participants = tuple(m for m in present if m != late)
        trained, merged = trained + TOKENS * len(present), merged + TOKENS * len(participants)
        loss = 2.2 + 8.0 / (1 + step / 300) ** 0.5 + 0.05 * chance.random() + 0.02 * math.sin(step / 50)
        everybody = late is None
        writer.put_round(RoundRow(
            outer_step=step, begins_at=at - ROUND, opened_at=at - ROUND, quorum_at=at - ROUND // 2,
            fixed_at=at - ROUND // 10, closed_at=at, fragments=(step % 24,), participants=participants, merged=participants,
            left_out=() if late is None else (late,), why="all_reported" if everybody else "window_closed",
            text=f"all {len(present)} in sync reported" if everybody else f"{len(participants)} of {len(present)}: window closed",
            discards=(Discarded(late, at, "missed_deadline", "missed the pull deadline"),) if late is not None else (),
            lost=lost, recovered=recovered, loss=loss,
            fates=_fates(trained, merged),
            learners=tuple(_lane(m, m in away, loss, chance) for m in range(learners)),
        ))  # fmt: skip
    _say(writer, rounds * ROUND, EventKind.FINISHED, None, rounds, f"the run is finished at outer step {rounds}", None)
    writer.close(Complete(rounds, cut=False))


def _fates(trained: int, merged: int) -> TokenFates:
    """What was not merged is half in flight; of the rest a third is lost."""
    gone = (trained - merged) // 2
    return TokenFates(trained, merged, trained - merged - gone, {"lost": gone // 3, "overlap": gone - gone // 3})


def _lane(learner: int, away: bool, loss: float, chance: random.Random) -> LearnerBin:
    if away:
        return LearnerBin(learner, LaneState.LOST, (0, 0, 0, 0, ROUND, 0))
    waited = int(ROUND * 0.04 * chance.random())
    return LearnerBin(
        learner, LaneState.TRAINING, (ROUND - waited, waited, 0, 0, 0, 0), 1, TOKENS, ROUND - waited, 21_484, 83_333, 1, 1,
        loss + learner / 1000,
    )  # fmt: skip


def _say(
    writer: IndexWriter, at: Nanos, kind: EventKind, learner: int | None, step: int, text: str, state: LaneState | None
) -> None:
    whose = f"learner{learner} {text}" if learner is not None else text
    writer.put_event(EventRow(at, kind, learner, step, whose, state))


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "index").iterdir())


