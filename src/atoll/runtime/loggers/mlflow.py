"""MLflow: one run of theirs for each of ours, in the experiment `atoll` of a tracking server or folder, by their own client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.views.log_points import HELDOUT, HELDOUT_LOSS, STREAMS, LogPoint, RunIdentity
from atoll.workload.data.packing import import_optional

EXPERIMENT, TAG = "atoll", "atoll.run"
AT_ONCE = 200
"""Points in one request; their limit is 1,000 values."""
PARTICIPANTS = "round/participants"
"""Every point of a round has it, and it is written last: where it is, the others are."""
PARAM_MAX = 500


class MlflowSink:
    def __init__(self, where: str, identity: RunIdentity) -> None:
        need = (f"to log to mlflow:{where}", "mlflow-skinny", "mlflow")
        tracking = import_optional("mlflow.tracking", *need)
        self._entities = import_optional("mlflow.entities", *need)
        self._client = tracking.MlflowClient(tracking_uri=where)
        self._run: str = self._found(identity) or self._made(identity)
        self._newest: dict[str, int] = {}
        self._last = {stream: self._newest_of(HELDOUT_LOSS if stream == HELDOUT else PARTICIPANTS) for stream in STREAMS}

    def _found(self, identity: RunIdentity) -> str | None:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            self._experiment: Any = self._client.create_experiment(EXPERIMENT)
            return None
        self._experiment = experiment.experiment_id
        found = self._client.search_runs([self._experiment], f"tags.`{TAG}` = '{identity.key}'")
        return str(found[0].info.run_id) if found else None

    def _made(self, identity: RunIdentity) -> str:
        run = self._client.create_run(self._experiment, tags={TAG: identity.key}, run_name=identity.name)
        params = [self._entities.Param(key, str(value)[:PARAM_MAX]) for key, value in _flat(identity.config)]
        for first in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[first : first + 100])
        return str(run.info.run_id)

    def _newest_of(self, name: str) -> int:
        if name not in self._newest:
            history = self._client.get_metric_history(self._run, name)
            self._newest[name] = max((metric.step for metric in history), default=0)
        return self._newest[name]

    def last_step(self, stream: str) -> int:
        return self._last[stream]

    def write(self, points: Sequence[LogPoint]) -> None:
        """A folder takes one value after the other: a logger that was killed may have left half a point, and the other half is
        written now."""
        for first in range(0, len(points), AT_ONCE):
            metrics = [
                self._entities.Metric(name, value, round(1000 * point.unix_seconds), point.step)
                for point in points[first : first + AT_ONCE]
                for name, value in sorted(point.values.items(), key=lambda item: item[0] == PARTICIPANTS)
                if point.step > self._newest_of(name)
            ]
            self._client.log_batch(self._run, metrics=metrics)
            self._newest.update((metric.key, metric.step) for metric in metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _flat(tables: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in tables.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]
    return found
