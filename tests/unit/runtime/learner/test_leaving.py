"""What asks a learner to leave: each source once, repeated signals once, and nothing is lost that came early."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.runtime.learner.leaving import LEAVE_FILE, SIGNALS, LeaveRequests

PATIENCE_SECONDS = 30.0


class Asked:
    def __init__(self) -> None:
        self.requests: list[tuple[str, float | None, bool]] = []
        self._came = threading.Event()

    def __call__(self, reason: str, within_seconds: float | None = None, *, returns: bool = False) -> None:
        self.requests.append((reason, within_seconds, returns))
        self._came.set()

    def wait(self) -> tuple[str, float | None, bool]:
        assert self._came.wait(PATIENCE_SECONDS)
        return self.requests[0]


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("content", "within"), [("", 9.0), ("3.5\n", 3.5), ("soon", 9.0), ("-4", 0.0), ("nan", 9.0)])
def test_file_asks_by_appearing_and_may_say_how_long_there_is(tmp_path: Path, content: str, within: float) -> None:
    asked, requests = Asked(), LeaveRequests(9.0, [tmp_path / "notice"], returns=True)
    with requests.told_to(asked):
        (tmp_path / "partial").write_text(content)
        (tmp_path / "partial").rename(tmp_path / "notice")
        assert asked.wait() == (f"asked to leave by the file {tmp_path / 'notice'}", within, True)
    assert requests.asked and len(asked.requests) == 1


def test_file_that_was_meant_for_the_process_before_asks_nobody(tmp_path: Path) -> None:
    requests = LeaveRequests()
    (tmp_path / LEAVE_FILE).touch()
    requests.look_for(tmp_path / LEAVE_FILE)
    assert not (tmp_path / LEAVE_FILE).exists()
    with requests.told_to(Asked()):
        assert not requests.asked


def test_signal_that_a_scheduler_and_a_shell_both_send_is_one_request(signals_restored: None) -> None:
    asked, requests = Asked(), LeaveRequests(5.0)
    requests.listen_to_signals()
    with requests.told_to(asked):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    assert [reason for reason, _, _ in asked.requests] == ["asked to stop by SIGTERM", "asked to stop by SIGUSR1"]


def test_signal_before_the_run_ends_the_process_and_after_it_is_harmless(signals_restored: None) -> None:
    requests = LeaveRequests()
    requests.listen_to_signals()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(1.0)
    assert ended.value.code == 0
    with requests.told_to(Asked()):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
