"""Log lines about peers are limited in number and length."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from atoll.runtime import log as log_module
from atoll.runtime.log import rate_limited


def test_peers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = rate_limited("atoll.test.hush")
    with caplog.at_level(logging.INFO, "atoll.test.hush"):
        for n in range(5000):
            now[0] += 0.0005
            log.warning("refused: %s", f"{n}\nforged line\x1b[31m" + "x" * 10_000)
        assert len(caplog.messages) < 300 and all(len(text) < 600 and text.isprintable() for text in caplog.messages)
        now[0] += 0.2
        log.warning("one more")
    assert "lines about peers were dropped before this one" in caplog.messages[-1]
