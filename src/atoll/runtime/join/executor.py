"""The executor of a user's own training loop: it changes their model and optimiser in place and leaves their choices alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from atoll.config import Config
from atoll.executor.learner import TensorLearner
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Effect, Event, LoadState, Message, RecordState, Send, StateTransfer
from atoll.runtime.join.checks import use_plain_floats
from atoll.tasks.task import Task
from atoll.tensors.layout import Layout


def task_of(config: Config, layout: Layout) -> Task:
    """A user's own loop draws data, trains and evaluates by itself, so only the task's layout is used."""

    def never(*_: Any) -> NoReturn:
        raise AssertionError("a loop of the user's own trains itself")

    return Task(config, never, never, never, never, never, layout, "")


class UserExecutor:
    """A TensorLearner on a user's model and optimiser. A peer's optimiser state is taken over without its learning rate and
    other options: the user and a scheduler set those."""

    def __init__(self, inner: TensorLearner, tensors: Mapping[str, Tensor]) -> None:
        self._inner = inner
        self._tensors = tensors

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, RecordState):
            use_plain_floats(self._inner.optimizer)
        if not isinstance(effect, LoadState):
            return self._inner.execute(effect, payload)
        chosen = [_choices(group) for group in self._inner.optimizer.param_groups]
        events = self._inner.execute(effect, payload)
        for group, own in zip(self._inner.optimizer.param_groups, chosen, strict=True):
            group.update(own)
        return events

    def inspect(self, body: Message, payload: Payload) -> Reason | None:
        """Learners may have different optimisers. A state that does not fit costs only the transfer: this learner then starts
        from Theta, with a fresh optimiser state."""
        if isinstance(body, StateTransfer):
            misfit = _misfit(payload.content, self._tensors, self._inner.optimizer)
            return None if misfit is None else Reason(Why.POISONED, misfit)
        return self._inner.inspect(body, payload)

    def payload_for(self, send: Send) -> Payload | None:
        if isinstance(send.envelope.body, StateTransfer):
            use_plain_floats(self._inner.optimizer)
        return self._inner.payload_for(send)


def _choices(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _misfit(state: Any, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> str | None:
    """Why a peer's state cannot be taken over."""
    try:
        shapes = {name: tuple(tensor.shape) for name, tensor in state["tensors"].items()}
        groups = [(len(group["params"]), group.keys()) for group in state["optimizer"]["param_groups"]]
    except (KeyError, TypeError, AttributeError) as error:
        return f"a state that is none ({error})"
    if shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        return "the state of another model"
    own = [len(group["params"]) for group in optimizer.param_groups]
    if [count for count, _ in groups] != own or not all(optimizer.defaults.keys() <= keys for _, keys in groups):
        return "the state of another optimiser"
    return None
