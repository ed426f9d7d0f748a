"""A syncer and a learner on one machine, a learner on another, mutual TLS between them, on a link as it is and on a slow one.

    sudo python bench/two_machines.py [--rate 20mbit] [--total-steps 100] [--width 256] [--connections 1] [--keep DIR]

The machines are network namespaces joined by a veth pair (Linux, root, `ip` and `tc` of iproute2); the slow link is a token
bucket (tbf) in both directions. Prints a table, then one JSON object on a line. The namespaces are gone afterwards, also
when it is interrupted. Both learners and the syncer share this machine's cores, so step times are not a real machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

A, B = "10.77.0.1", "10.77.0.2"
PORT = 7077
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
START_SECONDS, RUN_SECONDS, END_SECONDS = 120.0, 600.0, 60.0


@dataclass(frozen=True)
class Result:
    link: str
    total_steps: int
    seconds: float
    """From the first inner step to the last record."""
    outer_steps_per_second: float
    step_milliseconds: dict[str, float]
    """Median inner step of each learner; 1 is the one behind the link."""
    inner_steps: dict[str, int]
    bytes_up: int
    """Payload of learner 1: what it sent, and what it was sent."""
    bytes_down: int
    wire_mbit_per_second_up: float
    """All traffic on the link including TLS, averaged over the run."""
    wire_mbit_per_second_down: float
    pause_seconds: dict[str, float]
    """The longest time a learner took no inner step, to the end of the run: a recovery, which is not counted as waiting."""
    merged_both: float
    """Share of rounds that merged both learners."""
    waited_seconds: float
    goodput: float
    loss_first: float | None
    loss_final: float | None


# ---------------------------------------------------------------- two machines


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces, each with its end of the cable, which is called `cable` in both."""
    names = tuple(f"atoll-{os.getpid()}-{which}" for which in "ab")
    with ExitStack() as stack:
        for name in names:
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (A, B), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]


def limit(name: str, rate: str) -> None:
    bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
    done = subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", "cable", "root", *bucket], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"--rate {rate}: refused by tc: {done.stderr.strip().splitlines()[0]}")


