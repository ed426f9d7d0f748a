"""What a process serves at /metrics, given to Ray: Ray's agent of the node serves it with its own, so that the Prometheus and the
Grafana which Ray's dashboard shows have it without another target to scrape.

Every sample becomes a gauge of Ray's with the same name (Ray puts `ray_` before it) and labels, and the labels `run` and
`worker`: Ray's own counters and histograms only take single observations, and what was counted here is counted already.
"""

from __future__ import annotations

import importlib
import threading
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

EVERY_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 5.0
PAGE_MAX: Final = 1 << 24
SERIES_MAX: Final = 4000
"""Names with labels of one process: what comes beyond is not copied."""


class MetricsCopy:
    """Of one process, which writes where it serves its metrics into `address_file`."""

    def __init__(self, address_file: Path, run: str, worker: str) -> None:
        self._address, self._tags = address_file, {"run": run, "worker": worker}
        self._gauges: dict[str, Any] = {}
        self._series: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        self._parse: Callable[[str], Any] = importlib.import_module("prometheus_client.parser").text_string_to_metric_families
        self._gauge: Callable[..., Any] = importlib.import_module("ray.util.metrics").Gauge
        address_file.unlink(missing_ok=True)  # of a process before this one

    def follow(self, ended: threading.Event) -> None:
        """Until the process has ended. A bug is in this actor's log, once; nothing waits for it."""
        complained = False
        while not ended.wait(EVERY_SECONDS):
            try:
                self.copy()
            except OSError:  # it is about to end, or has no time to answer
                continue
            except Exception:  # a view of the run must not end it
                if not complained:
                    traceback.print_exc()
                complained = True

    def copy(self) -> None:
        if not self._address.exists():
            return  # it has not begun to serve them
        address = self._address.read_text(encoding="utf8").strip()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            page = answer.read(PAGE_MAX).decode()
        for family in self._parse(page):
            for sample in family.samples:
                self._set(sample.name, family.documentation, sample.labels, sample.value)

    def _set(self, name: str, documentation: str, labels: dict[str, str], value: float) -> None:
        series = (name, tuple(sorted(labels.items())))
        if series not in self._series:
            if len(self._series) >= SERIES_MAX:
                return
            self._series.add(series)
        gauge = self._gauges.get(name)
        if gauge is None:
            keys = tuple(sorted({*labels, *self._tags}))
            gauge = self._gauges[name] = self._gauge(name, description=documentation, tag_keys=keys)
        gauge.set(value, tags={**labels, **self._tags})
