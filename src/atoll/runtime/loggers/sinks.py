"""Where a run's curves are logged: a name, and what a sink must do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from atoll.errors import UserError
from atoll.runtime.loggers.mlflow import MlflowSink
from atoll.runtime.loggers.tensorboard import TensorboardSink
from atoll.runtime.loggers.wandb import WandbSink
from atoll.views.log_points import LogPoint, RunIdentity


class LogSink(Protocol):
    def last_step(self, stream: str) -> int:
        """Of what it holds of this run, whoever wrote it; 0: nothing."""
        ...

    def write(self, points: Sequence[LogPoint]) -> None: ...

    def close(self) -> None: ...


class LogTarget(NamedTuple):
    """As in `tensorboard:runs/tb`."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"


class _Kind(NamedTuple):
    opened: Callable[[str, RunIdentity], LogSink]
    form: str
    module: str
    """Of the extra that has the kind's own name."""


KINDS: dict[str, _Kind] = {
    "tensorboard": _Kind(TensorboardSink, "tensorboard:FOLDER", "tensorboard"),
    "wandb": _Kind(WandbSink, "wandb:PROJECT", "wandb"),
    "mlflow": _Kind(MlflowSink, "mlflow:TRACKING_URI", "mlflow"),
}


def log_target(text: str, option: str) -> LogTarget:
    """Refuses what names no logger, and one whose package is not installed, before anything is trained."""
    kind, colon, where = text.partition(":")
    if kind not in KINDS or not colon or not where.strip():
        raise UserError(f"{option} {text!r}: names no logger; give one of {', '.join(each.form for each in KINDS.values())}")
    if importlib.util.find_spec(KINDS[kind].module) is None:
        raise UserError(f"{option} {text}: the package {KINDS[kind].module} is needed: pip install 'atoll[{kind}]'")
    return LogTarget(kind, where)


def open_sink(target: LogTarget, identity: RunIdentity) -> LogSink:
    return KINDS[target.kind].opened(target.where, identity)
