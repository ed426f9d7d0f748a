"""Log lines about peers are limited in number and length."""

from __future__ import annotations

import logging
import time

import pytest

from atoll.runtime.log import rate_limited


def test_peers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = rate_limited("atoll.test.hush")
    with caplog.at_level(logging.INFO, "atoll.test.hush"):
        for n in range(5000):
            log.warning("refused: %s", f"{n}\nforged line\x1b[31m" + "x" * 10_000)
        assert len(caplog.messages) < 300 and all(len(text) < 600 and text.isprintable() for text in caplog.messages)
        time.sleep(0.2)
        log.warning("one more")
    assert "lines about peers were dropped before this one" in caplog.messages[-1]
