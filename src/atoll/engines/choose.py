"""The engines by their names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from atoll.engines.deployment import Deployment, EngineState, Rendered
from atoll.engines.record import UpRecord
from atoll.errors import UserError

ENGINES = {
    "local": "local:LocalEngine", "slurm": "slurm:SlurmEngine", "kubernetes": "kubernetes:KubernetesEngine",
    "ray": "ray_cluster:RayEngine",
}  # fmt: skip
"""Imported when it is asked for: Ray is an extra."""


class Engine(Protocol):
    """What each of these classes does."""

    def render(self, deployment: Deployment) -> list[Rendered]:
        """What `up` would submit."""

    def up(self, deployment: Deployment) -> bool:
        """Starts what does not run yet. False: the run is up already."""

    def status(self, record: UpRecord) -> EngineState: ...

    def logs(self, record: UpRecord, workers: list[str], follow: bool) -> Iterator[tuple[str, str]]:
        """(worker, line)."""

    def down(self, record: UpRecord) -> None:
        """Learners leave politely, then everything ends. Returns when nothing of the run is left running."""


def engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UserError(f"--on {name}: must be one of {', '.join(ENGINES)}")
    module, _, kind = ENGINES[name].partition(":")
    return cast(Engine, getattr(importlib.import_module(f"atoll.engines.{module}"), kind)())
