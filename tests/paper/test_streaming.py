"""Streaming DiLoCo (docs/reference/arithmetic.md): each clause that can be stated on machines."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tiny import Run, tensors_in, tiny_config, tiny_task

from atoll.codecs import codec
from atoll.config import Config, Outer, load
from atoll.errors import ConfigError
from atoll.executor.learner import TensorLearner
from atoll.executor.null import NullLearner
from atoll.ids import SYNCER, nanos
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Adopt, Effect, Event, FixParticipants, InnerStep, Keep, Merge, Stage, StepDone, Wait
from atoll.rules import Schedule, offsets
from atoll.sim.cluster import VirtualCluster


def streaming(**protocol: object) -> Config:
    sizes = {"fragmentation": "balanced", "fragments": 3, "local_steps_per_round": 6, "overlap": 2, "codec_up": "fp32"}
    return tiny_config("streaming", total_steps=24, protocol=sizes | protocol)


class Steps:
    """(learner, kind, fragment, outer step, local step) of stagings and adoptions."""

    def __init__(self, config: Config) -> None:
        self.local: dict[int, int] = {}
        self.staged: list[tuple[int, int, int, int]] = []
        self.adopted: list[tuple[int, int, int, int]] = []
        self.waits: list[tuple[int, str]] = []
        self.cluster = VirtualCluster(config, observers=[self])
        self.cluster.run(until_seconds=5000)

    def __call__(self, now: int, worker: int, event: Event, effects: list[Effect]) -> None:
        self.local[worker] = self.local.get(worker, 0) + isinstance(event, StepDone)
        for e in effects:
            if isinstance(e, Stage):
                self.staged.append((worker, e.fragment, e.slot, self.local[worker]))
            if isinstance(e, Adopt) and e.version > 0:
                self.adopted.append((worker, e.fragment, e.version, self.local[worker]))
            if isinstance(e, Wait):
                self.waits.append((worker, e.reason))


def test_fragment_is_due_when_t_less_its_offset_is_a_multiple_of_h() -> None:
    """Fragment p is due when (t - t_p) mod H == 0; offsets t_p spread evenly over H."""
    config = streaming()
    schedule = Schedule(config)
    assert offsets(3, 6) == (0, 2, 4)
    assert {p: [t for t in range(1, 19) if p in schedule.due(t)] for p in range(3)} == {
        0: [6, 12, 18], 1: [2, 8, 14], 2: [4, 10, 16],
    }  # fmt: skip


def test_learner_stages_a_fragment_at_the_local_step_it_is_due() -> None:
    """Fragment p is due when (t - t_p) mod H == 0: on the learner that is its own local step."""
    steps = Steps(streaming())
    assert all(slot == local for _, _, slot, local in steps.staged)
    assert [(p, t) for m, p, t, _ in steps.staged if m == 0][:4] == [(1, 2), (2, 4), (0, 6), (1, 8)]


def test_learner_adopts_exactly_tau_inner_steps_after_the_pull() -> None:
    """tau inner steps later it adopts."""
    steps = Steps(streaming())
    assert len(steps.adopted) > 10
    assert all(local == version + 2 for _, _, version, local in steps.adopted)


def test_learner_sends_its_difference_to_the_version_it_adopted() -> None:
    """The learner sends delta = Theta_p(adopted) - theta_p(t)."""
    run = Run(streaming(alpha=0.0, overlap=0))
    anchors = {(s.body.fragment, s.body.outer_step): s.body.anchor for s in run.contributions()}
    assert anchors[1, 8] == 2 and anchors[1, 14] == 8 and anchors[0, 12] == 6
    # with outer SGD at rate 1 and alpha 0, Theta must become the mean of what each learner had: adopted minus difference
    plain = Run(msgspec.structs.replace(run.config, outer=Outer(outer_optimizer="sgd", outer_learning_rate=1.0)))
    versions = plain.executor.disk.versions[1]
    newest = max(versions)
    sent = [s for s in plain.contributions() if (s.body.fragment, s.body.outer_step) == (1, newest)]
    had = [versions[s.body.anchor].announced - codec("fp32").decode(s.payload.content[0]) for s in sent]
    torch.testing.assert_close(versions[newest].theta, torch.stack(had).mean(0), rtol=1e-5, atol=1e-6)


def test_adoption_mixes_own_and_global_by_alpha() -> None:
    """theta_p = alpha*theta_p + (1-alpha)*OuterOpt(Theta_p, merged delta). alpha 1: keep local; 0: take global; 0.5: average."""
    for alpha in (0.0, 0.5, 1.0):
        task = tiny_task(tiny_config("diloco"))
        learner = TensorLearner(task, 0)
        numel = task.layout.fragments[0].numel
        learner.execute(InnerStep(1, 0, 0, 0), None)
        own = torch.cat([p.detach().reshape(-1) for p in learner.model.parameters()]).clone()
        theta = torch.linspace(-1, 1, numel)
        learner.execute(Keep(0, 1, -1), Payload("fragment", 0, (theta, torch.empty(0))))
        learner.execute(Adopt(0, 1, alpha, True, Reason(Why.DUE)), None)
        now = torch.cat([p.detach().reshape(-1) for p in learner.model.parameters()])
        torch.testing.assert_close(now, alpha * own + (1 - alpha) * theta)
        assert torch.equal(learner.anchors[0], theta)  # the anchor is Theta itself, never the mixture


def test_outer_step_starts_from_the_last_synchronised_copy_not_from_mixed_weights() -> None:
    """The outer step starts from the last synchronised outer copy, never from the mixed weights."""
    run = Run(streaming(alpha=0.5))
    merges = [m for m in run.effects(Merge) if m.fragment == 1]
    assert [m.previous for m in merges] == [0, *[m.outer_step for m in merges[:-1]]]
    learner = run.executor.learners[0]
    mixed = {n: t.detach() for n, t in learner.model.named_parameters()}
    for p, fragment in enumerate(run.task.layout.fragments):
        anchor = learner.anchors[p]
        whole = torch.cat([mixed[s.name].reshape(-1) for s in fragment.params])
        assert not torch.equal(anchor, whole)


def test_overlap_must_stay_below_h() -> None:
    """tau < H (async_diloco apart)."""
    with pytest.raises(ConfigError, match="must be below"):
        streaming(overlap=6)
    assert load(preset_name="async_diloco").protocol.overlap == load(preset_name="async_diloco").protocol.local_steps_per_round


def test_overlap_may_differ_per_learner() -> None:
    """tau may differ per learner (robust to a gap of about 5)."""
    config = tiny_config("streaming", total_steps=36, protocol={
        "fragmentation": "balanced", "fragments": 3, "local_steps_per_round": 9, "overlap": 1, "overlap_by_learner": (1, 6),
    })  # fmt: skip
    steps = Steps(config)
    for learner, tau in ((0, 1), (1, 6)):
        late = {local - version for m, _, version, local in steps.adopted if m == learner}
        assert late == {tau}


def test_every_learner_takes_part_in_every_round() -> None:
    """quorum K: all; grace: none."""
    fixed: list[FixParticipants] = []

    def watch(now: int, worker: int, event: Event, effects: list[Effect]) -> None:
        fixed.extend(e for e in effects if isinstance(e, FixParticipants))

    VirtualCluster(streaming(), observers=[watch]).run(until_seconds=1000)
    assert {f.participants for f in fixed} == {(0, 1)}


def test_learner_waits_only_when_the_result_is_not_back_tau_steps_later() -> None:
    """exact: at pulled local_step + tau, waiting if the result is not there yet."""
    fast = tiny_config("streaming", protocol={"fragmentation": "whole", "local_steps_per_round": 4, "overlap": 2},
                       cluster={"step_noise": 0.0})  # fmt: skip
    assert [r for _, r in Steps(fast).waits if r.why is Why.VERSION_AWAITED] == []
    slow = tiny_config("streaming", protocol={"fragmentation": "whole", "local_steps_per_round": 4, "overlap": 2},
                       cluster={"step_noise": 0.0, "latency_seconds": 1.5})  # fmt: skip
    assert {r.detail for _, r in Steps(slow).waits if r.why is Why.VERSION_AWAITED} == {
        f"outer step {t} of fragment 0 is not back" for t in (4, 8)
    }


def test_learner_may_lead_by_at_most_tau() -> None:
    """lead [ours]: how many local steps a learner may run past its last due adoption: tau for K = M."""
    steps = Steps(streaming())
    position: dict[int, int] = {}
    for learner, _, version, local in steps.adopted:
        position[learner] = local
        assert local - version <= 2
    assert set(position) == {0, 1}


def test_peak_bytes_of_a_round_are_those_of_one_fragment() -> None:
    """Streaming sends one fragment at a time: the peak falls by P against a whole-model exchange of the same model."""
    whole = NullLearner(load(preset_name="diloco"), 0)
    parts = NullLearner(load(preset_name="streaming", assignments=["model.numbers.layers=9", "protocol.codec_up=fp32"]), 0)
    assert whole._up_bytes == 4_000_000 and parts._up_bytes == 1_000_000


def test_outer_gradients_go_up_in_four_bits_and_come_down_in_full() -> None:
    """wire up / down: e3m0 / fp32."""
    run = Run(streaming(codec_up="e3m0"))
    fragment = run.task.layout.fragments[1]
    up = [s for s in run.contributions() if s.body.fragment == 1]
    assert {s.payload.nbytes for s in up} == {codec("e3m0").nbytes(fragment.numel)}
    down = [s for s in run.sent if s.envelope.sender == SYNCER and s.payload is not None and s.body.fragment == 1]
    assert {s.payload.nbytes for s in down} == {4 * fragment.numel}
    assert all(len(tensors_in(s.payload.content)) == 2 for s in down)


def test_virtual_time_of_streaming_with_enough_overlap_is_that_of_training_alone() -> None:
    """tau hides the communication: with results back in time no learner ever waits for the network."""
    config = tiny_config("streaming", protocol={"fragmentation": "whole", "local_steps_per_round": 4, "overlap": 2},
                         cluster={"step_noise": 0.0, "latency_seconds": 0.1})  # fmt: skip
    steps = Steps(config)
    twelfth = 12 * nanos(1.0)
    assert steps.cluster.world.now < twelfth + nanos(3.0)
