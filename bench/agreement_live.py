"""The live side of `agreement.py`: a local cluster on links of a given rate, and the figures of its tapes.

The limit is a token bucket in a proxy between each learner and the syncer, one for each direction. It is not tbf on network
namespaces as in `two_machines.py`: `LocalCluster` forks all of its processes from one fork server, so they share a namespace
and an address, and the kernel could not distinguish the learners' links. A proxy can, and needs no root.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

from atoll.chaos import ChaosPlan, Kill
from atoll.config import Config
from atoll.errors import RunFailed
from atoll.ids import SYNCER, LearnerId, Nanos, OuterStep, WorkerId, nanos, seconds
from atoll.protocol.vocabulary import (
    Effect,
    Event,
    Finished,
    FixParticipants,
    Received,
    Report,
    Resume,
    Started,
    StepDone,
    Stored,
)  # fmt: skip
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.fault_proxies import FaultProxies
from atoll.runtime.loop import LoopThread
from atoll.tape.format import Record
from atoll.tape.weave import open_run

HERE = Path(__file__).parent
MODEL_NAME = "agreement_model:timed"
SLICE_SECONDS = 0.02
"""A limited direction forwards in slices of this much time, and makes up for a wake-up that is late by up to one slice. Idle
time beyond that is not saved."""
MESSAGE_BYTES = 2048
BUFFER_BYTES = 64 * 1024
"""Of the proxy's sockets. The kernel's default is megabytes: messages would queue behind seconds of data on a slow link."""
SEGMENT_BYTES = 1448
"""As on Ethernet. Loopback's segments have 64 KB, and a sender's buffer is sized in segments."""

# ---------------------------------------------------------------- limited links


class Bucket:
    """One direction of a learner's link, all connections together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def slice_bytes(self) -> int:
        return max(256, min(BUFFER_BYTES, int(self._rate * SLICE_SECONDS)))

    async def spend(self, count: int) -> None:
        """Returns when the last of these bytes has crossed. A late wake-up is made up for: otherwise the mean rate would be too
        low, by 4 % at 10 Mbit/s and by a fifth at 200. A message overtakes a transfer and delays it, as in a fair queue
        (fq_codel) and on the virtual network."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now - SLICE_SECONDS, self._free_at) + count / self._rate
        if self._free_at > now and count > MESSAGE_BYTES:
            await asyncio.sleep(self._free_at - now)


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, bucket: Bucket) -> None:
    while data := await source.read(bucket.slice_bytes()):
        await bucket.spend(len(data))
        sink.write(data)
        await sink.drain()


def small_socket() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    made.setblocking(False)
    return made


class LimitedLink:
    """Listens for one learner and forwards to the syncer."""

    def __init__(self, bytes_per_second: float) -> None:
        self._up, self._down = Bucket(bytes_per_second), Bucket(bytes_per_second)
        self._syncer = ("", 0)
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self, syncer: str) -> str:
        host, _, port = syncer.rpartition(":")
        self._syncer = (host, int(port))
        listener = small_socket()  # accepted connections inherit its buffer size
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._forward, sock=listener, limit=BUFFER_BYTES)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = small_socket()
            await asyncio.get_running_loop().sock_connect(upstream, self._syncer)
            from_syncer, to_syncer = await asyncio.open_connection(sock=upstream, limit=BUFFER_BYTES)
        except OSError:
            writer.close()
            return
        pumps = [asyncio.create_task(w) for w in (pump(reader, to_syncer, self._up), pump(from_syncer, writer, self._down))]
        self._pumps.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)  # gRPC closes both directions or none
        for pump_task in pumps:
            pump_task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._pumps.difference_update(pumps)
        for end in (writer, to_syncer):
            end.close()

    async def stop(self) -> None:
        self._server.close()
        for pump_task in self._pumps:
            pump_task.cancel()
        while self._pumps:
            await asyncio.sleep(SLICE_SECONDS)


class LimitedFaultProxies(FaultProxies):
    """A limited link for each learner, in place of the fault proxies of a plan."""

    def __init__(self, learners: int, bytes_per_second: float) -> None:
        super().__init__(ChaosPlan(), learners)
        self._links = [LimitedLink(bytes_per_second) for _ in range(learners)]

    def start(self, syncer: str) -> None:
        self._loop = LoopThread()
        self._addresses = {learner: self._loop.run(link.start(syncer)) for learner, link in enumerate(self._links)}

    def stop(self) -> None:
        if self._loop is None:
            return
        for link in self._links:
            self._loop.run(link.stop())
        self._loop.stop()


def run_live(settings: Config, folder: Path, plan: ChaosPlan | None = None, mbit: float | None = None) -> list[Record]:
    """The run's tapes, merged. Its processes find the model beside this file."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *(path for path in known if path and path != str(HERE))])
    cluster = LocalCluster(settings, folder, plan or ChaosPlan(), allowed=[MODEL_NAME])
    if mbit is not None:
        cluster._fault_proxies = LimitedFaultProxies(settings.learners, mbit * 1e6 / 8)
    cluster.run()
    return list(open_run(folder).records())


# ---------------------------------------------------------------- figures of a run


