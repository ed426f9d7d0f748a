"""Live tests run one after the other (`tests/conftest.py`): each has processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import SharedForkServer
from thread_syncer import Syncer, syncers

from atoll.config import Config

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.live)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Config], Syncer]]:
    with syncers(tmp_path) as make:
        yield make


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    yield
    SharedForkServer.end()