def sent_bytes(name: str) -> int:
    done = subprocess.run(["ip", "-n", name, "-s", "-j", "link", "show", "cable"], capture_output=True, check=True)
    return int(json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"])


# ---------------------------------------------------------------- one run


class Processes:
    """`atoll` in namespaces, each with a log; none of them outlives the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, namespace: str, name: str, *words: str | Path) -> None:
        with self.log(name).open("wb") as log:
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "atoll", *map(str, words)]
            self.started[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def wait(self, name: str, seconds: float) -> None:
        try:
            code = self.started[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{name} did not end within {seconds:.0f} s: {self.last_words(name)}") from None
        if code:
            raise SystemExit(f"{name} ended with {code}: {self.last_words(name)}")

    def wait_for(self, path: Path, of: str) -> None:
        until = time.monotonic() + START_SECONDS
        while not path.exists():
            if self.started[of].poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{of} did not start: {self.last_words(of)}")
            time.sleep(0.05)

    def last_words(self, name: str) -> str:
        return " | ".join(self.log(name).read_text(errors="replace").splitlines()[-3:])

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started.values():
            process.kill()
        for process in self.started.values():
            process.wait()


def settings(options: argparse.Namespace) -> list[str]:
    numbers = {
        "total_steps": options.total_steps, "model.numbers.width": options.width, "model.numbers.mlp": 2 * options.width,
        "model.numbers.layers": 4, "protocol.fragments": 4, "protocol.local_steps_per_round": 4, "data.batch_size": 4,
        "data.seq_len": 32, "data.max_bytes": 1_000_000,
    }  # fmt: skip
    return [word for key, value in numbers.items() for word in ("--set", f"{key}={value}")]


def one_run(link: str, rate: str | None, folder: Path, options: argparse.Namespace) -> Result:
    folder.mkdir(parents=True)
    keys = folder / "keys"
    subprocess.run(
        [sys.executable, "-m", "atoll", "keys", str(keys), "--learners", "2"], check=True, stdout=subprocess.DEVNULL
    )
    with machines() as (a, b), Processes(folder) as processes:
        if rate is not None:
            limit(a, rate)
            limit(b, rate)
        where = f"{A}:{PORT}"
        processes.start(
            a, "syncer", "syncer", "--learners", "2", *settings(options), "--listen", where, "--keys", keys,
            "--dir", folder / "syncer",
        )  # fmt: skip
        processes.wait_for(folder / "syncer" / "address", "syncer")
        for learner, (namespace, address) in enumerate(((a, A), (b, B))):
            processes.start(
                namespace, f"learner-{learner}", "learner", "--syncer", where, "--keys", keys, "--name", f"learner-{learner}",
                "--id", str(learner), "--listen", f"{address}:{PORT + 1}", "--connections", str(options.connections),
                "--out", folder / "learners" / str(learner),
            )  # fmt: skip
        processes.wait("syncer", RUN_SECONDS)
        for learner in range(2):
            processes.wait(f"learner-{learner}", END_SECONDS)
        down, up = sent_bytes(a), sent_bytes(b)
    return measured(link, folder, up, down)


def measured(link: str, folder: Path, wire_up: int, wire_down: int) -> Result:
    """From the tapes, which are replayed first, so that every counted decision is checked."""
    from atoll.config import load
    from atoll.runtime.local.summary import verdict

    summary = verdict(load(folder / "syncer" / "config.toml"), folder)
    steps = {learner: inner_steps(folder / "learners" / learner) for learner in "01"}
    end = max(found[-1][1] for found in steps.values())
    far = next(t for t in summary.traffic if t.learner == 1)
    rounds = sum(summary.participants.values())
    return Result(
        link=link, total_steps=summary.total_steps, seconds=round(summary.seconds, 2),
        outer_steps_per_second=round(summary.total_steps / summary.seconds, 2),
        step_milliseconds={learner: median_milliseconds(found) for learner, found in steps.items()},
        inner_steps={learner: len(found) for learner, found in steps.items()},
        bytes_up=far.bytes_up, bytes_down=far.bytes_down,
        wire_mbit_per_second_up=round(8 * wire_up / 1e6 / summary.seconds, 2),
        wire_mbit_per_second_down=round(8 * wire_down / 1e6 / summary.seconds, 2),
        pause_seconds={learner: round(longest_pause(found, end) / 1e9, 2) for learner, found in steps.items()},
        merged_both=round(summary.participants.get("2", 0) / rounds, 3) if rounds else 0.0,
        waited_seconds=summary.waited_seconds, goodput=round(summary.goodput, 3),
        loss_first=summary.loss_first, loss_final=summary.loss_final,
    )  # fmt: skip


def median_milliseconds(steps: list[tuple[int, int]]) -> float:
    return round(statistics.median(end - begin for begin, end in steps) / 1e6, 1)


def longest_pause(steps: list[tuple[int, int]], end: int) -> int:
    return max(after[0] - before[1] for before, after in pairwise([*steps, (end, end)]))


def inner_steps(folder: Path) -> list[tuple[int, int]]:
    """When each began and ended, in nanoseconds of the run's clock."""
    from atoll.protocol.vocabulary import StepDone
    from atoll.tape.format import Tape

    records = (record for path in folder.glob("*.tape") for record in Tape(path).records())
    return sorted((r.now - r.event.nanos, r.now) for r in records if isinstance(r.event, StepDone))


# ---------------------------------------------------------------- output


def table(results: Sequence[Result]) -> str:
    def pair(values: dict[str, Any]) -> str:
        return " / ".join(str(value) for value in values.values())

    rows = [
        ("link", [r.link for r in results]),
        ("outer steps a second", [f"{r.outer_steps_per_second}" for r in results]),
        ("inner step, ms (learner 0 / 1)", [pair(r.step_milliseconds) for r in results]),
        ("inner steps (learner 0 / 1)", [pair(r.inner_steps) for r in results]),
        ("payload of learner 1, up / down, MB", [f"{r.bytes_up / 1e6:.1f} / {r.bytes_down / 1e6:.1f}" for r in results]),
        ("on the wire, up / down, Mbit/s", [f"{r.wire_mbit_per_second_up} / {r.wire_mbit_per_second_down}" for r in results]),
        ("longest pause, s (learner 0 / 1)", [pair(r.pause_seconds) for r in results]),
        ("rounds that merged both", [f"{r.merged_both:.1%}" for r in results]),
        ("learners waited, s", [f"{r.waited_seconds}" for r in results]),
        ("goodput", [f"{r.goodput}" for r in results]),
        ("held-out loss, first to final", [f"{r.loss_first:.3f} to {r.loss_final:.3f}" for r in results]),
    ]
    return "\n".join(f"{name:<38}" + "".join(f"{value:>22}" for value in values) for name, values in rows)


def stop(number: int, frame: FrameType | None) -> None:
    """Only once: a second signal must not interrupt the cleanup."""
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="20mbit", help="of the slow link, in tc's notation")
    parser.add_argument("--total-steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256, help="of the model; large enough to load the link")
    parser.add_argument("--connections", type=int, default=1, help="bulk connections per learner")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and tapes; by default they are deleted")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("two_machines.py makes network namespaces: run it as root on Linux, with ip and tc (iproute2)", file=sys.stderr)
        raise SystemExit(2)
    if options.keep is not None and options.keep.exists():
        print(f"--keep {options.keep}: exists already; name a new folder", file=sys.stderr)
        raise SystemExit(2)
    for number in STOPPING:
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="atoll-two-") as scratch:
        folder = options.keep or Path(scratch)
        results = []
        for link, rate in (("unlimited", None), (options.rate, options.rate)):
            print(f"{link}: syncer and learner 0 on {A}, learner 1 on {B} ...", file=sys.stderr, flush=True)
            results.append(one_run(link, rate, folder / link, options))
    print(table(results))
    print(json.dumps({"bench": "two_machines", "width": options.width, "runs": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main()
