"""Whose place is it: a certificate asks for another's place, one token for three hundred, and a revoked learner goes on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
import torch
from thread_syncer import PATIENCE_SECONDS, Syncer, custom, model_of, train

from atoll.config.codecs import codec_digests
from atoll.errors import NotAdmitted, UserError
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import Envelope, Membership, Report
from atoll.runtime.learner.address import Address, request_place
from atoll.runtime.learner.live import REFUSALS_MAX
from atoll.runtime.local.proxy import Proxy
from atoll.runtime.loop import LoopThread
from atoll.runtime.syncer import places, process
from atoll.runtime.syncer.places import JoinRequest, Placement
from atoll.transport import ClientCredentials, LinkFailed, LinkLimits, Refused, client_credentials
from atoll.transport.keys import SYNCER_NAME, load_learner, make_keys
from atoll.transport.revoked import revoke
from atoll.transport.wire import Channel, RpcError, failure


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", learners=2)
    return tmp_path / "keys"


Start = Callable[..., Syncer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Syncer] = []

    def begin(keys: Path | None = None, **limits: int) -> Syncer:
        made.append(Syncer(tmp_path / "syncer", custom(total_steps=10**6, learners=1, limits=limits), keys))
        return made[-1]

    yield begin
    for syncer in made:
        syncer.stop()


def shown_as(keys: Path, name: str) -> ClientCredentials:
    found = load_learner(keys, name)
    return client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME)


def asks(syncer: Syncer, keys: Path, name: str, wants: int) -> Placement:
    """As `atoll learner` does at first, once."""
    token = syncer.home.token_file.read_text().strip()
    address = Address(syncer.address, token, credentials=shown_as(keys, name), join_timeout_seconds=0.0)
    return asyncio.run(request_place(address, wants, random.Random(0)))


def test_certificate_gets_neither_the_place_of_another_nor_a_second_one(start: Start, keys: Path) -> None:
    syncer = start(keys)
    assert asks(syncer, keys, "learner-0", 0).place_key == "", "a certificate is enough to come back"
    with pytest.raises(NotAdmitted, match="belongs to certificate learner-0"):
        asks(syncer, keys, "learner-1", 0)
    with pytest.raises(NotAdmitted, match="learners_per_certificate"):
        asks(syncer, keys, "learner-0", 1)
    assert asks(syncer, keys, "learner-1", -1).learner == 1


async def join_often(address: str, token: str, credentials: ClientCredentials | None, count: int) -> Counter[str]:
    """Over one connection, each for a place of its own."""
    channel, outcomes = Channel(address, LinkLimits(), credentials), Counter[str]()
    try:
        for wants in range(count):
            request = msgspec.msgpack.encode(JoinRequest(wants=wants, codecs=codec_digests()))
            try:
                await channel.call("Join", {"token": token}, request)
                outcomes["given"] += 1
            except RpcError as error:
                refusal = failure(error, address)
                closed = isinstance(refusal, LinkFailed)  # after 10 s, because no link was admitted on this connection
                assert closed or (isinstance(refusal, Refused) and not refusal.retry)
                outcomes["refused"] += 1
    finally:
        await channel.close()
    return outcomes


@pytest.mark.parametrize(("certified", "most"), [(True, 1), (False, 16)])
def test_three_hundred_places_are_not_given_to_one_token(start: Start, keys: Path, certified: bool, most: int) -> None:
    syncer = start(keys if certified else None)
    token = syncer.home.token_file.read_text().strip()
    credentials = shown_as(keys, "learner-0") if certified else None
    assert asyncio.run(join_often(syncer.address, token, credentials, 300)) == {"given": most, "refused": 300 - most}


# ---------------------------------------------------------------- a loop that trains meanwhile


class Loop:
    """A user's loop in a thread, until it is told to stop or something ends it."""

    def __init__(self, syncer: Syncer, pool: ThreadPoolExecutor, **options: object) -> None:
        self._syncer, self._options = syncer, options
        self.stop, self.trains, self.moved = threading.Event(), threading.Event(), threading.Event()
        self.ids: list[int] = []
        self.result = pool.submit(self._run)

    def _run(self) -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        with self._syncer.join(model, optimizer, **self._options) as learner:
            while not self.stop.is_set() and not learner.over:
                train(learner, model, optimizer)
                if learner.id not in self.ids:
                    self.ids.append(learner.id)
                if learner.outer_step > 2:
                    self.trains.set()
                if len(self.ids) > 1:
                    self.moved.set()


