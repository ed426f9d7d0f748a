"""What a rank of data-parallel training reports, and what a run of them adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, seconds
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import Summary, TokenCounts


class Job(msgspec.Struct, frozen=True):
    """What a rank needs beside the config; `ddp.json` in the run's folder, so a run says how it was run."""

    threads: int
    backend: str
    devices: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    """Code of the user's own that may be imported as the model."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One step of one rank, by the machine's monotonic clock, which all its processes share."""

    step: int
    began: Nanos
    ready: Nanos
    """The rank's last gradients went to the all-reduce; from here to `reduced` it had nothing left to compute."""
    reduced: Nanos
    ended: Nanos
    loss: float


class HeldoutReport(msgspec.Struct, frozen=True, tag=True):
    """Rank 0, on the way."""

    point: HeldoutPoint


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """The last line of a rank, and its `rank-N.json`."""

    rank: LearnerId
    device: str
    steps: int
    tokens: int
    stepping_seconds: float
    waited_seconds: float
    bytes_sent: int
    """By a ring: 2(M-1)/M of the gradients' bytes each step, and as many received. Initial weights are not counted."""
    theta_sha256: str
    loss_first: float | None
    loss_final: float | None
    accuracy: float | None = None


@dataclass(frozen=True)
class DdpOutcome:
    """Goodput: the share of the ranks' time in which they did not wait. Uptime: of time in which not all of them did.

    Waiting is the time from a rank's own last gradient to the all-reduce's result: for slower ranks and for the wire,
    less what the backward pass hid. On CUDA it is taken on the GPU's stream.
    """

    goodput: float
    uptime: float
    waited_seconds: float
    participants: dict[str, int]
    tokens: int
    bytes_up: int
    bytes_down: int
    loss_first: float | None
    loss_final: float | None
    theta_sha256: str
    seconds: float
    """From the first step's begin to the last one's end; building, evaluating and saving are outside."""
    backend: str
    ranks: tuple[RankReport, ...]
    points: tuple[HeldoutPoint, ...] = ()


class StepFold:
    """Steps of all ranks, as they come in. Ranks are never further apart than one step: an all-reduce needs everybody."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, list[Stepped]] = {}
        self.steps = 0
        self.first: Nanos | None = None
        self.last: Nanos = 0
        self.all_waiting: Nanos = 0

    def add(self, said: Stepped) -> float | None:
        """The mean train loss of a step that this line completes."""
        self.first = said.began if self.first is None else min(self.first, said.began)
        self.last = max(self.last, said.ended)
        steps = self._open.setdefault(said.step, [])
        steps.append(said)
        if len(steps) < self._count:
            return None
        del self._open[said.step]
        self.steps += 1
        # Waits of different steps cannot overlap: nobody begins to wait for the next before this one's end.
        self.all_waiting += max(0, min(s.reduced for s in steps) - max(s.ready for s in steps))
        return sum(s.loss for s in steps) / self._count


def outcome_of(
    config: Config, backend: str, fold: StepFold, reports: Sequence[RankReport], points: Sequence[HeldoutPoint]
) -> DdpOutcome:
    assert fold.first is not None
    clock, moved = seconds(fold.last - fold.first), sum(report.bytes_sent for report in reports)
    return DdpOutcome(
        goodput=sum(report.stepping_seconds for report in reports) / (config.learners * clock),
        uptime=1 - seconds(fold.all_waiting) / clock, waited_seconds=sum(report.waited_seconds for report in reports),
        participants={str(config.learners): fold.steps}, tokens=sum(report.tokens for report in reports),
        bytes_up=moved, bytes_down=moved, loss_first=reports[0].loss_first, loss_final=reports[0].loss_final,
        theta_sha256=reports[0].theta_sha256, seconds=clock, backend=backend, ranks=tuple(reports), points=tuple(points),
    )  # fmt: skip


def summary_of(config: Config, outcome: DdpOutcome, run_dir: Path) -> Summary:
    """What a rank computed is merged in the same step: nothing is discarded and nothing is in flight at the end."""
    return Summary(
        preset=config.preset, learners=config.learners, seed=config.seed, total_steps=config.total_steps,
        goodput=round(outcome.goodput, 6), uptime=round(outcome.uptime, 6), waited_seconds=round(outcome.waited_seconds, 6),
        participants=outcome.participants, tokens=TokenCounts(outcome.tokens, outcome.tokens, 0, 0, {}), recoveries=[],
        bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, loss_first=outcome.loss_first,
        loss_final=outcome.loss_final, theta_sha256=outcome.theta_sha256, tape=None, run_dir=str(run_dir),
        clock="wall", seconds=round(outcome.seconds, 6), fragments=1, accuracy=outcome.ranks[0].accuracy,
        heldout=list(outcome.points),
    )  # fmt: skip
