"""One hostile learner of five, in virtual time: what it gains, and what it loses. The rows are those of docs/operations/trust.md.

Roles and promises: the syncer is trusted; a learner may lie in every message and every tensor. A run of four or more learners
survives any one of them, with bounded harm, and says which one it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import median

import pytest
import torch
from small_runs import Run, configured, run

from atoll.chaos import ATTACKS, Attack, ChaosPlan, Hostile, KillSyncer
from atoll.config import load
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import Contribution, Effect, Envelope, Event, Merge, Received, Refuse, Send
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster

HOSTILE = 4


class Watcher:
    """What the syncer did: shares, refusals, the largest count it sent."""

    def __init__(self) -> None:
        self.shares: list[dict[int, float]] = []
        self.refused: list[tuple[int, Why]] = []
        self.clock = 0

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker != SYNCER:
            return
        for effect in effects:
            if isinstance(effect, Merge):
                total = sum(share.weight for share in effect.shares)
                self.shares.append({share.learner: share.weight / total for share in effect.shares})
            elif isinstance(effect, Refuse):
                self.refused.append((effect.peer, effect.reason.why))
            elif isinstance(effect, Send):
                self.clock = max(self.clock, effect.envelope.clock)


STEPS = 60


@cache
def attacked(attack: Attack) -> tuple[VirtualCluster, Watcher]:
    config = load(preset_name="decoupled", overrides={"learners": 5, "total_steps": STEPS})
    safety, watcher = Safety(config), Watcher()
    plan = ChaosPlan((Hostile(0.0, HOSTILE, attack, 1.0),))
    cluster = VirtualCluster(config, plan=plan, observers=[safety, watcher])
    safety.attach(cluster)
    cluster.run(until_seconds=2000)
    return cluster, watcher


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_breaks_an_invariant_or_slows_the_others_below_seven_tenths(attack: Attack) -> None:
    cluster, watcher = attacked(attack)
    assert cluster.virtual_seconds() < STEPS / 0.7
    assert {learner for learner, _ in watcher.refused} <= {HOSTILE}, "a victim is not blamed"


@pytest.mark.parametrize("attack", ["steps", "tokens"])
def test_a_lie_about_work_raises_no_share(attack: Attack) -> None:
    _, watcher = attacked(attack)
    gained = [shares[HOSTILE] for shares in watcher.shares if HOSTILE in shares and len(shares) == 5]
    assert gained and max(gained) <= 0.5, "no share of a merge of four or more is above a half"
    assert median(gained) < 0.25, "with five alike, a fifth is fair"


def test_a_huge_count_is_passed_on_to_nobody() -> None:
    _, watcher = attacked("clock")
    assert watcher.clock == STEPS


def test_a_learner_that_goes_on_breaking_the_rules_is_expelled() -> None:
    config = load(preset_name="decoupled", overrides={"learners": 5, "total_steps": 120, "limits": {"offences_max": 3}})
    cluster = VirtualCluster(config)
    cluster.start()
    while cluster.syncer.outer_step < 20:
        cluster.world.step()
    member = cluster.syncer.roster.get(HOSTILE)
    assert member is not None
    no_such_fragment = Contribution(1, 999, 1, 0, 1, 1, 1, 1)
    for _ in range(3):
        cluster.dispatch(SYNCER, Received(Envelope(HOSTILE, 0, SYNCER, 0, 0, no_such_fragment), 0))
    assert member.standing == "expelled" and not member.connected
    while not cluster.syncer.finished:
        cluster.world.step()
    assert member.standing == "expelled", "it does not come back under this id"


# ---------------------------------------------------------------- with tensors


@cache
def trained(merge: str, attack: Attack | None, size: float) -> Run:
    config = configured("decoupled", learners=5, total_steps=40, protocol={"merge": merge, "embedding_merge": merge})
    return run(config, () if attack is None else (Hostile(0.0, HOSTILE, attack, size),))


def theta_norm(done: Run) -> float:
    thetas, _ = done.executor.disk.theta()
    return float(torch.cat([theta.reshape(-1) for theta in thetas]).norm())


@pytest.mark.parametrize(("attack", "size"), [("noise", 1e4), ("scale", 1e6), ("sign_flip", 1e6)])
def test_poison_is_refused_from_the_first_contribution_on(attack: Attack, size: float) -> None:
    """With the plain mean: the checks alone keep Theta where honest learners take it."""
    assert theta_norm(trained("mean", attack, size)) == pytest.approx(theta_norm(trained("mean", None, 1.0)), rel=0.1)


def test_a_syncer_that_was_killed_judges_as_before() -> None:
    """What is usual is on its tape: the first contribution after its return is judged like the last one before."""
    config = configured("decoupled", learners=5, total_steps=40, protocol={"merge": "mean", "embedding_merge": "mean"})
    attack = Hostile(12.0, HOSTILE, "scale", 1e4)
    done = run(config, (KillSyncer(10.0, 2.0), attack))
    assert {(effect.peer, effect.reason.why) for effect in done.effects(Refuse)} == {(HOSTILE, Why.OUTLIER)}
    assert theta_norm(done) == pytest.approx(theta_norm(run(config, (KillSyncer(10.0, 2.0),))), rel=0.1)
