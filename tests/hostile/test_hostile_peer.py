"""A peer that serves bad recovery states, over real connections: its victim takes another source, and never asks it again."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_syncer import PATIENCE_SECONDS, UNHURRIED, Syncer, custom, model_of, train

from atoll.executor.learner import TensorLearner
from atoll.ids import SYNCER
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import Received, Recovered, RecoveryFailed, Send, StateTransfer

HOSTILE, HONEST, NEWCOMER = 0, 1, 2
JOINS = 2


def with_nan(state: Any) -> Any:
    next(iter(state["tensors"].values())).fill_(math.nan)
    return state


def that_explodes_in_the_first_step(state: Any) -> Any:
    """Each number in it can be: it passes every check, and the next optimiser step is NaN."""
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].fill_(3e38)
        moments["exp_avg_sq"].fill_(0.0)
    return state


class Peers:
    """Two learners that train until the end of the test. The hostile one spoils every state that it serves."""

    def __init__(self, syncer: Syncer, spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self._syncer, self._stop = syncer, threading.Event()
        self.transfers = 0
        honest = TensorLearner.payload_for

        def payload_for(learner: TensorLearner, send: Send) -> Payload | None:
            payload = honest(learner, send)
            if isinstance(send.envelope.body, StateTransfer) and send.envelope.sender == HOSTILE and payload is not None:
                self.transfers += 1
                return Payload("state", payload.nbytes, spoil(payload.content))
            return payload

        monkeypatch.setattr(TensorLearner, "payload_for", payload_for)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with ThreadPoolExecutor(2) as pool:
            begun = [threading.Event() for _ in (HOSTILE, HONEST)]
            loops = [pool.submit(self._loop, learner, begun[learner]) for learner in (HOSTILE, HONEST)]
            try:
                assert all(event.wait(PATIENCE_SECONDS) for event in begun)
                yield
            finally:
                self._stop.set()
            for loop in loops:
                loop.result(PATIENCE_SECONDS)

    def _loop(self, wants: int, begun: threading.Event) -> None:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with self._syncer.join(model, optimizer, wants=wants) as learner:
            while not self._stop.is_set():
                train(learner, model, optimizer)
                if learner.outer_step > 4:
                    begun.set()


@pytest.mark.parametrize(
    "spoil", [pytest.param(with_nan, marks=pytest.mark.soak), that_explodes_in_the_first_step], ids=lambda s: s.__name__
)
def test_bad_state_is_asked_for_once_and_its_victim_recovers_from_another(
    spoil: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer = Syncer(tmp_path / "syncer", custom(total_steps=10**6, limits=UNHURRIED))
    try:
        peers = Peers(syncer, spoil, monkeypatch)
        with peers.training():
            for _ in range(JOINS):  # the second finds in the folder of the first that this place is its own
                model = model_of(seed=1)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5e-3)
                with syncer.join(model, optimizer, wants=NEWCOMER, out=tmp_path / "newcomer") as learner:
                    for _ in range(3):
                        train(learner, model, optimizer)
                    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
                    assert optimizer.param_groups[0]["lr"] == 0.5e-3
    finally:
        syncer.stop()
    assert peers.transfers == 1, "remembered over the incarnations of its victim"
    tape = syncer.tape()
    failed = [r.event.envelope.body for r in tape if isinstance(r.event, Received)]
    reasons = [body.reason.why for body in failed if isinstance(body, RecoveryFailed)]
    assert reasons == ([] if spoil is that_explodes_in_the_first_step else [Why.BAD_STATE])
    sources = [e.source for r in tape for e in r.effects if isinstance(e, Recovered) and e.learner == NEWCOMER]
    assert HOSTILE not in sources[1:] and set(sources[1:]) <= {HONEST, SYNCER}, "Theta, where the honest one was too slow"
