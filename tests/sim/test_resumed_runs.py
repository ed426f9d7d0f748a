"""A run is killed and goes on from its newest snapshot, with the same learners, fewer or more; every invariant is watched.

What is not bit for bit the uninterrupted run, and why: copies staged at step boundaries are no part of a snapshot. Where a
learner trains while its staged copy waits to be pulled (tau > 0), the resumed round takes a later copy, or under exact
adoption a learner stands back to the boundary before it. With tau = 0 (diloco) nothing is in between, and bits are equal.
"""

from __future__ import annotations

import math

import msgspec
import pytest
from resumption import CASES, RecordingExecutor, Run, Story, config_for, newest_sealed
from tiers import mostly_soak

from atoll.chaos import ChaosPlan, Kill, KillSyncer
from atoll.config import Config, changed
from atoll.config.resuming import refuse_changed
from atoll.executor.virtual_run import TensorExecutor
from atoll.protocol.vocabulary import LoadSnapshot, Merge, Recovered, Reissue
from atoll.tasks.task import language_task


@pytest.mark.parametrize("learners", [4, 2, 6])
@pytest.mark.parametrize("preset", CASES)
def test_resumed_run_ends_with_any_number_of_learners(preset: str, learners: int) -> None:
    story = Story(preset, learners)
    run = story.after
    assert 10 <= story.snapshot < 40
    assert run.cluster.syncer.outer_step == 60
    assert len(run.effects(LoadSnapshot)) == min(4, learners)
    joined = {e.learner for e in run.effects(Recovered) if isinstance(e, Recovered)}
    assert joined >= set(range(4, learners)), "those the snapshot does not know join as usual"
    assert not joined & set(range(4)), "those it knows need nothing"


@pytest.mark.parametrize("preset", CASES)
def test_data_goes_on_where_it_was_and_nothing_is_trained_twice(preset: str) -> None:
    story = Story(preset, 4)
    before, after = story.before.drawn.until_recorded(story.snapshot), story.after.drawn
    assert after.reissued == set()
    assert len(after.all()) == len(set(after.all()))
    assert not story.trained_before() & set(after.all())
    for m in range(4):  # nobody was lost: each learner goes through its own stream without a gap
        both = before[m] + after.by[m]
        assert both == [(m, i) for i in range(len(both))]


@pytest.mark.parametrize("preset", ["decoupled", "streaming", "diloco"])
def test_units_of_learners_that_do_not_come_back_are_trained_by_those_that_do(preset: str) -> None:
    story = Story(preset, 2, stop=25, total_steps=120, step_noise=0.2)
    run = story.after
    reissued = {e.learner: e.units for e in run.effects(Reissue) if isinstance(e, Reissue)}
    assert set(reissued) == {2, 3}, "after a while, not at once"
    held = {lease.learner: set(lease.granted) | set(lease.done) for lease in story.stored.syncer_state.leases}  # type: ignore[union-attr]
    assert {m: set(units) for m, units in reissued.items()} == {m: held[m] for m in (2, 3)}
    drawn = run.drawn.all()
    assert len(drawn) == len(set(drawn))
    assert {stream for stream, _ in drawn} > {0, 1}


def test_learner_killed_in_a_resumed_run_and_a_killed_syncer_come_back_as_ever() -> None:
    """The re-derived syncer is given its state again; the learner's new process has no snapshot to go on from."""
    plan = ChaosPlan((Kill(5.3, 1, 3.0), KillSyncer(12.2, 2.0), Kill(14.0, 0, 2.0)))
    for preset in ("decoupled", "streaming", "diloco"):
        story = Story(preset, 4, plan=plan)
        assert len(story.after.effects(LoadSnapshot)) == 4


