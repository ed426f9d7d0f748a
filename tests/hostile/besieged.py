"""A syncer as a process of its own under a limit of open files, its learners, and outsiders around it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.protocol.vocabulary import Received, Report
from atoll.runtime.learner.address import address_of, request_place
from atoll.store.version_folder import newest_step
from atoll.tape.format import Tape
from atoll.transport import Backoff, LinkFailed, dial

PATIENCE_SECONDS = 180.0
NUMBERS = ("total_steps=1000000", "data.max_bytes=200000", "data.seq_len=16", "limits.leave_seconds=2", "data.batch_size=2")
HERE = Path(__file__).parent


class Command:
    """A process of a test, with its output in a file."""

    def __init__(self, log: Path, words: Sequence[object], open_files: int | None = None, nice: int = 0) -> None:
        def prepare() -> None:
            os.nice(nice)
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        self._log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, *map(str, words)], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                preexec_fn=prepare,
            )  # fmt: skip
        self.pid = self._popen.pid

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def until(self, words: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while words not in self.text:
            assert self.is_alive and time.monotonic() < end, f"{words!r} was not said: {self.text[-3000:]}"
            time.sleep(0.05)

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def megabytes(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def tell(self, words: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(words.encode() + b"\n")
        self._popen.stdin.flush()

    def end(self) -> None:
        assert self._popen.stdin is not None
        self._popen.kill()
        self._popen.wait(PATIENCE_SECONDS)
        self._popen.stdin.close()


class Nobody:
    def opened(self, link: object) -> None: ...
    def arrived(self, link: object, head: bytes, payload: memoryview | None) -> None: ...
    def closed(self, link: object, reason: str) -> None: ...


class Besieged:
    def __init__(
        self, folder: Path, open_files: int, keys: Path | None = None, learners: int = 2, more: Sequence[object] = ()
    ) -> None:
        self.folder, self.keys = folder, keys
        numbers = [word for number in NUMBERS for word in ("--set", number)]
        secret = ["--keys", keys] if keys is not None else []
        words = ["-m", "atoll", "syncer", "--learners", learners, *numbers, "--listen", "127.0.0.1:0", "--dir", folder / "syncer"]
        self.syncer = Command(folder / "syncer.log", [*words, *secret, *more], open_files)
        self._others: list[Command] = []

    @property
    def address(self) -> str:
        return (self.folder / "syncer" / "address").read_text()

    @property
    def token(self) -> Path:
        return (self.keys or self.folder / "syncer") / "token"

    def learner(self, number: int, slow: float) -> Command:
        """Steps that last `slow` times as long as they take leave the machine room for all processes of a test."""
        secret = ["--keys", self.keys, "--name", f"learner-{number}"] if self.keys is not None else ["--token", self.token]
        where = ["--syncer", self.address, "--id", number, "--out", self.folder / f"learner{number}", "--obey-stdin"]
        one = Command(self.folder / f"learner{number}.log", ["-m", "atoll", "learner", *where, *secret])
        one.tell(f"slow {slow}")
        self._others.append(one)
        return one

    def outsiders(self, source: str, count: int, seconds: float, kind: str, hold: int) -> Command:
        words = [HERE / "open_connections.py", self.address, source, count, seconds, kind, hold]
        # They stand for other machines, so honest processes do not wait for theirs.
        one = Command(self.folder / f"outsiders-{len(self._others)}.log", words, nice=10)
        self._others.append(one)
        return one

    def seconds_to_get_in(self, wants: int) -> float:
        """A place, then a link, as `atoll learner` asks for them."""
        began = time.monotonic()
        asyncio.run(self._get_in(wants))
        return time.monotonic() - began

    async def _get_in(self, wants: int) -> None:
        name = f"learner-{wants}" if self.keys is not None else None
        address = address_of(self.address, self.token, self.keys, name, "", "", "", insecure=False)
        placement = await request_place(address, wants, random.Random(wants))
        shown = {
            "run": placement.run, "learner": str(placement.learner), "incarnation": str(placement.incarnation),
            "key": placement.key, "advertise": "",
        }  # fmt: skip
        backoff = Backoff(random.Random(wants))
        while True:
            try:
                link = await dial(address.syncer, Nobody(), peer="syncer", metadata=shown, credentials=address.credentials)
                break
            except LinkFailed:
                await asyncio.sleep(backoff.next())
        link.close("enough")
        await link.wait_closed()

    def steps(self) -> list[float]:
        """When each inner step was reported, in seconds of the syncer's clock."""
        records = Tape(self.folder / "syncer" / "run.tape").records()
        return [
            record.now / 1e9 for record in records
            if isinstance(record.event, Received) and isinstance(record.event.envelope.body, Report)
        ]  # fmt: skip

    def outer_step(self) -> int:
        return newest_step(self.folder / "syncer")

    def end(self) -> None:
        for one in (*self._others, self.syncer):
            one.end()


def outcome(outsiders: Command) -> dict[str, Any]:
    outsiders.until("}")
    found: dict[str, Any] = json.loads(outsiders.text)
    return found


@contextmanager
def besieged(folder: Path, open_files: int, **options: Any) -> Iterator[Besieged]:
    around = Besieged(folder, open_files, **options)
    try:
        around.syncer.until("listens on")
        yield around
        assert around.syncer.is_alive, around.syncer.text[-3000:]
        assert "Traceback" not in around.syncer.text, around.syncer.text[-3000:]
    finally:
        around.end()
