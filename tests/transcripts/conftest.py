"""`pytest tests/transcripts --rewrite-transcripts` writes what the stories tell now; read it in the diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write the expected strips anew")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    # without the option where pytest was pointed at a folder above and met this file late
    return bool(request.config.getoption("--rewrite-transcripts", default=False))
