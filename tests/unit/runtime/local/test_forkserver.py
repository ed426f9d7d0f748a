"""A fork server that is a fork of its launcher."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

LAUNCHER = """
import fcntl, sys
from pathlib import Path
from atoll.runtime.local.forkserver import ForkServer

held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)

def become():
    print("child", *sys.argv[1:])
    sys.exit(3)

print("begun ", end="")
server = ForkServer(become=become)
child = server.spawn(["one", "two"], Path(sys.argv[2]))
child.wait(20.0)
print("code", child.poll(), flush=True)
sys.stdin.read()
"""


def test_fork_server_of_a_killed_launcher_ends_and_holds_none_of_its_locks(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "child.log"
    words = [sys.executable, "-c", LAUNCHER, lock, log]
    launcher = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "begun code 3\n"
    assert log.read_text() == "child one two\n", "what the launcher had not written yet is not the child's to write"
    launcher.kill()
    launcher.wait(20.0)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _, errors = launcher.communicate(timeout=20.0)
    assert errors == "", "both ends of this pipe are closed: the fork server has ended too"
