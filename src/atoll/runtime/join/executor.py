"""The executor of a user's own training loop: it changes their model and optimiser in place and leaves their choices alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from atoll.config import Config
from atoll.executor.learner import TensorLearner
from atoll.protocol.interface import Finding, Payload
from atoll.protocol.vocabulary import Effect, Event, Message, RecordState, Send, StateTransfer
from atoll.store.tensor_files import use_plain_floats
from atoll.tasks.task import Task
from atoll.tensors.layout import Layout


def task_of(config: Config, layout: Layout) -> Task:
    """A user's own loop draws data, trains and evaluates by itself, so only the task's layout is used."""

    def never(*_: Any) -> NoReturn:
        raise AssertionError("a loop of the user's own trains itself")

    return Task(config, never, never, never, never, never, layout, "")


class UserExecutor:
    """A TensorLearner on a user's model and optimiser."""

    def __init__(self, inner: TensorLearner) -> None:
        self._inner = inner

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, RecordState):
            use_plain_floats(self._inner.optimizer)
        return self._inner.execute(effect, payload)

    def inspect(self, body: Message, payload: Payload) -> Finding:
        """Learners may have different optimisers. A state that does not fit costs only the transfer: this learner then starts
        from Theta, with a fresh optimiser state."""
        return self._inner.inspect(body, payload)

    def payload_for(self, send: Send) -> Payload | None:
        if isinstance(send.envelope.body, StateTransfer):
            use_plain_floats(self._inner.optimizer)
        return self._inner.payload_for(send)
