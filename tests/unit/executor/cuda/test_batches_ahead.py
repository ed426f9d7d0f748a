"""Batches that another thread prepares while a step runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.executor.cuda.ahead import BatchesAhead, BatchPosition


class Draws:
    def __init__(self) -> None:
        self.drawn: list[tuple[BatchPosition, str]] = []

    def __call__(self, place: BatchPosition) -> list[Any]:
        self.drawn.append((place, threading.current_thread().name))
        return [torch.tensor([place.stream, place.batch])]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # pinning needs a GPU
    return Draws()


def test_following_batch_is_drawn_by_the_other_thread_and_given_once(draws: Draws) -> None:
    ahead, first = BatchesAhead(draws), BatchPosition(0, 5, 1.0)
    try:
        assert ahead.take(first)[0].tolist() == [0, 5]
        ahead.prepare(first.following())
        assert ahead.take(BatchPosition(0, 6, 1.0))[0].tolist() == [0, 6]
        assert ahead.take(BatchPosition(0, 6, 1.0))[0].tolist() == [0, 6]
    finally:
        ahead.close()
    assert [place for place, _ in draws.drawn] == [first, BatchPosition(0, 6, 1.0), BatchPosition(0, 6, 1.0)]
    assert [name.startswith("batches") for _, name in draws.drawn] == [False, True, False]


@pytest.mark.parametrize("other", [BatchPosition(1, 6, 1.0), BatchPosition(0, 9, 1.0), BatchPosition(0, 6, 0.5)])
def test_another_step_than_expected_gets_its_own_batch(draws: Draws, other: BatchPosition) -> None:
    ahead = BatchesAhead(draws)
    try:
        ahead.prepare(BatchPosition(0, 6, 1.0))
        assert ahead.take(other)[0].tolist() == [other.stream, other.batch]
    finally:
        ahead.close()
