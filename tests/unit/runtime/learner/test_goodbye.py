"""A finished run waits for learners to hear of it for as long as they are being sent something."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from atoll.runtime.syncer.process import NOTIFY_SECONDS, SyncerProcess


class Clock:
    """Of a loop: every call_later is a second on, and at `sends` a byte goes out."""

    def __init__(self, link: SimpleNamespace, sends: range) -> None:
        self.seconds, self._link, self._sends = 0, link, sends
        self._next: Callable[[], None] | None = None

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        assert seconds == 1.0
        self._next = lambda: call(*args)

    def run(self) -> int:
        while (due := self._next) is not None:
            self._next = None
            self.seconds += 1
            self._link.bytes_sent += self.seconds in self._sends
            due()
        return self.seconds


def left_after(sends: range, to_hear: set[int]) -> int:
    link = SimpleNamespace(bytes_sent=0)
    syncer: Any = object.__new__(SyncerProcess)
    clock = Clock(link, sends)
    syncer._links, syncer._unnotified, syncer._loop = {0: SimpleNamespace(link=link)}, to_hear, clock
    syncer.stop = lambda: None
    syncer._wait_for_learners()
    return clock.run()


def test_a_quiet_link_is_waited_for_ten_seconds() -> None:
    assert left_after(range(0), {0}) == NOTIFY_SECONDS


def test_a_slow_link_is_waited_for_until_ten_seconds_after_its_last_byte() -> None:
    assert left_after(range(1, 60), {0}) == 59 + NOTIFY_SECONDS


def test_who_has_heard_is_not_waited_for() -> None:
    assert left_after(range(1, 60), set()) == NOTIFY_SECONDS
