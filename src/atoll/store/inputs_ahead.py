"""The inputs of a merge, written while it is computed.

What a round stores is known when its merge begins, but for a few numbers that the merge gives: its checksum, and what a stripe
learnt of others. These stand in the file's header. So another thread writes and syncs everything else meanwhile and leaves room
for the header, which is written last. Until then the file has its temporary name: a crash leaves nothing that counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from atoll.ids import FragmentId, OuterStep
from atoll.store import tensor_files as files
from atoll.store.tensor_files import ByteChunk, OldFiles, StorageFailed
from atoll.store.version_file import encode_inputs, input_digests
from atoll.store.versions import MergeInputs

log = logging.getLogger("atoll.store")

WORTHWHILE_BYTES: Final = 4 << 20
"""Below, handing the bytes to another thread costs more than writing them."""
ROOM_BYTES: Final = 4096
ROOM_OF_EACH: Final = 512
"""Left for what the merge adds to the header, by contribution."""
_NO_RESULT: Final = "0" * 32


class Ahead(NamedTuple):
    """A file without its header."""

    temporary: Path
    room: int
    digests: Mapping[str, str]
    """Of the tensors that are written."""

    def finish(self, header: ByteChunk) -> Path | None:
        """Synced, under its temporary name; None if the header does not fit, and the file must be written anew."""
        padded = files.padded_header(header, self.room)
        if padded is None:
            return None
        files.write_at_start(self.temporary, padded)
        return self.temporary


class InputsAhead:
    over: OldFiles | None = None
    """Files to write over."""

    def __init__(self, thread: ThreadPoolExecutor, worthwhile_bytes: int = WORTHWHILE_BYTES) -> None:
        """`thread` has one thread and no other work: a round waits for it."""
        self._thread = thread
        self._worthwhile_bytes = worthwhile_bytes
        self._begun: dict[tuple[OuterStep, FragmentId], tuple[Path, Future[Ahead]]] = {}

    def begin(self, path: Path, p: FragmentId, fragments: int, t: OuterStep, inputs: MergeInputs) -> None:
        """`path`: the name that the file is to have. Tensors of `inputs` do not change until `take` or `drop`."""
        self.drop(t, p)
        if inputs.nbytes >= self._worthwhile_bytes:
            self._begun[t, p] = path, self._thread.submit(_written, path, p, fragments, t, inputs, self.over)

    def take(self, t: OuterStep, p: FragmentId) -> Ahead | None:
        """Waits until it is written. None: it was not begun, or the disk refused it."""
        _, future = self._begun.pop((t, p), (None, None))
        if future is None:
            return None
        try:
            return future.result()
        except StorageFailed as error:
            log.warning("inputs could not be written while they were merged, they are written after it: %s", error)
            return None

    def drop(self, t: OuterStep, fragment: FragmentId | None = None) -> None:
        """Of one fragment or all. The file goes before another of that name is begun, for both are this one thread's work."""
        for key in [key for key in self._begun if key[0] == t and fragment in (None, key[1])]:
            path, _ = self._begun.pop(key)
            self._thread.submit(partial(files.discard, files.temporary_name(path)))


def _written(path: Path, p: FragmentId, fragments: int, t: OuterStep, inputs: MergeInputs, over: OldFiles | None) -> Ahead:
    digests = input_digests(inputs)
    chunks, _ = encode_inputs(p, fragments, t, replace(inputs, result=_NO_RESULT), digests)
    room = len(chunks[0]) + ROOM_BYTES + ROOM_OF_EACH * len(inputs.weights)
    room += -room % os.sysconf("SC_PAGESIZE")  # tensors begin at a page
    return Ahead(files.stage(path, chunks[1:], at=room, over=over), room, digests)