def test_revoked_learner_loses_its_connection_and_ends_with_the_reason(
    start: Start, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "REVOKED_SECONDS", 0.1)
    syncer = start(keys)
    with ThreadPoolExecutor(2) as pool:
        loops = [Loop(syncer, pool, keys=keys, name=f"learner-{n}", wants=n) for n in range(2)]
        try:
            assert all(loop.trains.wait(PATIENCE_SECONDS) for loop in loops)
            revoke(keys, "learner-1")
            with pytest.raises(NotAdmitted, match="certificate learner-1 is revoked"):
                loops[1].result.result(PATIENCE_SECONDS)
            assert not loops[0].result.done(), "the other trains on"
        finally:
            for loop in loops:
                loop.stop.set()
        loops[0].result.result(PATIENCE_SECONDS)
    with pytest.raises(NotAdmitted, match="revoked"):
        asks(syncer, keys, "learner-1", -1)


def test_learner_whose_place_was_taken_while_it_was_away_goes_on_in_another(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "RESERVED_SECONDS", 0.0)  # it is away for longer than this
    syncer, network, proxy = start(), LoopThread(), Proxy()
    between = network.run(proxy.start(syncer.address))
    token = syncer.home.token_file.read_text().strip()
    with ThreadPoolExecutor(1) as pool:
        loop = Loop(syncer, pool, address=between, wants=0, out=tmp_path / "learners" / "0")
        try:
            assert loop.trains.wait(PATIENCE_SECONDS)
            network.loop.call_soon_threadsafe(proxy.partition, "both", 0.0)
            taken = asyncio.run(request_place(Address(syncer.address, token), 0, random.Random(0)))
            assert (taken.learner, taken.incarnation) == (0, 1)
            monkeypatch.setattr(places, "RESERVED_SECONDS", 60.0)
            network.loop.call_soon_threadsafe(proxy.heal)
            assert loop.moved.wait(PATIENCE_SECONDS), loop.ids
        finally:
            loop.stop.set()
        loop.result.result(PATIENCE_SECONDS)
    network.run(proxy.stop())
    network.stop()
    joined = [e.learner for r in syncer.tape() for e in r.effects if isinstance(e, Membership) and e.standing == "in_sync"]
    assert [learner for learner, _ in groupby(joined)] == [0, 1], "one that stalls may enter its own place again"
    assert (tmp_path / "learners" / "1" / "0.tape").exists(), "beside the old one, where a replay finds it"


def test_learner_whose_messages_are_refused_again_and_again_ends_with_the_reason(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is cut is dialled again, but not for ever: the same messages would be refused for an hour."""
    refused: list[object] = []

    def objection(config: object, envelope: Envelope) -> Reason | None:
        if isinstance(envelope.body, Report):
            refused.append(envelope)
            return Reason(Why.IMPOSSIBLE, "report names what cannot be")
        return None

    syncer = start()
    monkeypatch.setattr(process, "objection", objection)
    with ThreadPoolExecutor(1) as pool:
        loop = Loop(syncer, pool, wants=0)
        with pytest.raises(NotAdmitted, match="report names what cannot be"):
            loop.result.result(PATIENCE_SECONDS)
    assert len(refused) == REFUSALS_MAX


def test_second_process_without_the_key_does_not_get_a_place_that_is_reserved(start: Start, tmp_path: Path) -> None:
    syncer = start()
    token = syncer.home.token_file.read_text().strip()
    address = Address(syncer.address, token, join_timeout_seconds=0.0)
    given = asyncio.run(request_place(address, 0, random.Random(0)))
    assert len(given.place_key) == 64
    with pytest.raises(UserError, match="reserved for the process that had it"):
        asyncio.run(request_place(address, 0, random.Random(0)))
