"""The syncer's metrics: its process, seen by an observer of its events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from atoll.runtime.metrics import MetricsAt, NewestHeldout, careful, metrics_served
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.process import SyncerProcess
from atoll.views.worker_metrics import LinkTotals, SyncerMetrics


@contextlib.contextmanager
def syncer_metrics(at: MetricsAt | None, process: SyncerProcess, home: SyncerDirectory) -> Iterator[None]:
    """Of the process that runs inside."""
    if at is None:
        yield
        return
    metrics = SyncerMetrics(
        home.config, home.machine, home.epoch, torch.__version__, LinkTotals(process.link_of), door=lambda: process.refused,
        heldout=NewestHeldout(home.directory),
    )  # fmt: skip
    process.observers += careful(metrics)
    with metrics_served(at, metrics, home.directory):
        yield
