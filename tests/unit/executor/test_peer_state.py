"""A peer's recovery state: an honest one loads, each kind of bad one is refused before anything is loaded, and options stay one's
own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import configured, small_task_for

from atoll.executor.learner import TensorLearner
from atoll.executor.peer_state import state_bytes_max, wrong_anchor
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import DUE, Why
from atoll.protocol.vocabulary import NO_VERSION, Adopt, InnerStep, Keep, LoadState, StateTransfer
from atoll.runtime.payload import from_buffer, to_buffers
from atoll.store.durable import DurableVersions
from atoll.tasks.task import initial_versions

HELD = StateTransfer(9, 6, (0, 0), ())
INNER: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"optimizer": "Adam"},
    "SGD": {"optimizer": "SGD"},
    "Muon": {"optimizer": "Muon"},
}


def learner(number: int, steps: int, **inner: Any) -> TensorLearner:
    """It holds version 0 of everything and has trained so many steps since."""
    config = configured("streaming", protocol={"fragmentation": "tensor", "fragments": 2}, inner=inner)
    task = small_task_for(config)
    made = TensorLearner(task, number)
    for p, version in enumerate(initial_versions(task)):
        made.execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced, version.buffers)))
        made.execute(Adopt(p, 0, 0.0, False, DUE), None)
    for step in range(steps):
        made.execute(InnerStep(step + 1, number, step, step, 1.0), None)
    return made


def sent_by(peer: TensorLearner) -> Any:
    """As it arrives over the wire."""
    data = b"".join(map(bytes, to_buffers(Payload("state", 0, peer.state())) or []))
    return from_buffer(HELD, memoryview(data)).content


def flaw_of(state: Any, body: StateTransfer = HELD, newcomer: TensorLearner | None = None) -> Why | None:
    found = (newcomer or learner(1, 0)).inspect(body, Payload("state", 0, state)).flaw
    return None if found is None else found.why


@pytest.mark.parametrize("which", INNER)
@pytest.mark.parametrize("trained", [0, 2])
def test_honest_state_is_loaded_whole_whether_the_newcomer_trained_or_not(which: str, trained: int) -> None:
    peer, newcomer = learner(0, 3, **INNER[which]), learner(1, trained, **INNER[which])
    state = sent_by(peer)
    assert flaw_of(state, newcomer=newcomer) is None
    newcomer.execute(LoadState(0, (0, 0)), Payload("state", 0, state))
    for there, here in zip(peer.model.parameters(), newcomer.model.parameters(), strict=True):
        assert torch.equal(there, here)
        for key, value in peer.optimizer.state[there].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(newcomer.optimizer.state[here][key]))


def without_a_tensor(state: Any) -> None:
    del state["tensors"][next(iter(state["tensors"]))]


def with_a_tensor_more(state: Any) -> None:
    state["tensors"]["more"] = torch.zeros(2)


def of_another_shape(state: Any) -> None:
    name = next(iter(state["tensors"]))
    state["tensors"][name] = torch.zeros(1)


def of_another_dtype(state: Any) -> None:
    name = next(iter(state["tensors"]))
    state["tensors"][name] = state["tensors"][name].double()


def with_nan_in_its_weights(state: Any) -> None:
    next(iter(state["tensors"].values())).view(-1)[0] = math.nan


def with_weights_far_from_its_anchors(state: Any) -> None:
    next(iter(state["tensors"].values())).mul_(1e13)


def with_inf_in_an_anchor(state: Any) -> None:
    state["anchors"][1][0] = math.inf


def without_an_anchor(state: Any) -> None:
    state["anchors"][1] = None


def with_an_anchor_less(state: Any) -> None:
    state["anchors"].pop()


def with_an_announcement_that_it_does_not_name(state: Any) -> None:
    state["kept"][7] = (1, torch.zeros(1), torch.zeros(0))


def with_nan_in_a_moment(state: Any) -> None:
    state["optimizer"]["state"][0]["exp_avg"].view(-1)[0] = math.nan


def with_a_negative_second_moment(state: Any) -> None:
    state["optimizer"]["state"][0]["exp_avg_sq"].view(-1)[0] = -1e-8


def with_a_moment_of_another_shape(state: Any) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3, 5, 7)


def without_a_moment(state: Any) -> None:
    del state["optimizer"]["state"][0]["exp_avg_sq"]


def with_state_that_no_optimiser_keeps(state: Any) -> None:
    state["optimizer"]["state"][0]["extra"] = 1.0


def with_a_negative_step(state: Any) -> None:
    state["optimizer"]["state"][0]["step"] = torch.tensor(-4.0)


def with_state_of_a_parameter_that_is_not_there(state: Any) -> None:
    state["optimizer"]["state"][99] = state["optimizer"]["state"][0]


def with_other_groups(state: Any) -> None:
    state["optimizer"]["param_groups"][0]["params"].pop()


def without_an_optimiser(state: Any) -> None:
    state["optimizer"] = None


def without_a_part(state: Any) -> None:
    del state["round_start"]


BAD: list[Callable[[Any], None]] = [
    without_a_tensor, with_a_tensor_more, of_another_shape, of_another_dtype, with_nan_in_its_weights,
    with_weights_far_from_its_anchors, with_inf_in_an_anchor, without_an_anchor, with_an_anchor_less,
    with_an_announcement_that_it_does_not_name, with_nan_in_a_moment, with_a_negative_second_moment,
    with_a_moment_of_another_shape, without_a_moment, with_state_that_no_optimiser_keeps, with_a_negative_step,
    with_state_of_a_parameter_that_is_not_there, with_other_groups, without_an_optimiser, without_a_part,
]  # fmt: skip


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_bad_state_is_refused_before_anything_is_loaded(spoil: Callable[[Any], None]) -> None:
    state = sent_by(learner(0, 2))
    assert flaw_of(state) is None
    spoil(state)
    assert flaw_of(state) is Why.BAD_STATE


@pytest.mark.parametrize("content", [None, 7, [], {}, {"tensors": 3}, torch.zeros(3)])
def test_what_is_no_state_at_all_is_refused(content: Any) -> None:
    assert flaw_of(content) is Why.BAD_STATE


@pytest.mark.parametrize(
    ("held", "pending"),
    [((0,), ()), ((0, 0, 0), ()), ((0, -1), ()), ((0, 10**9), ()), ((0, 0), ((0, 0),)), ((0, 0), ((5, 1),)),
     ((0, 0), ((0, 1), (0, 1)))],
)  # fmt: skip
def test_versions_that_cannot_be_are_refused(held: tuple[int, ...], pending: tuple[tuple[int, int], ...]) -> None:
    assert flaw_of(sent_by(learner(0, 1)), StateTransfer(9, 6, held, pending)) is Why.BAD_STATE


def test_options_of_an_optimiser_are_never_taken_from_a_peer() -> None:
    peer, newcomer = learner(0, 2), learner(1, 0)
    own = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in newcomer.optimizer.param_groups])
    state = sent_by(peer)
    state["optimizer"]["param_groups"][0] |= {"maximize": True, "lr": 1e9, "betas": (0.0, 0.0), "weight_decay": -5.0, "new": 1}
    assert flaw_of(state, newcomer=newcomer) is None
    newcomer.execute(LoadState(0, (0, 0)), Payload("state", 0, state))
    assert [{k: v for k, v in g.items() if k != "params"} for g in newcomer.optimizer.param_groups] == own


def test_another_optimiser_of_a_users_own_loop_blames_nobody() -> None:
    task = small_task_for(configured("streaming", protocol={"fragmentation": "tensor", "fragments": 2}))
    model = task.build()
    own = TensorLearner(task, 1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    state = sent_by(learner(0, 2))
    assert flaw_of(state, newcomer=own) is Why.OTHER_OPTIMIZER
    with_nan_in_its_weights(state)
    assert flaw_of(state, newcomer=own) is Why.BAD_STATE, "NaN is somebody's fault, whatever the optimiser"


def test_frozen_tensors_stay_ones_own() -> None:
    task = small_task_for(configured("streaming", protocol={"fragmentation": "tensor", "fragments": 2}))
    made = []
    for number in (0, 1):
        model = task.build()
        model.register_parameter("frozen", torch.nn.Parameter(torch.full((2,), float(number)), requires_grad=False))
        made.append(TensorLearner(task, number, model=model))
        for p, version in enumerate(initial_versions(task)):
            made[-1].execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced, version.buffers)))
            made[-1].execute(Adopt(p, 0, 0.0, False, DUE), None)
    peer, newcomer = made
    state = sent_by(peer)
    assert newcomer.inspect(HELD, Payload("state", 0, state)).flaw is None
    newcomer.execute(LoadState(0, (0, 0)), Payload("state", 0, state))
    assert newcomer.model.get_parameter("frozen").tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- anchors against what the syncer announced


def test_anchor_other_than_what_was_announced_to_the_newcomer_is_refused() -> None:
    newcomer, state = learner(1, 0), sent_by(learner(0, 1))
    announced = state["anchors"][1].clone()
    newcomer.execute(Keep(1, 0, NO_VERSION), Payload("fragment", 0, (announced, torch.zeros(0))))
    assert flaw_of(state, newcomer=newcomer) is None
    state["anchors"][1][0] += 0.5
    assert flaw_of(state, newcomer=newcomer) is Why.BAD_STATE


def test_anchor_other_than_the_syncers_digest_or_an_older_version_is_refused(tmp_path: Path) -> None:
    task = small_task_for(configured("streaming", protocol={"fragmentation": "tensor", "fragments": 2}))
    disk = DurableVersions.create(tmp_path, initial_versions(task))
    digests = {p: {0: disk.announced_sha256(p, 0)} for p in range(2)}
    state = sent_by(learner(0, 1))
    assert wrong_anchor(HELD, state, digests) is None
    later = {p: {4: disk.announced_sha256(p, 0)} for p in range(2)}
    old, new = wrong_anchor(HELD, state, later), wrong_anchor(StateTransfer(9, 6, (5, 5), ()), state, later)
    assert old is not None and old.why is Why.BAD_STATE and new is None
    state["anchors"][0][0] += 1e-6
    found = wrong_anchor(HELD, state, digests)
    assert found is not None and found.why is Why.BAD_STATE


def test_bytes_of_a_state_are_bounded_by_the_model() -> None:
    fragments = small_task_for(configured()).layout.fragments
    size = sum(len(bytes(part)) for part in to_buffers(Payload("state", 0, learner(0, 2).state())) or [])
    assert size < state_bytes_max(fragments) < 1 << 27
