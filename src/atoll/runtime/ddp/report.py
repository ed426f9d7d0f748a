"""The reports of data-parallel ranks, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.config import Config
from atoll.ids import LearnerId, Nanos, seconds
from atoll.store.weights import THETA_FILE
from atoll.tape.folder import TAPE_FILE
from atoll.tape.heldout import HeldoutPoint
from atoll.views.run import Summary, TokenCounts, token_shares


class Job(msgspec.Struct, frozen=True):
    """What a rank needs beside the config. Written as `ddp.json` to the run's folder, which records how the run was started."""

    threads: int
    backend: str
    devices: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    """User code that may be imported as the model."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One step of one rank, by the machine's monotonic clock, which all processes share."""

    step: int
    began: Nanos
    ready: Nanos
    """When the rank's last gradients went to the all-reduce; from then to `reduced` it computed nothing."""
    reduced: Nanos
    ended: Nanos
    loss: float
    rank: LearnerId = 0
    tokens: int = 0
    samples: int = 0


class HeldoutReport(msgspec.Struct, frozen=True, tag=True):
    """A held-out point of rank 0 during training."""

    point: HeldoutPoint


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last line of a rank that ends with an error of ours; its standard error is for people."""

    message: str
    users_fault: bool


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """The last line of a rank, and its `rank-N.json`."""

    rank: LearnerId
    device: str
    steps: int
    tokens: int
    stepping_seconds: float
    waited_seconds: float
    bytes_sent: int
    """As of a ring: 2(M-1)/M of the gradients' bytes per step, and as many received. Initial weights are not counted."""
    theta_sha256: str
    loss_first: float | None
    loss_final: float | None
    accuracy: float | None = None


@dataclass(frozen=True)
class DdpOutcome:
    """Goodput: the share of the ranks' time in which they did not wait. Uptime: the share of time in which not all waited.

    Waiting is the time from a rank's own last gradient to the all-reduce's result: for slower ranks and for the network, less
    what the backward pass hid. On CUDA it is measured on the GPU's stream.
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
    """From the start of the first step to the end of the last, without building, evaluation and saving."""
    backend: str
    ranks: tuple[RankReport, ...]
    points: tuple[HeldoutPoint, ...] = ()


class StepFold:
    """Collects the steps of all ranks. Ranks are never more than one step apart: an all-reduce needs all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, list[Stepped]] = {}
        self.steps = 0
        self.first: Nanos | None = None
        self.last: Nanos = 0
        self.all_waiting: Nanos = 0
        self.completed: list[Stepped] = []
        """The last step that is complete, as each rank reported it."""

    def add(self, step: Stepped) -> float | None:
        """The mean train loss of a step that this line completes."""
        self.first = step.began if self.first is None else min(self.first, step.began)
        self.last = max(self.last, step.ended)
        steps = self._open.setdefault(step.step, [])
        steps.append(step)
        if len(steps) < self._count:
            return None
        self.completed = self._open.pop(step.step)
        self.steps += 1
        # Waits of different steps cannot overlap: no rank begins to wait for the next step before this one ends.
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
    """All work is merged in its own step: nothing is discarded, and nothing is in flight at the end."""
    tokens = TokenCounts(outcome.tokens, outcome.tokens, 0, 0, {})
    return Summary(
        preset=config.preset, learners=config.learners, seed=config.seed, total_steps=config.total_steps,
        goodput=round(outcome.goodput, 6), uptime=round(outcome.uptime, 6), waited_seconds=round(outcome.waited_seconds, 6),
        participants=outcome.participants, tokens=tokens, recoveries=[],
        bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, loss_first=outcome.loss_first,
        loss_final=outcome.loss_final, theta_sha256=outcome.theta_sha256, tape=str(run_dir / TAPE_FILE), run_dir=str(run_dir),
        clock="wall", seconds=round(outcome.seconds, 6), fragments=1, accuracy=outcome.ranks[0].accuracy,
        heldout=list(outcome.points), theta=str(run_dir / THETA_FILE), rounds_merged=config.total_steps,
        tokens_trained=outcome.tokens, token_shares=token_shares(tokens),
        token_goodput=round(tokens.merged / tokens.trained, 6) if tokens.trained else 0.0,
    )  # fmt: skip
