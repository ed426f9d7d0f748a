"""Bits depend on the number of threads: one, as the command line's default is. Encoded text goes to a cache of its own."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from stalls import Stalls
from xdist.scheduler import LoadScopeScheduling

from atoll.executor.environment import use_threads

use_threads(1)
# A busy machine stalls an example for longer than any deadline. The same examples every time: a change is judged by what it
# changes. `make soak` searches anew.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("anew", deadline=None)
hypothesis.settings.load_profile(os.environ.get("ATOLL_EXAMPLES", "same"))

_CACHE = tempfile.TemporaryDirectory(prefix="atoll-test-cache-")  # of this process and those it starts; gone with it
os.environ["XDG_CACHE_HOME"] = _CACHE.name

BENCH = Path(__file__).parents[1] / "bench"
SERIAL = ("tests/live/", "tests/hostile/")


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests run on one worker, so what they share is made once. Those with processes run one after the other, all on the
    same worker: two clusters at once would slow each other. The mark `xdist_group` would say the same, but not to pytest 9.2,
    with whose node ids xdist 3.8 loses it."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "live" if file.startswith(SERIAL) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False  # keep the order below: not those files first that have most tests
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long group begins first; the short files of tests/unit fill up the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(SERIAL))


AGAIN = "the machine stood still"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test with real processes that fails while the machine stands still is run once more, and the last lines say so: its
    processes are given up for silent within a second. One that fails otherwise has failed."""
    if not item.nodeid.startswith(SERIAL):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with Stalls() as stalls:
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failures = [report.longreprtext for report in reports if report.failed]
    if stalls.stalled and failures:
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            report.user_properties.append((AGAIN, f"{stalls.longest:.1f} s, at first:\n{failures[0]}"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for what, long in getattr(report, "user_properties", ()):
                if what == AGAIN and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid} was run again, because {AGAIN} for {long}")


@pytest.fixture(scope="session")
def bench_script() -> Callable[[str], ModuleType]:
    """Loads a script below bench/ by its path without the ending; scripts find each other beside themselves."""
    def load(path: str) -> ModuleType:
        folder = str((BENCH / path).parent)
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(Path(path).name)
        finally:
            sys.path.remove(folder)

    return load
