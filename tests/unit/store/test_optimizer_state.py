"""An optimiser's state that came from a peer or a snapshot: dtypes and strides are those it would have had at home."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_runs import configured, mlp, small_task_for
from torch import Tensor, nn

from atoll.executor.cuda.staging import master_weights
from atoll.executor.cuda.transfer import on_host
from atoll.executor.learner import TensorLearner
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import LoadSnapshot, LoadState
from atoll.store.tensor_files import load_optimizer, pack_state, unpack_state
from atoll.tasks.task import Task

Make = Callable[[Any], torch.optim.Optimizer]


def sent(state: Any) -> Any:
    return unpack_state(b"".join(pack_state(on_host(state))))


class Mastered(torch.optim.Optimizer):
    """As optimisers of 16-bit models do: the truth is fp32 and in the state, and weights are its cast."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(
                    step=torch.tensor(0.0), master=p.detach().float().clone(), name="of a parameter",
                    deep={"history": [p.float().flatten() / 3], "pair": (torch.tensor([7, 8]), 0.5)},
                )  # fmt: skip
            state["step"] += 1
            state["master"].add_(p.grad.float(), alpha=-0.01)
            p.copy_(state["master"])


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(288, 2)).to(memory_format=torch.channels_last)


def image(seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, 8, 8, generator=chance).contiguous(memory_format=torch.channels_last)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from tensors_of(item)


def memory_of(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value)}


def same(a: Any, b: Any) -> bool:
    """In value and dtype, not in strides."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# ---------------------------------------------------------------- any optimiser


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True), lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), lambda p: torch.optim.Adagrad(p, lr=0.1),
], ids=["fused AdamW", "AdamW", "fused SGD", "Adagrad"])  # fmt: skip
def test_channels_last_model_steps_with_a_loaded_state_as_the_one_it_came_from(make: Make) -> None:
    giver, taker = conv(), conv()
    gives, takes = make(giver.parameters()), make(taker.parameters())
    for seed in range(2):
        step(giver, gives, image(seed))
    taker.load_state_dict(giver.state_dict())
    load_optimizer(takes, sent(gives.state_dict()))
    for ours, theirs in zip(taker.parameters(), giver.parameters(), strict=True):
        for key, value in gives.state[theirs].items():
            assert takes.state[ours][key].stride() == value.stride(), key
    step(giver, gives, image(2))
    step(taker, takes, image(2))
    assert same(dict(taker.state_dict()), dict(giver.state_dict()))


def test_state_keeps_the_dtypes_it_was_sent_with_whatever_its_parameters_are() -> None:
    """torch rounds masters to bf16 and makes floats of integers; a text it makes a generator's description."""
    giver, taker = mlp().bfloat16(), mlp().bfloat16()
    gives, takes = Mastered(giver.parameters()), Mastered(taker.parameters())
    step(giver, gives, torch.randn(4, 12))
    state = sent(gives.state_dict())
    load_optimizer(takes, state)
    assert same(takes.state_dict()["state"], state["state"])
    assert all(master_weights(takes, p) is not None for p in taker.parameters())


@pytest.mark.parametrize("bare", [True, False], ids=["before its first step", "after it"])
def test_loaded_state_shares_no_memory_with_its_source_which_stays_as_it_was(bare: bool) -> None:
    for model, kind in ((mlp().bfloat16(), Mastered), (conv(), torch.optim.AdamW)):
        optimizer = kind(model.parameters())
        inputs = torch.randn(4, 12) if kind is Mastered else image(0)
        if not bare:
            step(model, optimizer, inputs)
        source = on_host(optimizer.state_dict())
        before = copy.deepcopy(source)
        load_optimizer(optimizer, source)
        assert not memory_of(source) & memory_of(dict(optimizer.state))
        step(model, optimizer, inputs)
        assert same(source, before)


def test_step_count_of_a_parameter_without_axes_stays_what_torch_makes_of_it() -> None:
    """It has its parameter's shape, and is no part of it: a bf16 count would stop at 256."""
    p = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    load_optimizer(optimizer, sent(optimizer.state_dict()))
    assert optimizer.state[p]["step"].dtype == torch.float32
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


# ---------------------------------------------------------------- a learner


class OneState:
    """A snapshot store with one state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def put_learner(self, *_: Any) -> None: ...

    def learner_state(self, *_: Any) -> Any:
        return self._state


def loaded(task: Task, source: str, state: Any, make: Make) -> TensorLearner:
    model = task.build()
    learner = TensorLearner(task, 0, OneState(state), model=model, optimizer=make(model.parameters()))
    if source == "peer":
        learner.execute(LoadState(1, (0,)), Payload("state", 0, state))
    else:
        learner.execute(LoadSnapshot(1), None)
    return learner


@pytest.mark.parametrize("source", ["peer", "snapshot"])
@pytest.mark.parametrize("kind", ["channels_last", "masters"])
def test_learner_with_a_peers_or_its_own_earlier_state_steps_as_that_one_would(source: str, kind: str) -> None:
    build = conv if kind == "channels_last" else lambda: mlp().bfloat16()
    make: Make = Mastered
    if kind == "channels_last":
        make = lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)  # noqa: E731
    inputs = [image(seed) if kind == "channels_last" else torch.randn(4, 12) for seed in range(4)]
    task = small_task_for(configured(), build)
    model = task.build()
    giver = TensorLearner(task, 1, model=model, optimizer=make(model.parameters()))
    for at in range(3):
        step(giver.model, giver.optimizer, inputs[at])
    state = sent(giver.state(with_residuals=source == "snapshot"))
    taker = loaded(task, source, state, make)
    assert not memory_of(state["optimizer"]) & memory_of(dict(taker.optimizer.state))
    for learner in (giver, taker):
        step(learner.model, learner.optimizer, inputs[3])
    assert same(dict(taker.model.state_dict()), dict(giver.model.state_dict()))
    if kind == "masters":
        assert all(master_weights(taker.optimizer, p) is not None for p in taker.model.parameters())
