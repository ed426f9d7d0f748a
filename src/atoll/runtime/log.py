"""Logs at a bounded rate: what remote peers cause, and what is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES_PER_SECOND = 20.0
LINES_AT_ONCE = 200.0
LINE_MAX = 400


class _PeerRateLimit(logging.Filter):
    """Peers decide how often they are refused and with which words. So lines per second and their length are limited, each
    record is one line, and the next line reports how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = LINES_AT_ONCE
        self._at = time.monotonic()
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self._budget = min(LINES_AT_ONCE, self._budget + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._budget < 1:
            self._dropped += 1
            return False
        self._budget -= 1
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text, record.exc_info = f"{text}: {record.exc_info[1]!r}", None
        text = "".join(c if c.isprintable() else "?" for c in text[:LINE_MAX]) + ("..." if len(text) > LINE_MAX else "")
        record.msg, record.args = text, ()
        if self._dropped:
            record.msg += f" ({self._dropped} lines about peers were dropped before this one)"
            self._dropped = 0
        return True


def rate_limited(name: str) -> logging.Logger:
    log = logging.getLogger(name)
    if not any(isinstance(each, _PeerRateLimit) for each in log.filters):
        log.addFilter(_PeerRateLimit())
    return log


class PacedLog:
    """True at once, and then at most every so many seconds: for a line that is logged while something is waited for."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic, *, at_once: bool = True) -> None:
        self._seconds, self._now = seconds, now
        self._next = now() if at_once else now() + seconds

    def due(self) -> bool:
        now = self._now()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
