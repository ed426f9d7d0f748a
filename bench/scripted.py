"""Learners without training, for benchmarks of a syncer: the real machine and the real link, with prepared packets.

    python bench/scripted.py --syncer HOST:PORT --token FILE [--first 0] [--count 1] [--step 0.5] [--jitter 0.1]
                             [--follow] [--listen] [--keys DIR] [--packets N] [--packets-file FILE]

An inner step is a timer of `--step` seconds, varied by up to `--jitter` of it. A pull is answered with a packet of random
numbers in the fragment's size and the run's codec: one of `--packets` of each fragment, another one for each learner and outer
step as far as there are others. The transport receives and checks announced
versions, which are then dropped. All learners share one loop and one thread. With --follow a step ends when a line
`NANOSECONDS`, its reported duration, comes on standard input: the learners then step together with the process that writes.

This file also has what the live benchmarks share: a syncer's process and the figures of /proc.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from atoll.codecs import Packet, codec
from atoll.codecs.layout import BLOCK
from atoll.codecs.parts import packet_part
from atoll.config import Config, from_builtins, to_toml
from atoll.config.codecs import codec_spec
from atoll.config.models import SIZES
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason
from atoll.protocol.vocabulary import Contribution, Effect, Event, InnerStep, Message, Received, Send, StepDone
from atoll.runtime.learner.address import address_of, request_place
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.loop import LoopThread
from atoll.tasks.task import layout_for
from atoll.tensors.layout import Layout
from atoll.workload.models.decoder import build_model

START_SECONDS = 120.0
TICKS = os.sysconf("SC_CLK_TCK")

# ---------------------------------------------------------------- learners


def layout_of(config: Config) -> Layout:
    numbers = dict(SIZES["nano"]) | {"vocab": 257, "context": config.data.seq_len} | config.model.numbers
    return layout_for(config, build_model("decoder", numbers, config.seed))


def packets_of(config: Config, count: int = 1) -> list[list[Packet]]:
    """`count` for each fragment of the recipe's decoder, the same in every process. Each begins elsewhere in the same random
    numbers, so packets differ in every value; where no block is cut, they are encoded once for all."""
    name, sizes = config.protocol.codec_up, [fragment.numel for fragment in layout_of(config).fragments]
    step, by = BLOCK * 64, codec(name)
    numbers = 1e-4 * torch.randn(max(sizes) + step * count * len(sizes), generator=torch.Generator().manual_seed(0))
    numbers = numbers[: len(numbers) // BLOCK * BLOCK]
    once = by.encode(numbers) if codec_spec(name).kind in ("plain", "blocks") else None

    def packet(p: int, k: int) -> Packet:
        first, last = (at := step * (count * p + k)), at + sizes[p]
        return packet_part(once, first, last) if once is not None and not last % BLOCK else by.encode(numbers[first:last].clone())

    return [[packet(p, k) for k in range(count)] for p in range(len(sizes))]


def write_packets(packets: Sequence[Sequence[Packet]], path: Path) -> None:
    """For other processes: large ones take longer to make than to send."""
    torch.save([[(p.codec, p.numel, p.codes, p.scales) for p in each] for each in packets], path)


def read_packets(path: Path) -> list[list[Packet]]:
    """Maps the file: all processes that read it share its memory."""
    return [[Packet(*fields) for fields in each] for each in torch.load(path, mmap=True, weights_only=True)]


def chosen(packets: Sequence[Packet], learner: int, outer_step: int) -> Packet:
    return packets[(learner + outer_step) % len(packets)]


class ScriptedExecutor:
    def __init__(self, packets: Sequence[Sequence[Packet]], learner: int = 0) -> None:
        self._packets = packets
        self._learner = learner
        self._buffers = torch.empty(0)

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        return ()

    def inspect(self, body: Message, payload: Payload) -> Reason | None:
        return None

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if not isinstance(body, Contribution):
            return None
        packet = chosen(self._packets[body.fragment], self._learner, body.outer_step)
        return Payload("packet", packet.nbytes, (packet, self._buffers))


class ScriptedLearner(LiveLearner):
    """Ends a step after `step_seconds()`, or by a call of `finish_step` if that is None. Everything runs in the loop's thread."""

    def __init__(self, *arguments: Any, step_seconds: Callable[[], float] | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._step_seconds = step_seconds
        self._steps = False
        data = self.config.data
        self._samples = data.batch_size * self.config.inner.accumulate
        self._tokens = self._samples * data.seq_len

    def _carry_out(self, effect: Effect, payload: Payload | None) -> None:
        if not isinstance(effect, InnerStep):
            return super()._carry_out(effect, payload)
        self._steps = True
        if self._step_seconds is not None:
            seconds = self._step_seconds()
            self._loop.call_later(seconds, self.finish_step, int(seconds * 1e9))
        return None

    def finish_step(self, nanos: int) -> None:
        if self._steps and not self._over:
            self._steps = False
            self.step_done(StepDone(self._tokens, self._samples, nanos, None))

    async def take(self, envelope: Any, payload: memoryview | None, still: Callable[[], bool]) -> None:
        """As a learner's, but announced versions are not decoded: a benchmark of the syncer must not measure its learners."""
        if still() and not self._over:
            size = payload.nbytes if payload is not None else 0
            self.dispatch(Received(envelope, size), Payload("fragment", size, None) if payload is not None else None)


def run_learners(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listen = "127.0.0.1:0" if options.listen else ""
    rng = random.Random(options.first)
    loop = LoopThread()
    learners: list[ScriptedLearner] = []
    packets: list[list[Packet]] | None = None
    low, high = options.step * (1 - options.jitter), options.step * (1 + options.jitter)
    for learner in range(options.first, options.first + options.count):
        name = f"learner-{learner}" if options.keys else None
        address = address_of(options.syncer, options.token, options.keys, name, "", listen, "", False)
        placement = loop.run(request_place(address, learner, rng))
        if packets is None:
            config = from_builtins(placement.config)
            packets = read_packets(options.packets_file) if options.packets_file else packets_of(config, options.packets)
        learners.append(ScriptedLearner(
            address, placement, ScriptedExecutor(packets, placement.learner), loop=loop.loop,
            step_seconds=None if options.follow else lambda: rng.uniform(low, high),
            largest_fragment=max(each[0].numel for each in packets),
        ))  # fmt: skip
        learners[-1].start()
    print("ready", flush=True)
    for line in sys.stdin:  # until the launcher ends
        for each in learners:
            loop.loop.call_soon_threadsafe(each.finish_step, int(line))
    os._exit(0)


# ---------------------------------------------------------------- processes


class Process:
    """A child process that ends with this one, because its standard input closes."""

    def __init__(self, argv: Sequence[str | Path], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [sys.executable, *map(str, argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        self.pid = self._child.pid

    def send(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode() + b"\n")
        self._child.stdin.flush()

    def wait_until_ready(self) -> None:
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != b"ready":
            raise SystemExit(f"a learner's process did not start: {self.last_words()}")

    def check(self) -> None:
        if self._child.poll() is not None:
            raise SystemExit(f"process {self.pid} ended with {self._child.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def stop(self) -> None:
        with suppress(BrokenPipeError, ProcessLookupError):
            self._child.terminate()
        try:
            self._child.wait(30.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    # From /proc

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self, key: str) -> int:
        """VmRSS (now) or VmHWM (peak), in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return 1024 * int(line.split()[1])
        raise SystemExit(f"process {self.pid} has no {key}: {self.last_words()}")

    def forget_peak(self) -> None:
        """Resets VmHWM."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


class Cluster:
    """A syncer's process in its own folder, and processes of scripted learners."""

    def __init__(
        self, config: Config, syncer: Sequence[str | Path] = ("-m", "atoll", "syncer"), *, keys: int = 0
    ) -> None:
        """`keys`: certificates for so many learners; 0 is without TLS."""
        self._scratch = tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=os.environ.get("ATOLL_BENCH_DIR"))
        self.folder = Path(self._scratch.name)
        recipe = self.folder / "config.toml"
        recipe.write_text(to_toml(config), encoding="utf8")
        self.directory = self.folder / "syncer"
        self.processes: list[Process] = []
        self.keys = self.folder / "keys" if keys else None
        if self.keys is not None:
            make = [sys.executable, "-m", "atoll", "keys", str(self.keys), "--learners", str(keys)]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        tls = ("--keys", self.keys) if self.keys is not None else ()
        self._argv = [*syncer, recipe, "--dir", self.directory, "--obey-stdin", *tls, "--listen"]
        self.syncer = self._start([*self._argv, "127.0.0.1:0"], "syncer")
        self.address = self._wait_for_address()

    def start_again(self) -> None:
        """The syncer, which was killed: where its learners dial."""
        self.syncer = self._start([*self._argv, self.address], "syncer-again")

    @property
    def token(self) -> Path:
        return (self.keys or self.directory) / "token"

    @property
    def tape(self) -> Path:
        return self.directory / "run.tape"

    def learners(self, first: int, count: int, *words: str) -> Process:
        """Returns when all of them have a place; they enter the run later."""
        tls = ("--keys", self.keys) if self.keys is not None else ()
        where = ("--syncer", self.address, "--token", self.token, *tls)
        process = self._start([__file__, *where, "--first", str(first), "--count", str(count), *words], f"learners-{first}")
        process.wait_until_ready()
        return process

    def _start(self, argv: Sequence[str | Path], name: str) -> Process:
        self.processes.append(Process(argv, self.folder / f"{name}.log"))
        return self.processes[-1]

    def _wait_for_address(self) -> str:
        until, path = time.monotonic() + START_SECONDS, self.directory / "address"
        while not path.exists():
            self.syncer.check()
            if time.monotonic() > until:
                raise SystemExit(f"the syncer did not start: {self.syncer.last_words()}")
            time.sleep(0.05)
        return path.read_text(encoding="ascii").strip()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in reversed(self.processes):
            process.stop()
        if error is None:
            self._scratch.cleanup()


class Sampler(threading.Thread):
    """Calls `read` every `seconds` and collects the results in `seen`."""

    def __init__(self, read: Callable[[], Any], seconds: float) -> None:
        super().__init__(daemon=True)
        self._read = read
        self._seconds = seconds
        self._over = threading.Event()
        self.seen: list[Any] = []

    def run(self) -> None:
        while not self._over.wait(self._seconds):
            self.seen.append(self._read())

    def stop(self) -> list[Any]:
        self._over.set()
        self.join()
        return self.seen


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", required=True)
    parser.add_argument("--token", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.5)
    parser.add_argument("--jitter", type=float, default=0.1)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--keys", type=Path, help="Mutual TLS with the certificates in this folder.")
    parser.add_argument("--packets", type=int, default=1, help="Different packets of each fragment.")
    parser.add_argument("--packets-file", type=Path, help="Written by `write_packets`, instead of packets of its own.")
    parser.add_argument("--listen", action="store_true", help="Serve peers. The learners have no state, so a recovery fails.")
    run_learners(parser.parse_args())


if __name__ == "__main__":
    main()