class Seen:
    """A fold over a live run's tapes or over a virtual run as it runs, so that both are counted in the same way."""

    def __init__(self) -> None:
        self.steps: defaultdict[LearnerId, list[tuple[Nanos, Nanos]]] = defaultdict(list)
        """Begin and end of each."""
        self.waits: defaultdict[LearnerId, list[Nanos]] = defaultdict(list)
        self.starts: defaultdict[LearnerId, list[Nanos]] = defaultdict(list)
        self.pulls: list[Nanos] = []
        """From fixing a round's participants to storing its result."""
        self.counted: list[tuple[Nanos, Nanos]] = []
        """Steps that the syncer counted: time of the report, and duration."""
        self.first_round: Nanos | None = None
        self.finished: Nanos | None = None
        self._reported: dict[tuple[LearnerId, int], int] = {}
        self._fixed: dict[OuterStep, Nanos] = {}

    def feed(self, records: Iterable[Record]) -> Seen:
        for r in records:
            self(r.now, r.worker, r.event, r.effects)
        return self

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER:
            self._syncer(now, event, effects)
            return
        if isinstance(event, StepDone):
            self.steps[worker].append((now - event.nanos, now))
        elif isinstance(event, Started):
            self.starts[worker].append(now)
        self.waits[worker] += [e.waited_nanos for e in effects if isinstance(e, Resume)]

    def _syncer(self, now: Nanos, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Received) and isinstance(event.envelope.body, Report):
            self._report(now, event.envelope.sender, event.envelope.incarnation, event.envelope.body)
        elif isinstance(event, Stored) and event.outer_step in self._fixed:
            self.pulls.append(now - self._fixed[event.outer_step])
        for effect in effects:
            if isinstance(effect, FixParticipants):
                self._fixed[effect.outer_step] = now
                self.first_round = now if self.first_round is None else self.first_round
            elif isinstance(effect, Finished):
                self.finished = now

    def _report(self, now: Nanos, learner: LearnerId, incarnation: int, body: Report) -> None:
        """A step counts once, as in `views/run.py`."""
        if body.local_step > self._reported.get((learner, incarnation), 0):
            self._reported[learner, incarnation] = body.local_step
            self.counted.append((now, body.step_nanos))

    # ------------------------------------------------------------ shares

    def utilisation(self, interval: int, warm_up: int) -> float:
        """Time in steps over elapsed time, over whole intervals: from the start of the one after `warm_up` to the start of the
        last, so that each counts with the wait that ends it."""
        shares = []
        for steps in self.steps.values():
            first, last = warm_up * interval, (len(steps) - 1) // interval * interval
            if last <= first:
                raise RunFailed(f"{len(steps)} inner steps: too few to measure an interval of {interval} after {warm_up} others")
            shares.append(sum(end - begin for begin, end in steps[first:last]) / (steps[last][0] - steps[first][0]))
        return sum(shares) / len(shares)

    def goodput(self, window: float, learners: int) -> float:
        """The share of the learners' time in steps that count, from the first round and for `window` seconds."""
        assert self.first_round is not None
        until = self.first_round + nanos(window)
        useful = sum(min(took, now - self.first_round) for now, took in self.counted if self.first_round < now <= until)
        return useful / (learners * nanos(window))

    def lasted(self) -> float:
        """Seconds from the first round to the last."""
        if self.first_round is None or self.finished is None:
            raise RunFailed("the run has no first round or did not finish")
        return seconds(self.finished - self.first_round)


@dataclass(frozen=True)
class Calibration:
    """All that the simulators get from an unlimited run."""

    step_seconds: float
    """Mean inner step: a transfer overlaps many steps, so their sum counts, long ones included."""
    period_seconds: float
    """Step and the time between two steps: reporting, staging, adopting. A gap longer than a step is a wait or an absence."""
    step_noise: float
    round_seconds: float = 0.0
    """Cost of a blocking round on an unlimited link for the learner that reports last; 0: no learner waited."""
    pull_seconds: float = 0.0
    """From fixing a round's participants to storing its result."""

    @property
    def latency_seconds(self) -> float:
        """One way. A blocking round is four trips: report, pull, contribution, announcement; a pull and its answer are two. On
        an unlimited link a trip takes as long as the processes at its ends need, which is no time in the simulator."""
        return self.round_seconds / 4 if self.round_seconds else self.pull_seconds / 2

    @property
    def busy(self) -> float:
        """Share of its time that a learner without faults and waits spends in steps."""
        return self.step_seconds / self.period_seconds


def calibrated(seen: Seen, warm_up_steps: int) -> Calibration:
    taken = [steps[warm_up_steps:] for steps in seen.steps.values()]
    lengths = [end - begin for steps in taken for begin, end in steps]
    gaps = [later[0] - earlier[1] for steps in taken for earlier, later in pairwise(steps)]
    mean = fmean(lengths)
    gap = fmean(gap for gap in gaps if gap < mean)
    rounds = [min(waits) for waits in zip(*seen.waits.values(), strict=False)][:-1]  # no learner trains after the last
    return Calibration(
        step_seconds=mean / 1e9, period_seconds=(mean + gap) / 1e9, step_noise=pstdev(lengths) / mean,
        round_seconds=seconds(median(rounds)) if rounds else 0.0, pull_seconds=seconds(median(seen.pulls)) if seen.pulls else 0.0,
    )  # fmt: skip


def comebacks(seen: Seen, plan: ChaosPlan) -> list[tuple[float, float]]:
    """For each kill, seconds from the end of its absence until the new process has started, and until its first step."""
    assert seen.first_round is not None
    found = []
    for fault in plan.faults:
        assert isinstance(fault, Kill)
        back = seen.first_round + nanos(fault.at + fault.lasts)
        started = next((t for t in seen.starts[fault.learner] if t > back), None)
        stepped = next((begin for begin, _ in seen.steps[fault.learner] if begin > back), None)
        if started is not None and stepped is not None:
            found.append((seconds(started - back), seconds(stepped - back)))
    return found