@pytest.mark.parametrize("seed", mostly_soak(range(6), keep=[0, 2]))
def test_resumed_run_that_is_killed_resumes_again(seed: int) -> None:
    """From snapshot to snapshot, with other numbers of learners each time."""
    preset = ["decoupled", "streaming", "diloco"][seed % 3]
    counts = [[4, 3, 5, 2], [2, 4, 4, 3]][seed // 3]
    config = config_for(preset, counts[0], every=7, total_steps=80, step_noise=0.1)
    executor, stored, stop = RecordingExecutor(config), None, 20
    for learners in counts:
        config = config_for(preset, learners, every=7, total_steps=80, step_noise=0.1)
        kept = (stored.versions.copy(), executor.snapshots) if stored else (None, None)
        executor = RecordingExecutor(config, *kept)
        run = Run(config, executor, resume=stored).until_outer_step(stop)
        stored, stop = newest_sealed(executor.snapshots), stop + 18
    assert Run(config, RecordingExecutor(config, stored.versions.copy(), executor.snapshots), resume=stored).whole()  # type: ignore[union-attr]
    assert run.cluster.syncer.outer_step >= 74


# ---------------------------------------------------------------- with weights


QUICK = (("decoupled", 2), ("streaming", 4), ("diloco", 3))
"""Fewer learners than before, more, and as many; the other pairs are for `make soak`."""


def with_weights(config: Config, stop: int, resumed: Config) -> tuple[TensorExecutor, Run]:
    executor = TensorExecutor(language_task(config))
    Run(config, executor).until_outer_step(stop)
    stored = newest_sealed(executor.snapshots)
    again = TensorExecutor(language_task(resumed), disk=stored.versions.copy(), snapshots=executor.snapshots)
    return again, Run(resumed, again, resume=stored).whole()


@pytest.fixture(scope="module")
def uninterrupted() -> str:
    """Of diloco: neither snapshots nor the learners' speed change its Theta."""
    config = config_for("diloco", 3, every=0, total_steps=30)
    whole = TensorExecutor(language_task(config))
    Run(config, whole).whole()
    return whole.disk.theta_sha256()


@pytest.mark.parametrize(
    ("every", "stop", "slow_factor"),
    mostly_soak([(6, 20, 1.18), (10, 25, 1.18), (11, 25, 3.0), (10, 25, 3.0)], keep=[(10, 25, 1.18), (11, 25, 3.0)]),
    ids=["at a round", "between rounds", "fast ones wait where it is due", "fast ones wait, far ahead"],
)
def test_diloco_resumed_with_the_same_learners_is_the_uninterrupted_run_bit_for_bit(
    every: int, stop: int, slow_factor: float, uninterrupted: str
) -> None:
    config = config_for("diloco", 3, every=every, total_steps=30, slow_factor=slow_factor)
    again, run = with_weights(config, stop, config)
    assert again.disk.theta_sha256() == uninterrupted
    merges = [e for e in run.effects(Merge) if isinstance(e, Merge)]
    assert merges
    assert all(share.weight == 1.0 for merge in merges for share in merge.shares)


FEEDBACK = {"codec_up": "int4", "error_feedback": True}


@pytest.mark.parametrize(("every", "stop"), [(6, 20), (11, 25), (12, 25)])
def test_what_a_packet_did_not_carry_is_there_after_a_resumption(every: int, stop: int) -> None:
    """Also of a packet that was sent when the snapshot was taken, and whose merge was not adopted yet."""
    plain = config_for("diloco", 3, every=0, total_steps=30, protocol=FEEDBACK)
    whole = TensorExecutor(language_task(plain))
    Run(plain, whole).whole()
    config = config_for("diloco", 3, every=every, total_steps=30, protocol=FEEDBACK, slow_factor=3.0)
    again, _ = with_weights(config, stop, config)
    assert again.disk.theta_sha256() == whole.disk.theta_sha256()


@pytest.mark.parametrize(
    ("preset", "learners"),
    [
        pytest.param(preset, learners, marks=[] if (preset, learners) in QUICK else pytest.mark.soak)
        for preset in ("decoupled", "streaming", "diloco") for learners in (3, 2, 4)
    ],
)  # fmt: skip
def test_resumed_run_trains_on(preset: str, learners: int) -> None:
    config = config_for(preset, 3, total_steps=40)
    fresh = TensorExecutor(language_task(config))
    first = fresh.task.evaluate_theta(*fresh.disk.theta())
    again, _ = with_weights(config, 25, config_for(preset, learners, total_steps=40))
    final = again.task.evaluate_theta(*again.disk.theta())
    assert math.isfinite(final)
    assert final < 0.9 * first


@pytest.mark.parametrize(("had", "has"), [(("int4", "bf16"), ("int8", "fp32")), (("bf16", "fp32"), ("int4", "int8"))])
def test_resumed_run_may_have_other_codecs(had: tuple[str, str], has: tuple[str, str]) -> None:
    """Versions are stored whole beside their packets, and a packet says whose it is."""
    first, again = (
        changed(config_for("decoupled", 2, total_steps=30), [f"protocol.codec_up={up}", f"protocol.codec_down={down}"])
        for up, down in (had, has)
    )
    refuse_changed(msgspec.to_builtins(first), again)
    executor, run = with_weights(first, 25, again)
    assert run.cluster.syncer.outer_step == 30
    assert math.isfinite(executor.task.evaluate_theta(*executor.disk.theta()))


def test_ddp_resumed_is_the_uninterrupted_run_bit_for_bit() -> None:
    """Theta and the outer moments are the whole state; gradients of the step that was under way are taken anew."""
    config = config_for("ddp", 3, total_steps=24)
    whole = TensorExecutor(language_task(config))
    Run(config, whole).whole()
    again, _ = with_weights(config, 15, config)
    assert again.disk.theta_sha256() == whole.disk.theta_sha256()
