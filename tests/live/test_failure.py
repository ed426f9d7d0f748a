"""Why a process ended reaches its launcher as a value, whatever its log says."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SharedForkServer, run

from atoll.config import load
from atoll.errors import UserError
from atoll.runtime.local.failure import FAILURE_FD, MESSAGE_MAX, Failure, read_failure, report_failure

pytestmark = pytest.mark.live


@pytest.fixture
def fork_server() -> Iterator[SharedForkServer]:
    server = SharedForkServer()
    yield server
    server.close()


def test_child_reports_whose_fault_its_end_is_unless_it_is_killed(fork_server: SharedForkServer, tmp_path: Path) -> None:
    refused = fork_server.spawn(["replay", str(tmp_path / "missing")], tmp_path / "refused.log")
    refused.wait(60.0)
    assert refused.poll() == 2 and refused.failure is not None and refused.failure.users_fault
    assert "missing" in refused.failure.message and refused.failure.message in (tmp_path / "refused.log").read_text()
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # where it would wait for an answer, and so does not end by itself
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        (tmp_path / "token").write_text("atoll1.x")
        words = ["learner", "--syncer", address, "--token", str(tmp_path / "token")]
        killed = fork_server.spawn(words, tmp_path / "killed.log")
        killed.signal(signal.SIGKILL)
        killed.wait(60.0)
    assert (killed.poll(), killed.failure) == (-signal.SIGKILL, None)
    fine = fork_server.spawn(["--version"], tmp_path / "fine.log")
    fine.wait(60.0)
    assert (fine.poll(), fine.failure) == (0, None)


def test_run_is_refused_with_the_sentence_of_the_process_that_refused(tmp_path: Path) -> None:
    config = load(assignments=["data.corpus=missing.txt", "learners=1"])
    with pytest.raises(UserError, match=r"missing\.txt"):
        run(tmp_path / "run", config)


def test_failure_is_bounded_and_written_only_where_a_launcher_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    report_failure(Failure("nobody reads this", users_fault=False))
    reader, writer = os.pipe()
    monkeypatch.setenv(FAILURE_FD, str(writer))
    report_failure(Failure("x" * 100_000, users_fault=True))
    assert read_failure(reader) == Failure("x" * MESSAGE_MAX, users_fault=True)
    assert read_failure(reader) is None
    os.close(reader)
    os.close(writer)
