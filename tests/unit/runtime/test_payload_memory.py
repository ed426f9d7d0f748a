"""Announced fragments are read into memory that is used again, and what was used is said to be."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import NO_VERSION, Announce
from atoll.runtime.loop import MessageQueue
from atoll.runtime.payload import from_buffer, to_buffers

BODY = Announce(1, 0, NO_VERSION, ())


def sent(numbers: torch.Tensor) -> memoryview:
    found = to_buffers(Payload("fragment", 0, (numbers, torch.tensor([7.0]))))
    assert found is not None
    return memoryview(b"".join(found))


def test_numbers_are_read_into_the_given_memory_and_buffers_are_not() -> None:
    memory = torch.full((5,), -1.0)
    numbers, buffers = from_buffer(BODY, sent(torch.arange(3.0)), into=memory).content
    assert torch.equal(numbers, torch.arange(3.0)) and numbers.data_ptr() == memory.data_ptr()
    assert memory.tolist() == [0.0, 1.0, 2.0, -1.0, -1.0] and buffers.tolist() == [7.0]


def test_numbers_that_do_not_fit_get_memory_of_their_own() -> None:
    memory = torch.full((5,), -1.0)
    numbers, _ = from_buffer(BODY, sent(torch.arange(6.0)), into=memory).content
    assert torch.equal(numbers, torch.arange(6.0)) and memory.tolist() == [-1.0] * 5


def test_queue_says_what_it_has_used_once_it_was_taken() -> None:
    class Told:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def used(self, nbytes: int) -> None:
            self.events.append(("used", nbytes))

        async def take(self, link: Any, head: bytes, data: memoryview | None) -> None:
            self.events.append(("begins", head))
            await asyncio.sleep(0)
            self.events.append(("took", head))

    async def story() -> None:
        told: Any = Told()
        queue = MessageQueue(told, told.take, told.events.append)
        queue.put(b"a", memoryview(bytes(5)))
        queue.put(b"b", None)
        finished = asyncio.Event()
        queue.finish(finished.set)
        await finished.wait()
        assert told.events == [("begins", b"a"), ("took", b"a"), ("used", 5), ("begins", b"b"), ("took", b"b")]

    asyncio.run(story())
