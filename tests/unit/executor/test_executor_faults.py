"""What survives a fault: nothing poisoned travels, nothing announced is lost, and who recovers takes what it should."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import Batch, Run, batch_norm_mlp, configured, draw, finite, run, same, small_task_for
from torch import Tensor

from atoll.chaos import Kill, KillSyncer
from atoll.codecs import Packet, codec
from atoll.executor.learner import TensorLearner
from atoll.executor.syncer import TensorSyncer
from atoll.ids import SYNCER, WorkerId
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import DUE, Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Accept,
    Adopt,
    Contribution,
    Effect,
    Envelope,
    InnerStep,
    Keep,
    LoadState,
    LoadTheta,
    Merge,
    MergeRejected,
    Poisoned,
    Recovered,
    Send,
    Share,
    Stage,
    Started,
    StepDone,
    Store,
    Stored,
)  # fmt: skip
from atoll.store.tensor_files import StorageFailed
from atoll.store.versions import MemoryVersions
from atoll.tasks.task import initial_versions

TWO = {"fragmentation": "tensor", "fragments": 2}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "diloco": ("diloco", {}),
    "async_diloco": ("async_diloco", {"overlap": 4}),
    "streaming": ("streaming", TWO),
    "decoupled": ("decoupled", {}),
    "decoupled with everybody": ("decoupled", {"quorum": 3, "grace": "none"}),
}


# ---------------------------------------------------------------- NaN


def poisoned(*streams: int) -> Callable[[int, int, int], Batch]:
    """One NaN in the sixth batch of these streams."""

    def batch(learner: int, stream: int, position: int) -> Batch:
        x, y = draw(learner, stream, position)
        if stream in streams and position == 5:
            x[0, 0] = math.nan
        return x, y

    return batch


def assert_nothing_poisoned_travelled(found: Run) -> None:
    for envelope, payload in found.packets:
        if payload.content is not None:
            packet, buffers = payload.content
            assert torch.isfinite(codec(packet.codec).decode(packet)).all(), envelope
            assert torch.isfinite(buffers).all(), envelope


@pytest.mark.parametrize("which", PRESETS)
def test_learner_with_nan_in_its_weights_names_the_tensor_and_recovers(which: str) -> None:
    preset, protocol = PRESETS[which]
    found = run(configured(preset, protocol=protocol, total_steps=16), batch=poisoned(1))
    first = found.events(Poisoned, 1)[0]
    assert first.where.removeprefix("tensor ") in ("first.weight", "first.bias", "second.weight", "second.bias")
    assert_nothing_poisoned_travelled(found)
    assert [e.learner for e in found.effects(Recovered)].count(1) >= 2, "it joined, and it recovered"
    assert all(finite(learner.model.state_dict()) for learner in found.executor.learners.values())
    assert finite(found.theta()) and found.cluster.syncer.outer_step == 16


@pytest.mark.parametrize("which", PRESETS)
def test_run_with_nan_on_every_learner_at_once_goes_on_from_theta(which: str) -> None:
    preset, protocol = PRESETS[which]
    found = run(configured(preset, protocol=protocol, total_steps=16), batch=poisoned(0, 1, 2))
    assert all(any(e.where.startswith("tensor ") for e in found.events(Poisoned, learner)) for learner in (0, 1, 2))
    assert_nothing_poisoned_travelled(found)
    assert all(finite(learner.model.state_dict()) for learner in found.executor.learners.values())
    assert finite(found.theta()) and found.cluster.syncer.outer_step == 16


def alone(preset: str = "diloco", build: Any = None, **sections: Any) -> TensorLearner:
    """A learner by itself, holding version 0 of everything."""
    config = configured(preset, **sections)
    task = small_task_for(config, *([build] if build else []))
    learner = TensorLearner(task, 0)
    for p, version in enumerate(MemoryVersions(initial_versions(task)).newest()):
        learner.execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced, version.buffers)))
        learner.execute(Adopt(p, 0, 0.0, False, DUE), None)
    return learner


def contribution(learner: TensorLearner, outer_step: int, fragment: int = 0) -> Payload:
    body = Contribution(outer_step, fragment, 1, 0, 1, 1, 1, 1)
    payload = learner.payload_for(Send(Envelope(0, 0, SYNCER, 0, (0, 0), body)))
    assert payload is not None
    return payload


def test_learner_staging_nan_after_a_clean_copy_does_not_send_the_old_copy() -> None:
    """The machine says which local step a copy is of; bytes of another step would be weighed wrongly."""
    learner = alone("decoupled")
    learner.execute(InnerStep(1, 0, 0, 0), None)
    assert learner.execute(Stage(0, 1, NO_VERSION, False), None) == ()
    assert contribution(learner, 4).content is not None
    with torch.no_grad():
        learner.model.first.weight[0, 0] = math.nan
    (event,) = learner.execute(Stage(0, 2, NO_VERSION, False), None)
    assert isinstance(event, Poisoned) and event.where == "tensor first.weight"
    assert contribution(learner, 4).content is None


def test_learner_with_nan_in_a_buffer_names_it_and_sends_nothing() -> None:
    learner = alone(build=batch_norm_mlp)
    with torch.no_grad():
        learner.model.norm.running_var[3] = math.inf
    happened = learner.execute(Stage(0, 1, 4, False), None)
    assert [(type(e), e.where) for e in happened] == [(Poisoned, "tensor norm.running_var")]
    assert contribution(learner, 4).content is None


def syncer_alone() -> TensorSyncer:
    task = small_task_for(configured("diloco"))
    return TensorSyncer(task.config, task.layout.fragments, MemoryVersions(initial_versions(task)))


def packet_of(part: Tensor) -> Packet:
    packet = codec("fp32").encode(torch.zeros_like(part))
    packet.codes.copy_(part)  # past the codec's own check, as a broken or hostile learner would
    return packet


def merged(parts: list[Tensor], times: int = 1) -> str:
    """Digest of Theta after one round of these differences, one a learner."""
    syncer = syncer_alone()
    for learner, part in enumerate(parts):
        syncer.execute(Accept(4, 0, learner, 0), Payload("packet", 4, (packet_of(part), torch.empty(0))))
    for _ in range(times):
        syncer.execute(Merge(4, 0, tuple(Share(learner, 1.0, 0, 4) for learner in range(len(parts))), 0, False), None)
    (stored,) = syncer.execute(Store(4, (0,)), None)
    assert isinstance(stored, Stored)
    return syncer.disk.theta_sha256()


SIZE = small_task_for(configured("diloco")).layout.fragments[0].numel
GOOD = [torch.full((SIZE,), 0.5), torch.full((SIZE,), 0.25)]


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        ((packet_of(torch.full((SIZE,), math.nan)), torch.empty(0)), "fragment 0 holds NaN or Inf"),
        ((packet_of(GOOD[0]), torch.tensor([math.inf])), "1 buffer elements are not those of fragment 0"),
        ((packet_of(GOOD[0][:-1]), torch.empty(0)), f"{SIZE - 1} numbers by fp32 are not fragment 0 by fp32"),
        ((codec("int4").encode(GOOD[0]), torch.empty(0)), f"{SIZE} numbers by int4 are not fragment 0 by fp32"),
        (None, "it came without bytes"),
        ((packet_of(GOOD[0]), torch.empty(0)), None),
    ],
)
def test_syncer_inspecting_a_contribution_finds_what_is_wrong_before_the_machine(content: Any, flaw: str | None) -> None:
    found = syncer_alone().inspect(Contribution(4, 0, 4, 0, 4, 4, 4, 4), Payload("packet", 4, content))
    assert found.flaw == (None if flaw is None else Reason(Why.POISONED, flaw))
    if flaw is None:
        assert found.measure is not None and found.measure.norm == pytest.approx(0.5 * math.sqrt(SIZE))


def test_store_that_fails_for_a_full_disk_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    syncer = syncer_alone()
    for learner, delta in enumerate(GOOD):
        syncer.execute(Accept(4, 0, learner, 0), Payload("packet", 4, (packet_of(delta), torch.empty(0))))
    syncer.execute(Merge(4, 0, tuple(Share(m, 1.0, 0, 4) for m in range(2)), 0, False), None)

    def full(*_: object) -> None:
        raise StorageFailed("no space")

    with monkeypatch.context() as patch, pytest.raises(StorageFailed):
        patch.setattr(syncer.disk, "put", full)
        syncer.execute(Store(4, (0,), (1e9,)), None)
    (event,) = syncer.execute(Store(4, (0,), (1e9,)), None)
    assert isinstance(event, Stored) and syncer.disk.theta_sha256() == merged(GOOD)


def test_merged_weights_that_jump_or_hold_nan_are_not_stored() -> None:
    for factor, limit in ((1.0, 1e-6), (math.inf, 0.0)):
        syncer = syncer_alone()
        for learner, delta in enumerate(GOOD):
            syncer.execute(Accept(4, 0, learner, 0), Payload("packet", 4, (packet_of(factor * delta), torch.empty(0))))
        before = syncer.disk.at(0, 0).theta.clone()
        shares = tuple(Share(m, 1.0, 0, 4) for m in range(2))
        syncer.execute(Merge(4, 0, shares, 0, False), None)
        (event,) = syncer.execute(Store(4, (0,), (limit,)), None)
        assert isinstance(event, MergeRejected) and event.fragment == 0
        assert torch.equal(syncer.disk.newest()[0].theta, before), "nothing was stored"


def test_merge_carried_out_twice_gives_the_same_bytes() -> None:
    assert merged(GOOD, times=2) == merged(GOOD) != merged(GOOD[:1])


# ---------------------------------------------------------------- error feedback


def feedback_learner() -> TensorLearner:
    learner = alone(protocol={"codec_up": "int4", "error_feedback": True})
    learner.execute(InnerStep(1, 0, 0, 0), None)
    learner.execute(Stage(0, 1, 4, False), None)
    contribution(learner, 4)
    return learner


def adopt(learner: TensorLearner, version: int, *, merged: bool) -> None:
    announced = learner.anchors[0].clone()
    learner.execute(Keep(0, version, NO_VERSION), Payload("fragment", 0, (announced, torch.empty(0))))
    learner.execute(Adopt(0, version, 0.0, merged, Reason(Why.DUE)), None)


def test_residual_is_committed_when_the_packet_was_merged() -> None:
    learner = feedback_learner()
    difference = learner._difference(0)
    packet, _ = contribution(learner, 4).content
    left = difference - codec("int4").decode(packet)
    assert torch.equal(learner.state(with_residuals=True)["residuals"][0], left), "assumed merged"
    adopt(learner, 4, merged=True)
    assert torch.equal(learner.state(with_residuals=True)["residuals"][0], left)


def test_residual_is_dropped_when_the_packet_was_not_merged() -> None:
    learner = feedback_learner()
    adopt(learner, 4, merged=False)
    assert learner.state(with_residuals=True)["residuals"] == {}


def test_residual_joins_the_next_packet() -> None:
    learner = feedback_learner()
    adopt(learner, 4, merged=True)
    residual = learner.state(with_residuals=True)["residuals"][0]
    assert residual.count_nonzero() > 0
    learner.execute(Stage(0, 1, 8, False), None)  # nothing was trained since: all there is to send is the residual
    packet, _ = contribution(learner, 8).content
    assert torch.equal(codec("int4").decode(packet), codec("int4").decode(codec("int4").encode(residual)))


def test_residual_of_a_packet_on_its_way_is_not_sent_with_the_next_one_too() -> None:
    """On a slow downlink a fragment is pulled again before the version with its last packet is adopted."""
    learner = feedback_learner()
    sums = [learner._difference(0), contribution(learner, 4).content[0]]
    for outer_step in (8, 12):
        learner.execute(InnerStep(1, 0, outer_step, 0), None)
        learner.execute(Stage(0, 1, outer_step, False), None)
        sums += [learner._difference(0), contribution(learner, outer_step).content[0]]
    adopt(learner, 12, merged=True)
    carried = sum(codec("int4").decode(packet) for packet in sums[1::2])
    residual = learner.state(with_residuals=True)["residuals"][0]
    torch.testing.assert_close(carried + residual, sum(sums[::2]))


@pytest.mark.parametrize("path", ["theta", "peer"])
def test_residual_after_recovery_is_zero(path: str) -> None:
    learner = feedback_learner()
    adopt(learner, 4, merged=True)
    if path == "theta":
        learner.execute(LoadTheta(DUE), None)
    else:
        peer = feedback_learner()
        adopt(peer, 4, merged=True)
        learner.execute(LoadState(1, (4,)), Payload("state", 0, peer.state()))
    assert learner.state(with_residuals=True)["residuals"] == {}


def test_error_feedback_over_a_run_ends_closer_to_the_exact_run() -> None:
    def theta(up: str, feedback: bool) -> Tensor:
        protocol = {"codec_up": up, "error_feedback": feedback}
        (flat,), _ = run(configured("diloco", total_steps=40, protocol=protocol)).executor.disk.theta()
        return flat

    exact = theta("fp32", False)
    assert (theta("int2", True) - exact).norm() < (theta("int2", False) - exact).norm()


# ---------------------------------------------------------------- a killed syncer


@pytest.mark.parametrize("preset", ["diloco", "decoupled"])
@pytest.mark.parametrize("at", [4.03, 6.6, 9.0])
def test_syncer_killed_and_back_holds_the_very_bytes_that_were_announced(preset: str, at: float) -> None:
    class Announced(Run):
        """Every digest a syncer stored, and the bytes on disk at the moment of each later adoption."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.unlike: list[str] = []

        def carried_out(self, worker: WorkerId, effect: Effect) -> None:
            if isinstance(effect, Adopt):
                version = self.executor.disk.versions[effect.fragment].get(effect.version)
                anchor = self.executor.learners[worker].anchors[effect.fragment]
                if version is None or not torch.equal(anchor, version.announced):
                    self.unlike.append(f"learner {worker}: {effect}")

    config = configured(preset, total_steps=16, protocol={"codec_down": "bf16"})
    found = Announced(small_task_for(config), [KillSyncer(at, 3.0)])
    found.go()
    assert len([1 for _, w, e, _ in found.seen if w == SYNCER and isinstance(e, Started)]) == 2
    assert found.unlike == []
    stored = [e.outer_step for e in found.events(Stored, SYNCER)]
    assert stored == sorted(set(stored)), "a stored round never reopens"
    assert found.cluster.syncer.outer_step == 16


