"""A custom model goes into a file, from one learner at a time, and any failure leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thread_syncer import custom, cut, model_of

from atoll.config import Config
from atoll.runtime.join.upload import OwnWeights
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.places import RESERVED_SECONDS, Caller
from atoll.runtime.syncer.uploads import RECEIVED_FILE, ModelUploads
from atoll.store.model_upload import pack_model
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.tasks.task import layout_for
from atoll.transport import Refused


def packed(config: Config) -> bytes:
    model = model_of()
    layout, tensors = layout_for(config, model), dict(model.state_dict())
    return b"".join(map(bytes, pack_model(layout, OwnWeights(tensors, layout.fragments)).pieces()))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[SyncerDirectory]:
    made = SyncerDirectory(tmp_path / "syncer", custom(limits={"upload_bytes_max": 1 << 20}), None)
    yield made
    made.close(complete=False)
    cut(made)


def shown(home: SyncerDirectory, learner: int) -> dict[str, str]:
    placed, key, _ = home.places.place(learner, 0.0, Caller())
    return {"run": home.run, "learner": str(learner), "incarnation": str(placed.incarnation), "key": key}


async def sent(sink: Any, data: bytes) -> bytes:
    """As the transport does it."""
    try:
        for at in range(0, len(data), 1000):
            await sink.write(memoryview(data)[at : at + 1000])
        answer: bytes = await sink.finish()
        return answer
    except BaseException:
        sink.abandon()
        raise


def test_second_learner_waits_and_then_gets_the_digest_of_the_first(home: SyncerDirectory) -> None:
    taken: list[int] = []
    uploads = ModelUploads(home, lambda: taken.append(1))
    first, second = shown(home, 0), shown(home, 1)
    sink = uploads.begin(first)
    assert not isinstance(sink, bytes) and sink.bytes_max == 1 << 20
    with pytest.raises(Refused) as refused:
        uploads.begin(second)
    assert refused.value.retry
    digest = asyncio.run(sent(sink, packed(home.config)))
    assert taken == [1] and digest and uploads.begin(second) == digest == home.layout_digest.encode()
    assert not (home.directory / RECEIVED_FILE).exists() and (home.directory / "model.upload").exists()


def test_place_stays_with_whoever_uploads_and_with_whoever_waits_for_it(home: SyncerDirectory) -> None:
    """A large model takes longer than a place is reserved; nobody else is given it meanwhile."""
    now = 0.0
    uploads = ModelUploads(home, lambda: None, lambda: now)
    first, second = shown(home, 0), shown(home, 1)
    sink = uploads.begin(first)
    assert not isinstance(sink, bytes)

    async def slowly() -> None:
        nonlocal now
        for _ in range(4):
            now += 0.7 * RESERVED_SECONDS
            with pytest.raises(Refused, match="another learner is uploading"):
                uploads.begin(second)
            await sink.write(memoryview(b""))
        sink.abandon()

    asyncio.run(slowly())
    assert home.places.place(-1, now, Caller())[0].learner not in (0, 1)
    for taken in (0, 1):
        with pytest.raises(Refused, match="is reserved for the process that had it"):
            home.places.place(taken, now, Caller())


def test_learner_without_a_place_may_not_begin(home: SyncerDirectory) -> None:
    with pytest.raises(Refused) as refused:
        ModelUploads(home, lambda: None).begin(shown(home, 0) | {"key": "guessed"})
    assert not refused.value.retry


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("damage", "retry"),
    [(lambda patch: patch.setattr(os, "write", no_space), True), (lambda patch: patch.setattr(os, "open", no_descriptor), True),
     (lambda patch: None, False)],
    ids=["full disk", "no descriptor", "not a model"],
)  # fmt: skip
def test_failed_upload_leaves_no_file_and_the_next_may_begin(
    home: SyncerDirectory, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None], retry: bool
) -> None:
    uploads, metadata = ModelUploads(home, lambda: None), shown(home, 0)
    with monkeypatch.context() as patch, pytest.raises(Refused) as refused:
        damage(patch)
        asyncio.run(sent(uploads.begin(metadata), bytes(5000)))
    assert refused.value.retry == retry
    assert not (home.directory / RECEIVED_FILE).exists() and home.layout is None
    assert asyncio.run(sent(uploads.begin(metadata), packed(home.config))) == home.layout_digest.encode() != b""


@pytest.mark.parametrize("key", ["params", "buffers"])
def test_model_without_its_numbers_is_refused_and_the_next_may_begin(home: SyncerDirectory, key: str) -> None:
    """Found by `make soak`: nothing where a list of vectors should be was a TypeError in the syncer."""
    uploads, metadata = ModelUploads(home, lambda: None), shown(home, 0)
    spoiled = unpack_state(memoryview(packed(home.config)), "a model") | {key: None}
    with pytest.raises(Refused, match="not understood") as refused:
        asyncio.run(sent(uploads.begin(metadata), b"".join(map(bytes, pack_state(spoiled)))))
    assert not refused.value.retry
    assert asyncio.run(sent(uploads.begin(metadata), packed(home.config))) == home.layout_digest.encode() != b""


def test_client_that_goes_away_in_the_middle_leaves_no_file(home: SyncerDirectory) -> None:
    uploads, metadata = ModelUploads(home, lambda: None), shown(home, 0)

    async def story() -> None:
        sink: Any = uploads.begin(metadata)
        await sink.write(memoryview(bytes(1000)))
        assert (home.directory / RECEIVED_FILE).stat().st_size == 1000
        sink.abandon()

    asyncio.run(story())
    assert not (home.directory / RECEIVED_FILE).exists()
    assert not isinstance(uploads.begin(metadata), bytes)
