"""Weights & Biases: one run of theirs for each of ours, by their own client. WANDB_MODE=offline works, and their other variables.

Their client writes every row to a local log first. What is in there is logged, whether a logger was killed or not, so a later one
goes on from it. (Their own `resume` knows nothing of offline runs.)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.views.log_points import HELDOUT, HELDOUT_LOSS, ROUNDS, STREAMS, LogPoint, RunIdentity
from atoll.workload.data.packing import import_optional

STEP = "outer_step"
_BLOCK, _FILE_HEADER = 32_768, 7
_RECORD = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


class WandbSink:
    def __init__(self, where: str, identity: RunIdentity) -> None:
        need = (f"to log to wandb:{where}", "wandb", "wandb")
        self._wandb = import_optional("wandb", *need)
        self._project, self._identity = where, identity
        self._run: Any = None
        self._records = import_optional("wandb.proto.wandb_internal_pb2", *need)
        self._last = dict.fromkeys(STREAMS, 0)
        self._rows = 0
        folder = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
        for row in self._logged(folder, identity.key):
            stream = HELDOUT if HELDOUT_LOSS in row else ROUNDS
            self._last[stream] = max(self._last[stream], int(row[STEP]))
            self._rows += 1

    def _opened(self) -> Any:
        settings = self._wandb.Settings(console="off", x_disable_stats=True)
        run = self._wandb.init(
            project=self._project, id=self._identity.key, name=self._identity.name, config=self._identity.config, resume="allow",
            settings=settings,
        )  # fmt: skip
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _logged(self, folder: Path, key: str) -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob(f"*run-*-{key}/run-{key}.wandb")):
            for body in log_records(path.read_bytes()):
                record = self._records.Record()
                record.ParseFromString(body)
                if record.WhichOneof("record_type") == "history":
                    items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                    if STEP in items:
                        yield items

    def last_step(self, stream: str) -> int:
        return self._last[stream]

    def write(self, points: Sequence[LogPoint]) -> None:
        """A logger that finds nothing to do opens no run of theirs."""
        self._run = self._run or self._opened()
        for point in points:
            self._run.log({**point.values, STEP: point.step, "_timestamp": point.unix_seconds}, step=self._rows)
            self._rows += 1

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log as their client writes it: LevelDB's format, in blocks of 32 KiB. A last one that is not whole is left
    out."""
    at, parts = _FILE_HEADER, b""
    while at + _RECORD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD.size:
            at += left
            continue
        _, size, kind = _RECORD.unpack_from(data, at)
        begin, at = at + _RECORD.size, at + _RECORD.size + size
        if kind == 0 or at > len(data):
            return
        parts += data[begin:at]
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
