"""A learner of a live run attacks: the others train on, Theta stays sound, and the refusals name the attacker alone."""

from __future__ import annotations

from pathlib import Path

from harness import LONG, STEADY, effects_of, judge, run, small

from atoll.chaos import Hostile
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Refuse
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Record


def test_poison_of_one_of_five_is_refused_and_the_others_train(tmp_path: Path) -> None:
    config = small(5, total_steps=LONG, inner=STEADY)
    expelled = rounds = 0

    def watch(cluster: LocalCluster, record: Record) -> None:
        nonlocal expelled, rounds
        for effect in record.effects:
            expelled += isinstance(effect, Membership) and effect.standing == "expelled"
            rounds += isinstance(effect, FixParticipants)

    run(tmp_path, config, Hostile(0.0, 4, "noise", 1e4), watch=watch, until=lambda: expelled > 0 and rounds > 90)
    judge(tmp_path, config, whole=False)
    summary = verdict(config, tmp_path)
    assert summary.loss_final is not None and summary.loss_first is not None
    assert summary.loss_final < 0.8 * summary.loss_first
    refused = {(effect.peer, effect.reason.why) for effect in effects_of(tmp_path, Refuse)}
    assert {peer for peer, why in refused if why is not Why.LATE} == {4}, refused
    assert set(summary.expelled) == {"4"}, "and at last it lost its place"
