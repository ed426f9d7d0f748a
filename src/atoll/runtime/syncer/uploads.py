"""A user's model on its way to the syncer: into a file, from one learner at a time.

Any learner with a place may upload while there is no model yet, and says how large it is. So the bytes go to the disk as they
come, up to `limits.upload_bytes_max`, and are read into memory once, when all of them are there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.errors import DataError
from atoll.ids import LearnerId
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.store.tensor_files import StorageFailed, discard
from atoll.transport import Refused, Sink

log = logging.getLogger("atoll.syncer")

RECEIVED_FILE = "model.received"


class ModelUploads:
    def __init__(
        self, directory: SyncerDirectory, taken: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`taken` is called when the run has its model. A place stays with whoever uploads, or asks again while another does:
        both take longer than a place is reserved."""
        self._clock = clock
        self._directory = directory
        self._taken = taken
        self._current: _UploadFile | None = None
        discard(directory.directory / RECEIVED_FILE)  # of a syncer that was killed

    def begin(self, metadata: Mapping[str, str]) -> Sink | bytes:
        """The digest of the model, if there is one: a second model is not read."""
        placed = self._directory.places.admit(metadata)
        self.touch(placed.learner)
        if self._directory.layout is not None:
            return self._directory.layout_digest.encode()
        if self._current is not None:
            raise Refused("another learner is uploading the model", retry=True)
        self._current = _UploadFile(self, placed.learner, self._directory)
        return self._current

    def touch(self, learner: LearnerId) -> None:
        self._directory.places.touch(learner, self._clock())

    def take(self, learner: LearnerId, path: Path) -> bytes:
        try:
            self._directory.take_model(path)
        except StorageFailed as error:
            raise _not_stored(error) from None
        except (DataError, MemoryError) as error:
            raise Refused(str(error) or "there is no memory for a model of this size", retry=False) from None
        self._taken()
        log.info("learner %d uploaded the model", learner)
        return self._directory.layout_digest.encode()

    def ended(self) -> None:
        self._current = None


class _UploadFile:
    """A `Sink`. Files are opened, written and synced outside the event loop."""

    def __init__(self, uploads: ModelUploads, learner: LearnerId, directory: SyncerDirectory) -> None:
        self.bytes_max = directory.config.limits.upload_bytes_max
        self._uploads, self._learner, self._path = uploads, learner, directory.directory / RECEIVED_FILE
        self._descriptor = -1

    async def write(self, data: memoryview) -> None:
        await self._on_disk(lambda: self._write(data))
        self._uploads.touch(self._learner)

    async def finish(self) -> bytes:
        await self._on_disk(self._close)
        answer = self._uploads.take(self._learner, self._path)
        self._uploads.touch(self._learner)
        self._uploads.ended()
        return answer

    def abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        discard(self._path)
        self._uploads.ended()

    async def _on_disk(self, work: Callable[[], None]) -> None:
        task = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})  # a write in another thread must not outlive its descriptor
            raise
        except OSError as error:
            raise _not_stored(error) from None

    def _write(self, data: memoryview) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        while len(data):
            data = data[os.write(self._descriptor, data) :]

    def _close(self) -> None:
        self._write(memoryview(b""))
        os.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def _not_stored(error: Exception) -> Refused:
    return Refused(f"the syncer cannot store the model now: {error}"[:300], retry=True)
