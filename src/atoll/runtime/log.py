"""A log that remote peers cannot fill."""

from __future__ import annotations

import logging
import time

LINES_PER_SECOND = 20.0


LINES_AT_ONCE = 200.0


LINE_MAX = 400


class _Hush(logging.Filter):
    """Peers decide how often they are refused and what their reasons are: so many lines a second, each of them one line of
    bounded length, and a count of those that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._room = LINES_AT_ONCE
        self._at = time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self._room = min(LINES_AT_ONCE, self._room + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text, record.exc_info = f"{text}: {record.exc_info[1]!r}", None
        text = "".join(c if c.isprintable() else "?" for c in text[:LINE_MAX]) + ("..." if len(text) > LINE_MAX else "")
        record.msg, record.args = text, ()
        if self._left_out:
            record.msg += f" ({self._left_out} lines of peers before this one were left out)"
            self._left_out = 0
        return True


def hushed(name: str) -> logging.Logger:
    log = logging.getLogger(name)
    if not any(isinstance(each, _Hush) for each in log.filters):
        log.addFilter(_Hush())
    return log
