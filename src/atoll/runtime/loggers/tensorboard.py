"""TensorBoard's event files, by TensorBoard's own writer: a folder of its own for each run, an event for each point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import UserError
from atoll.views.log_points import HELDOUT, HELDOUT_LOSS, ROUNDS, STREAMS, LogPoint, RunIdentity
from atoll.workload.data.packing import import_optional


class TensorboardSink:
    def __init__(self, where: str, identity: RunIdentity) -> None:
        self._folder = Path(where) / f"{identity.name}-{identity.key}"
        need = (f"to log to tensorboard:{where}", "tensorboard", "tensorboard")
        self._files = import_optional("tensorboard.backend.event_processing.event_file_loader", *need)
        self._writing = import_optional("tensorboard.summary.writer.event_file_writer", *need)
        self._protocol = import_optional("tensorboard.compat.proto.event_pb2", *need)
        self._summary = import_optional("tensorboard.compat.proto.summary_pb2", *need)
        self._last = dict.fromkeys(STREAMS, 0)
        for event in self._events():
            stream = HELDOUT if any(value.tag == HELDOUT_LOSS for value in event.summary.value) else ROUNDS
            self._last[stream] = max(self._last[stream], event.step)
        self._writer: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"tensorboard:{where}: cannot be written ({error.strerror})") from None

    def _events(self) -> Iterator[Any]:
        for path in sorted(self._folder.glob("*tfevents*")):
            yield from self._files.EventFileLoader(str(path)).Load()

    def last_step(self, stream: str) -> int:
        return self._last[stream]

    def write(self, points: Sequence[LogPoint]) -> None:
        """All values of a point are one event, so that a point is there whole or not at all. A logger that finds nothing to do
        leaves no file."""
        if self._writer is None:
            self._writer = self._writing.EventFileWriter(str(self._folder))
        for point in points:
            values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in sorted(point.values.items())]
            summary = self._summary.Summary(value=values)
            self._writer.add_event(self._protocol.Event(wall_time=point.unix_seconds, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