def test_synchronous_run_with_a_killed_syncer_ends_with_the_same_theta() -> None:
    """Everybody waits for it, and nothing that was staged is lost."""
    config = configured("diloco", total_steps=16)
    killed = run(config, [KillSyncer(6.6, 3.0)])
    assert killed.cluster.virtual_seconds() > run(config).cluster.virtual_seconds() + 1.0
    assert same(killed.theta(), run(config).theta())


# ---------------------------------------------------------------- a killed learner


class Recovery(Run):
    """Keeps the newcomer's and its peer's state at the moment the newcomer has loaded it."""

    moment: tuple[dict[str, Any], dict[str, Any]] | None = None

    def carried_out(self, worker: WorkerId, effect: Effect) -> None:
        if isinstance(effect, LoadState):
            # what the peer holds now may be a step further than what it sent; the payload is the state it sent
            self.moment = (self.executor.learners[worker].state(), self._sent_state)

    def sent(self, envelope: Envelope, payload: Payload | None) -> None:
        super().sent(envelope, payload)
        if payload is not None and payload.kind == "state":
            self._sent_state = payload.content


def flat_moments(state: dict[str, Any]) -> list[Tensor]:
    return [value for slot in state["optimizer"]["state"].values() for value in slot.values()]


def test_learner_recovered_through_a_peer_has_its_weights_and_draws_its_own_data() -> None:
    found = Recovery(small_task_for(configured(total_steps=30)), [Kill(8.0, 1, 4.0)])
    found.go()
    sources = [e.source for e in found.effects(Recovered) if e.learner == 1]
    assert sources[0] == SYNCER and sources[1] in (0, 2)
    assert found.moment is not None
    mine, peers = found.moment
    assert same(mine["tensors"], peers["tensors"])
    assert len(flat_moments(mine)) == len(flat_moments(peers)) > 0
    assert all(torch.equal(a, b) for a, b in zip(flat_moments(mine), flat_moments(peers), strict=True))
    again = next(i for i, (_, w, e, _) in enumerate(found.seen) if w == 1 and isinstance(e, Started) and e.incarnation == 1)
    drawn = {w: {(e.stream, e.batch) for e in found.effects(InnerStep, w, since=again)} for w in range(3)}
    assert drawn[1] and {stream for stream, _ in drawn[1]} == {1}, "not the peer's stream"
    assert not drawn[1] & (drawn[0] | drawn[2]), "nor what was leased to others in the meantime"


def test_learner_killed_and_recovered_from_theta_under_mixing_takes_theta_as_it_is() -> None:
    """alpha mixes in a learner's own weights; one that has just started has none worth keeping."""
    unlike = []

    class Lonely(Run):
        def carried_out(self, worker: WorkerId, effect: Effect) -> None:
            if isinstance(effect, LoadTheta):
                learner = self.executor.learners[worker]
                expected = self.executor.task.model_of(learner.anchors, [torch.empty(0)] * 2).state_dict()
                unlike.append(not same(learner.model.state_dict(), expected))

    config = configured("streaming", learners=1, total_steps=16, protocol=TWO | {"alpha": 0.5})
    Lonely(small_task_for(config), [Kill(8.0, 0, 3.0)]).go()
    assert unlike == [False, False]


def test_loss_reported_by_a_poisoned_step_is_the_measurement() -> None:
    found = run(configured("diloco", total_steps=16), batch=poisoned(1))
    losses = [e.loss for e in found.events(StepDone, 1)]
    assert math.isnan(losses[5]) and math.isfinite(losses[4]) and math.isfinite(losses[-1])
