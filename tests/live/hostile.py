"""A seeded fuzzer: somebody who holds a token and throws at a listening syncer whatever a socket can carry.

Every attack is a function of (siege, rng) that throws some messages over links of its own and then goes; many run at
once, again and again, until enough was thrown. What the syncer does in return (refuse, hang up) ends an attack and is
counted; nothing here ever raises because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from raw_link import RawBulk, RawLink, of_kind, raw_link
from raw_link import chunk as raw_chunk

from atoll.codecs import Packet, codec
from atoll.config import Config, from_builtins
from atoll.config.codecs import codec_digests
from atoll.errors import AtollError
from atoll.ids import SYNCER
from atoll.protocol.causality import Mailbox
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adoption,
    Announce,
    Contribution,
    Decline,
    Enter,
    Envelope,
    Finish,
    Goodbye,
    Grant,
    Hello,
    Lane,
    Loaded,
    Message,
    Pull,
    Recover,
    RecoveryFailed,
    Report,
    Serve,
    StateRequest,
    StateTransfer,
    TakeTheta,
    Tick,
    Ticket,
    Unit,
    Welcome,
)  # fmt: skip
from atoll.rules import tokens_per_step_max
from atoll.runtime import payload as wire
from atoll.runtime.syncer.places import JoinRequest, Placement
from atoll.transport import Link, LinkFailed, LinkLimits, Refused, call, dial, upload
from atoll.transport.chunks import PREFACE
from atoll.transport.frames import BULK as BULK_FRAME
from atoll.transport.frames import BYE, CHUNK, CONTROL, HEADER_BYTES, READY, WELCOME, Violation, pack
from atoll.transport.server import COUNT_KEY, SESSION_KEY
from atoll.transport.wire import Channel, GrpcStream, StreamBroken

Rng = random.Random
EXPECTED = (Refused, LinkFailed, StreamBroken, Violation, TimeoutError, OSError, AtollError)
"""What a refused peer sees."""

EDGES = (
    0, 1, -1, 2, 5, 6, 7, 63, 255, 256, 1023, 4096, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, 2**64 - 1, -2, -(2**31), -(2**53), -(2**63),
)  # fmt: skip
NO = Reason(Why.OUT_OF_STEP, "no")
KINDS = (CONTROL, BULK_FRAME, CHUNK, WELCOME, READY, b"\0\0\0\0", b"what", b"nope")
WORDS = ("", "no", "x" * 999, "x" * 1001, "a\nb\r\x00\x1b[31m", "\U0001f3dd" * 200, "%s %d {}", "../..", "declined", "poisoned")


@dataclass
class Siege:
    """One hostile party: its token, what it has thrown, and what became of it."""

    address: str
    token: str
    seed: int
    goal: int
    honest: int
    """Ids below this belong to others; asking for them is part of the attack, being given one would not be."""
    thrown: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    links: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    entered: int = 0
    pulled: int = 0
    config: Config | None = None
    numels: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Parameters and buffers of each fragment, as far as they were announced."""
    bugs: list[str] = field(default_factory=list)
    """Mistakes of this file."""

    @property
    def count(self) -> int:
        return self.thrown.total()

    @property
    def over(self) -> bool:
        """Enough was thrown, also by somebody who was let in and pulled from: on a slow machine that takes longer."""
        return self.stopped.is_set() or (self.count >= self.goal and self.pulled > 0)

    async def run(self, workers: int) -> None:
        turncoats = [self._attack(turncoat, Rng(f"{self.seed} turncoat {n}")) for n in range(2)]  # some in every siege
        await asyncio.gather(*turncoats, *(self._work(Rng(f"{self.seed} {n}")) for n in range(workers)))
        for _ in range(4):  # gRPC holds a connection as long as anything of it is alive, and needs a loop to let it go
            gc.collect()
            await asyncio.sleep(0.3)

    async def _work(self, rng: Rng) -> None:
        attacks, weights = zip(*ATTACKS, strict=True)
        while not self.over:
            (attack,) = rng.choices(attacks, weights)
            await self._attack(attack, rng)

    async def _attack(self, attack: Attack, rng: Rng) -> None:
        try:
            async with asyncio.timeout(20):
                await attack(self, rng)
            self.outcomes["went by itself"] += 1
        except EXPECTED as end:
            self.outcomes[type(end).__name__] += 1
            if isinstance(end, LinkFailed) and "cannot be reached" in str(end):
                await asyncio.sleep(0.05)
        except Exception as error:
            self.bugs.append(f"{attack.__name__}: {error!r}")
            self.outcomes["bug"] += 1

    # ------------------------------------------------------------ ways in

    async def place(self, rng: Rng) -> Placement:
        """Under any id that nobody honest has; the last one again, where it asks too often."""
        wants = rng.randrange(self.honest, self.members_max)
        kept = self.placements.get(wants)
        key = kept.place_key if kept is not None else ""
        request = JoinRequest(wants=wants, codecs=codec_digests(), place=wants, place_key=key)
        self.thrown["join"] += 1
        try:
            reply = await call(self.address, "Join", {"token": self.token}, msgspec.msgpack.encode(request))
        except Refused as refusal:
            if kept is None or not refusal.retry:
                raise
            return kept
        placement = self.placements[wants] = msgspec.msgpack.decode(reply, type=Placement)
        if self.config is None:
            self.config = from_builtins(placement.config)
        return placement

    members_max: int = 24
    placements: dict[int, Placement] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def link(self, place: Placement, kind: str) -> AsyncIterator[Ears]:
        """Well-framed, by Atoll's own transport."""
        ears = Ears(self, place)
        link = await dial(self.address, ears, peer="syncer", metadata=shown(place), limits=LinkLimits(head_bytes_max=2 << 20))
        self.links += 1
        try:
            yield ears
            if not ears.gone.is_set():
                await asyncio.wait_for(link.drain(), 5)
        finally:
            self.thrown[kind] += link.messages_sent
            link.close("enough")
            await link.wait_closed()

    @contextlib.asynccontextmanager
    async def raw(self, place: Placement, connections: int = 1) -> AsyncIterator[tuple[GrpcStream, list[RawBulk]]]:
        """A link that is admitted, and no rules."""
        async with raw_link(self.address, shown(place), connections) as found:
            self.links += 1
            yield found


def shown(place: Placement) -> dict[str, str]:
    return {
        "run": place.run, "learner": str(place.learner), "incarnation": str(place.incarnation), "key": place.key,
        "advertise": "127.0.0.1:1",
    }  # fmt: skip


class Ears:
    """What the syncer says on one link, and the channel back."""

    def __init__(self, siege: Siege, place: Placement) -> None:
        self._siege = siege
        self.place = place
        self.mailbox = Mailbox(place.learner, place.incarnation)
        self.heard: asyncio.Queue[Envelope] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._link: Link

    def opened(self, link: Link) -> None:
        self._link = link

    def arrived(self, link: Link, head: bytes, payload: memoryview | None) -> None:
        envelope = wire.from_head(head).envelope
        body = envelope.body
        if isinstance(body, Announce) and payload is not None and body.previous == NO_VERSION:
            theta, buffers = wire.from_buffer(body, payload).content
            self._siege.numels[body.fragment] = (theta.numel(), buffers.numel())
        self.heard.put_nowait(envelope)

    def closed(self, link: Link, reason: str) -> None:
        self.gone.set()

    def say(self, body: Message, payload: bytes | None = None) -> None:
        envelope = self.mailbox.seal(SYNCER, body)
        if payload is None and body.lane is Lane.BULK:
            payload = b""
        self._link.send(wire.to_head(envelope), None if payload is None else [payload])

    def say_bytes(self, head: bytes, payload: bytes | None = None) -> None:
        self._link.send(head, None if payload is None else [payload])

    async def next(self, seconds: float) -> Message | None:
        try:
            async with asyncio.timeout(seconds):
                return (await self.heard.get()).body
        except TimeoutError:
            return None


# ---------------------------------------------------------------- (a) frames


def frame(rng: Rng, number: int) -> bytes:
    """Something like a frame; sometimes one that would be right."""
    body = rng.randbytes(rng.choice((0, 1, 3, 40, 500, 5000)))
    good = pack(rng.choice(KINDS), number, 0, 0, [body])
    match rng.randrange(10):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return good[: rng.randrange(len(good))]
        case 2:
            at = rng.randrange(len(good))
            return good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :]
        case 3:
            edge = [rng.choice(EDGES) % 2**64 for _ in range(3)]
            return pack(rng.choice(KINDS), *edge, [body])
        case 4:
            return pack(CONTROL, number, rng.choice((1, 2**63)), 0, [body])
        case 5:
            return pack(CONTROL, number, 0, 0, [bytes(rng.choice(((1 << 20) + 1, 3 << 19)))]) if rng.random() < 0.05 else good
        case 6:
            return pack(BULK_FRAME, rng.randrange(3), 0, rng.choice((0, 9, 1 << 20, 1 << 33, 2**64 - 1)), [body])
        case 7:
            return pack(CONTROL, number + rng.choice((-1, 1, 7)) if number else 1, 0, 0, [body])
        case 8:
            return pack(BYE, rng.randrange(2), body=[body])
        case _:
            return good


def chunk(rng: Rng) -> bytes:
    total = rng.choice((9, 9, 100, 5000, 1 << 20, 1 << 30, 1 << 34, 2**63))
    at = rng.choice((0, 0, 1, 3, 8, 64, 4096, total - 1, total, 2**62))
    size = rng.choice((0, 1, 3, 9, 100, 4096))
    number = rng.choice((0, 0, 0, 1, 2, 7, 8, 9, 2**40, 2**64 - 1))
    good = raw_chunk(number, at % 2**64, total, rng.randbytes(size))
    match rng.randrange(10):
        case 0:
            return frame(rng, 0)
        case 1:
            return of_kind(rng.choice(KINDS), good)
        case 2:
            return good[: rng.randrange(len(good))]
        case _:
            return good


async def frames_that_are_none(siege: Siege, rng: Rng) -> None:
    place = await siege.place(rng)
    for _ in range(3):
        async with siege.raw(place, rng.choice((1, 1, 2, 3))) as (talk, bulks):
            reading = asyncio.create_task(last_words(talk))
            try:
                for number in range(rng.choice((1, 5, 40))):
                    stream, kind = (talk, "frame") if rng.random() < 0.6 else (rng.choice(bulks), "chunk")
                    data = frame(rng, number) if stream is talk else chunk(rng)
                    for _ in range(rng.choice((1, 1, 1, 2))):  # twice the same is no crime
                        await stream.write(data)
                        siege.thrown[kind] += 1
                await asyncio.wait({reading}, timeout=0.2)
            except (StreamBroken, ConnectionError):
                siege.outcomes["hung up on"] += 1
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def last_words(talk: GrpcStream) -> None:
    with contextlib.suppress(StreamBroken):
        while await talk.read() is not None:
            pass


async def right_frames_of_noise(siege: Siege, rng: Rng) -> None:
    """The framing holds; the first head that is none costs the link, and those behind it were sent all the same."""
    place = await siege.place(rng)
    async with siege.raw(place) as (talk, _):
        with contextlib.suppress(StreamBroken):
            for number in range(rng.choice((10, 60))):
                await talk.write(pack(CONTROL, number, 0, 0, [head(rng, siege, place)]))
                siege.thrown["head"] += 1
        await asyncio.wait_for(last_words(talk), 3)


# ---------------------------------------------------------------- (b) heads


def head(rng: Rng, siege: Siege, place: Placement) -> bytes:
    """A head that was real before something happened to it."""
    envelope = Mailbox(place.learner, place.incarnation).seal(SYNCER, lie(rng, siege, place, wild=0.2))
    real = wire.to_head(envelope)
    match rng.randrange(9):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return msgspec.msgpack.encode(tree(rng, 4))
        case 2:
            data = bytearray(real)
            for _ in range(rng.choice((1, 1, 2, 9))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(data)
        case 3:
            return real[: rng.randrange(len(real))]
        case 4:  # a field nobody knows, nested deeper than anybody reads
            deep = rng.choice((30, 1100, 200_000))
            plain = msgspec.msgpack.decode(real)
            inside = msgspec.msgpack.encode(plain[0])
            return b"\x91" + bytes([inside[0] + 1]) + inside[1:] + b"\xa1z" + b"\x91" * deep + b"\xc0"
        case 5:  # lengths that are not there
            length = rng.choice((2**16, 2**24, 2**32 - 1)).to_bytes(4, "big")
            return real.replace(b"\xa5clock\x93", b"\xa5clock" + rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + length)
        case 6:
            return real.replace(rng.choice((b"Hello", b"Report", b"type", b"seq")), rng.randbytes(rng.choice((5, 6, 4, 3))))
        case 7:
            return msgspec.msgpack.encode(
                [msgspec.structs.replace(envelope, **{rng.choice(("sender", "incarnation", "receiver", "seq")): edge(rng)})]
            )
        case _:
            return msgspec.msgpack.encode(mutated(rng, msgspec.msgpack.decode(real)))


def edge(rng: Rng) -> int:
    return rng.choice(EDGES)


def tree(rng: Rng, depth: int) -> Any:
    match rng.randrange(8 if depth else 6):
        case 0:
            return edge(rng)
        case 1:
            return rng.choice((None, True, False))
        case 2:
            return rng.choice((0.5, float("nan"), float("inf"), -0.0, 1e308))
        case 3 | 4:
            return rng.choice(WORDS)
        case 5:
            return rng.randbytes(rng.randrange(40))
        case 6:
            return [tree(rng, depth - 1) for _ in range(rng.randrange(6))]
        case _:
            return {rng.choice(("sender", "body", "type", "seq", "clock", "x")): tree(rng, depth - 1) for _ in range(4)}


def mutated(rng: Rng, value: Any) -> Any:
    """One place of a nested value becomes something else."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value * rng.choice((0, 3, 5000))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    return tree(rng, 2)


async def heads_that_are_none(siege: Siege, rng: Rng) -> None:
    place = await siege.place(rng)
    for _ in range(4):
        async with siege.link(place, "head") as ears:
            for _ in range(rng.choice((1, 10, 50))):
                ears.say_bytes(head(rng, siege, place), rng.choice((None, None, b"", b"bytes")))
            await asyncio.wait_for(ears.gone.wait(), 3)


# ---------------------------------------------------------------- (c) lies


def lie(rng: Rng, siege: Siege, place: Placement, wild: float) -> Message:
    """Any message there is, its numbers small, or, with this probability each, beyond reason."""
    fragments = siege.config.protocol.fragments if siege.config else 6

    def n(most: int = 40) -> int:
        return edge(rng) if rng.random() < wild else rng.randrange(most)

    def versions() -> tuple[int, ...]:
        many = rng.choice((0, 1, 5000)) if rng.random() < wild else fragments
        return tuple(NO_VERSION if rng.random() < 0.5 else n(5) for _ in range(many))

    def units() -> tuple[Unit, ...]:
        many = 3000 if rng.random() < wild / 4 else rng.randrange(4)
        return tuple(Unit(place.learner if rng.random() < 0.5 else n(8), n()) for _ in range(many))

    def word() -> Reason:
        return Reason(rng.choice(list(Why)), rng.choice(WORDS))

    def bit() -> bool:
        return rng.random() < 0.5

    adopted = tuple(Adoption(n(fragments), n(), n(), n(), n()) for _ in range(rng.choice((0, 0, 1, 3, 30))))
    steps = n()
    makers: tuple[Callable[[], Message], ...] = (
        lambda: Hello(versions(), steps, n(), bit(), units(), n(), word(), n()),
        lambda: Report(
            n(3), steps, n(), 128 * (steps % 2**40) if bit() else n(), n(), n(10**9), n(), place.learner if bit() else n(4), n(),
            adopted, n(), rng.choice((None, 1.0, float("nan"), float("-inf"))),
        ),
        lambda: Contribution(n(), n(fragments), n(), n(), n(), n(), n(), n()),
        lambda: Decline(n(), word()),
        lambda: Loaded(n(), rng.choice((SYNCER, n(4))), n(), versions()),
        lambda: RecoveryFailed(n(), word()),
        lambda: Goodbye(word()),
        lambda: StateTransfer(n(), n(), versions(), ((n(fragments), n()),)),
        lambda: StateRequest(n()),
        lambda: rng.choice((
            Welcome(n()), Pull(n(), (n(),)), Announce(n(), n(), n(), (n(),)), Tick(n()), Ticket(n(), n(), n(), n()),
            Serve(n(), n(), n()), TakeTheta(n(), word()), Enter(n(), n()), Recover(word()), Grant(units(), n()), Finish(n()),
        )),
    )  # fmt: skip
    (maker,) = rng.choices(makers, (5, 8, 6, 3, 3, 3, 2, 1, 1, 1))
    return maker()


def payload(rng: Rng, siege: Siege, fragment: int) -> bytes:
    """Bytes beside a contribution: of the right fragment and size, except for what is wrong with them."""
    numel, buffers = siege.numels.get(fragment, (64, 0))
    name = siege.config.protocol.codec_up if siege.config else "int4"
    values = torch.full((numel,), rng.choice((0.0, 1e-12, 1e-3, 1.0, 1e9, 3e38)))
    tail = torch.zeros(buffers)
    match rng.randrange(12):
        case 0:
            return rng.randbytes(rng.randrange(3000))
        case 1:
            return whole(codec(name).encode(values), tail)[: rng.randrange(1, 40)]
        case 2:
            data = bytearray(whole(codec(name).encode(values), tail))
            data[-rng.randrange(1, min(64, len(data))) :] = b""
            return bytes(data)
        case 3:  # NaN or Inf where scales are
            packet = codec(name).encode(values)
            if packet.scales is not None:
                packet.scales[rng.randrange(packet.scales.numel())] = rng.choice((float("nan"), float("inf"), -1.0, 3e38))
            return whole(packet, tail)
        case 4:
            return whole(codec(name).encode(torch.zeros(numel + rng.choice((-1, 1, 100)))), tail)
        case 5:
            return whole(codec(rng.choice(("fp32", "bf16", "int1"))).encode(values), tail)
        case 6:
            return whole(codec(name).encode(values), torch.full((buffers + rng.randrange(3),), float("nan")))
        case 7:  # plain numbers, which only a syncer sends
            return struct.pack("<BQ", 2, 4 * numel) + bytes(4 * numel)
        case 8:
            data = bytearray(whole(codec(name).encode(values), tail))
            for _ in range(rng.choice((1, 4, 30))):
                data[rng.randrange(min(len(data), 60))] = rng.randrange(256)
            return bytes(data)
        case 9:
            return struct.pack("<BQ", rng.choice((0, 1, 2, 255)), edge(rng) % 2**64) + rng.randbytes(rng.randrange(200))
        case _:
            return whole(codec(name).encode(values), tail)


def whole(packet: Packet, buffers: torch.Tensor) -> bytes:
    parts = wire.to_buffers(Payload("packet", 0, (packet, buffers)))
    return b"".join(parts or ())


async def liar(siege: Siege, rng: Rng) -> None:
    """Right framing, right sender, right sequence numbers; what is said is not so."""
    place = await siege.place(rng)
    wild = rng.choice((0.0, 0.0, 0.02, 0.2))
    for _ in range(4):
        async with siege.link(place, "lie") as ears:
            if rng.random() < 0.8:
                ears.say(nothing_yet(siege, place))
            for _ in range(rng.choice((5, 30, 120))):
                body = lie(rng, siege, place, wild)
                if not wild and isinstance(body, StateTransfer | StateRequest) and rng.random() < 0.9:
                    continue
                if isinstance(body, Contribution) and rng.random() < 0.9:
                    ears.say(body, payload(rng, siege, body.fragment))
                elif rng.random() < 0.02:  # bytes where none belong, or none where they do
                    ears.say_bytes(wire.to_head(ears.mailbox.seal(SYNCER, body)), b"x" if body.lane is not Lane.BULK else None)
                else:
                    ears.say(body)
                if rng.random() < 0.1:
                    await asyncio.sleep(0)
                if ears.gone.is_set():
                    break
            if rng.random() < 0.5:
                await asyncio.wait_for(ears.gone.wait(), 0.3)


def nothing_yet(siege: Siege, place: Placement) -> Hello:
    fragments = siege.config.protocol.fragments if siege.config else 6
    return Hello((NO_VERSION,) * fragments, 0, 0, True, (), 0, NO)


async def spammer(siege: Siege, rng: Rng) -> None:
    """One word, said very often."""
    place = await siege.place(rng)
    hello = nothing_yet(siege, place)
    words: list[Message] = [
        hello, RecoveryFailed(rng.randrange(50), NO), Goodbye(NO), Decline(rng.randrange(99), NO), Finish(1),
        Loaded(rng.randrange(50), -1, 0, (0,) * len(hello.held)), StateRequest(1), report(siege, place, 0, 1),
    ]  # fmt: skip
    word = rng.choice(words)
    async with siege.link(place, "spam") as ears:
        ears.say(hello)
        for n in range(rng.choice((50, 300))):
            ears.say(report(siege, place, 0, n) if isinstance(word, Report) else word)
            if n % 20 == 0:
                await asyncio.sleep(0)
            if ears.gone.is_set():
                break


def report(siege: Siege, place: Placement, session: int, step: int, **changes: Any) -> Report:
    assert siege.config is not None
    tokens = step * tokens_per_step_max(siege.config)
    fields: dict[str, Any] = {
        "session": session, "local_step": step, "position": 0, "tokens": tokens, "samples": 0, "step_nanos": 20_000_000,
        "waited_nanos": 0, "stream": place.learner, "batch": step, "adopted": (), "snapshot": 0, "loss": 1.0,
    }  # fmt: skip
    return Report(**fields | changes)


async def turncoat(siege: Siege, rng: Rng) -> None:
    """Joins as everybody does, trains nothing, reports steps, is pulled from, and answers with what it likes."""
    place = await siege.place(rng)
    assert siege.config is not None
    held = [NO_VERSION] * siege.config.protocol.fragments
    session, step, until = 0, 0, asyncio.get_running_loop().time() + rng.choice((1.0, 3.0))
    async with siege.link(place, "turncoat") as ears:
        ears.say(nothing_yet(siege, place))
        while asyncio.get_running_loop().time() < until and not ears.gone.is_set() and not siege.over:
            match await ears.next(0.01):
                case Announce(outer_step=version, fragment=fragment):
                    held[fragment] = version
                    if session:
                        ears.say(report(siege, place, session, step, adopted=(Adoption(fragment, version, step, 0),)))
                case TakeTheta(ticket=ticket):
                    ears.say(Loaded(ticket, SYNCER, step, tuple(held)))
                case Ticket(ticket=ticket):
                    ears.say(RecoveryFailed(ticket, Reason(Why.SOURCE_LOST, "it does not answer")))
                case Recover():
                    session = 0
                    ears.say(Hello(tuple(held), step, 0, True, (), 0, NO))
                case Enter(session=entered):
                    session = entered
                    siege.entered += 1
                case Pull(outer_step=outer_step, fragments=fragments):
                    siege.pulled += 1
                    for fragment in fragments:
                        answer(siege, rng, ears, place, outer_step, fragment, held[fragment], step)
                case Finish():
                    return
                case None if session:
                    step += 1
                    ears.say(report(siege, place, session, step))
                    if rng.random() < 0.02:
                        ears.say(lie(rng, siege, place, 0.05))


def answer(
    siege: Siege, rng: Rng, ears: Ears, place: Placement, outer_step: int, fragment: int, anchor: int, step: int
) -> None:
    assert siege.config is not None
    tokens = step * tokens_per_step_max(siege.config)
    true = Contribution(outer_step, fragment, step, anchor, step, tokens, 0, tokens)
    match rng.randrange(12):
        case 0:
            ears.say(Decline(outer_step, rng.choice(WORDS)[:900]))
        case 1 if rng.random() < 0.2:
            return  # let it wait for its deadline
        case 2:
            ears.say(msgspec.structs.replace(true, c_tokens=tokens + 1, tokens=tokens + 1), payload(rng, siege, fragment))
        case 3:
            wrong = rng.choice((0, anchor + 1, anchor - 1, 10**6))
            ears.say(msgspec.structs.replace(true, anchor=wrong), payload(rng, siege, fragment))
        case 4:
            wrong = outer_step + rng.choice((-1, 1, 10**6))
            ears.say(msgspec.structs.replace(true, outer_step=wrong), payload(rng, siege, fragment))
        case 5:  # the message without its bytes
            ears.say_bytes(wire.to_head(ears.mailbox.seal(SYNCER, true)))
        case 6:
            for _ in range(3):
                ears.say(true, payload(rng, siege, fragment))
        case 7:
            ears.say(true, payload(rng, siege, fragment))
            ears.say(Goodbye(Reason(Why.LEAVES, Reason(Why.OUT_OF_STEP, "and out"))))
        case _:
            ears.say(true, payload(rng, siege, fragment))


# ---------------------------------------------------------------- (d) places


async def asking_for_places(siege: Siege, rng: Rng) -> None:
    for _ in range(10):
        metadata = {"token": siege.token}
        request = msgspec.msgpack.encode(JoinRequest(wants=rng.randrange(siege.honest), codecs=codec_digests()))
        match rng.randrange(7):
            case 0:
                request = rng.randbytes(rng.randrange(100))
            case 1:
                metadata = {"token": rng.choice(("", "atoll1.", siege.token[:-3], siege.token + "A", "x" * 3000))}
            case 2:
                metadata |= {"run": rng.choice(("another", "x" * 3000))}
            case 3:
                request = msgspec.msgpack.encode({"protocol": edge(rng), "wants": edge(rng), "x": tree(rng, 3)})
            case 4:
                request = rng.choice((b"\x81\xa1z" + b"\x91" * 100_000 + b"\xc0", b"\x81\xa9inventory\xa2\xff\xfe"))
            case 5:
                metadata |= {"learner": "0", "incarnation": "0", "key": rng.choice(("", "0" * 64))}
            case _:
                pass
        siege.thrown["place"] += 1
        try:
            await call(siege.address, rng.choice(("Join", "Join", "Join", "Nobody")), metadata, request)
        except (Refused, LinkFailed):
            siege.outcomes["not let in"] += 1


async def all_places(siege: Siege, rng: Rng) -> None:
    """Asks for any place, until there is none."""
    for _ in range(siege.members_max):
        siege.thrown["greed"] += 1
        await call(siege.address, "Join", {"token": siege.token}, msgspec.msgpack.encode(JoinRequest(codecs=codec_digests())))


async def wrong_keys(siege: Siege, rng: Rng) -> None:
    place = await siege.place(rng)
    for _ in range(8):
        key, value = rng.choice((
            ("key", "0" * 64), ("learner", "0"), ("learner", "-7"), ("learner", "9" * 4000), ("learner", "seven"), ("run", "x"),
            ("incarnation", "-1"), ("incarnation", "99999"), (COUNT_KEY, "0"), (COUNT_KEY, "9" * 30), (SESSION_KEY, "short"),
        ))  # fmt: skip
        good = {**shown(place), SESSION_KEY: secrets.token_hex(16), COUNT_KEY: "1"}
        channel = Channel(siege.address, LinkLimits(), None)
        siege.thrown["wrong key"] += 1
        try:
            await asyncio.wait_for(channel.open("Talk", good | {key: value}).read(), 2)
        except StreamBroken:
            siege.outcomes["not let in"] += 1
        finally:
            await channel.close()


async def junk_models(siege: Siege, rng: Rng) -> None:
    place = await siege.place(rng)
    for _ in range(3):
        metadata = shown(place) | rng.choice(({}, {"key": "wrong"}, {"learner": "0"}))
        siege.thrown["offer"] += 1
        with contextlib.suppress(Refused, LinkFailed):
            await upload(siege.address, "Upload", metadata, [bytes(rng.choice((0, 10, 1 << 20, 32 << 20)))], timeout=10)


async def half_open(siege: Siege, rng: Rng) -> None:
    """A talk stream without its bulk connections, bulk connections of nobody or with another key, both and then silence."""
    place = await siege.place(rng)
    links = [RawLink(siege.address, shown(place)) for _ in range(rng.choice((1, 12)))]
    try:
        for link in links:
            with contextlib.suppress(StreamBroken):
                await link.open_talk(rng.choice((1, 2, 16)))
                for _ in range(rng.choice((0, 1, 3))):
                    await link.open_bulk(**rng.choice(({}, {"place": 15}, {"key": b"k" * 32}, {"session": b"s" * 16})))
            siege.thrown["half-open"] += 1
        await asyncio.sleep(rng.choice((0.1, 1.0, 4.0)))
    finally:
        for link in links:
            await link.close()


async def slow_loris(siege: Siege, rng: Rng) -> None:
    """Connections that say nothing, or the beginning of something."""
    host, _, port = siege.address.rpartition(":")
    found = []
    try:
        for _ in range(20):
            one = socket.create_connection((host, int(port)), timeout=2)
            one.setblocking(False)
            found.append(one)
            beginnings = (b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", PREFACE[:3], PREFACE)
            one.send(rng.choice((*beginnings, rng.randbytes(50))))
            siege.thrown["loris"] += 1
        await asyncio.sleep(rng.choice((0.5, 3.0)))
    finally:
        for one in found:
            one.close()


async def mute(siege: Siege, rng: Rng) -> None:
    """A link, a Hello perhaps, and not a word more."""
    place = await siege.place(rng)
    async with siege.link(place, "mute") as ears:
        siege.thrown["mute"] += 1
        if rng.random() < 0.5:
            ears.say(nothing_yet(siege, place))
        await asyncio.sleep(rng.choice((0.5, 3.0)))


async def hostage(siege: Siege, rng: Rng) -> None:
    """Makes the syncer believe that answers take long, then takes part and never answers. Meanwhile it names data of its own
    stream as far away as it can, for others to be given when it is gone."""
    place = await siege.place(rng)
    assert siege.config is not None
    fragments = siege.config.protocol.fragments
    until, session, step = asyncio.get_running_loop().time() + 2.0, 0, 0
    async with siege.link(place, "hostage") as ears:
        hello = nothing_yet(siege, place)
        far = tuple(Unit(place.learner, rng.choice((0, 9, 2**20, 2**40, 2**50, 2**53)) + n) for n in range(3))
        ears.say(msgspec.structs.replace(hello, left=far) if rng.random() < 0.5 else hello)
        for _ in range(3):
            ears.say(Contribution(rng.randrange(9), 0, 0, 0, 0, 0, 0, 0), payload(rng, siege, 0))
        while asyncio.get_running_loop().time() < until and not ears.gone.is_set() and not siege.over:
            match await ears.next(0.02):
                case TakeTheta(ticket=ticket):
                    ears.say(Loaded(ticket, SYNCER, 0, (0,) * fragments))
                case Ticket(ticket=ticket):
                    ears.say(RecoveryFailed(ticket, Reason(Why.SOURCE_LOST, "it does not answer")))
                case Enter(session=entered):
                    session = entered
                    siege.entered += 1
                case None if session:
                    step += 1
                    ears.say(report(siege, place, session, step, step_nanos=rng.choice((0, 10**12))))


async def deaf(siege: Siege, rng: Rng) -> None:
    """Says Hello again and again, each of which is answered with all of Theta, and never reads."""
    place = await siege.place(rng)
    mailbox = Mailbox(place.learner, place.incarnation)
    async with siege.raw(place) as (talk, _):
        for number in range(rng.choice((50, 400))):
            hello = wire.to_head(mailbox.seal(SYNCER, nothing_yet(siege, place)))
            await asyncio.wait_for(talk.write(pack(CONTROL, number, 0, 0, [hello])), 2)
            siege.thrown["deaf"] += 1
        await asyncio.sleep(rng.choice((0.1, 2.0)))


Attack = Callable[[Siege, Rng], Awaitable[None]]
ATTACKS: tuple[tuple[Attack, float], ...] = (
    (frames_that_are_none, 8), (right_frames_of_noise, 6), (heads_that_are_none, 6), (liar, 12), (spammer, 8), (turncoat, 4),
    (asking_for_places, 3), (all_places, 0.3), (wrong_keys, 2), (junk_models, 1), (half_open, 1), (slow_loris, 0.5), (mute, 0.7),
    (deaf, 1), (hostage, 0.5),
)  # fmt: skip


# ---------------------------------------------------------------- how the syncer bears it


class Vitals:
    """Samples a process from outside."""

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self._log = log
        self.rss: list[float] = []
        """MB"""
        self.files: list[int] = []
        self.log_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.point()
            self._over.wait(0.25)

    def point(self) -> None:
        with contextlib.suppress(OSError, IndexError, StopIteration):  # it has ended, or is ending: no memory is left to tell
            status = Path(f"/proc/{self._pid}/status").read_text()
            rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            self.rss.append(int(rss.split()[1]) / 1024)
            self.files.append(len(list(Path(f"/proc/{self._pid}/fd").iterdir())))
            self.log_bytes = self._log.stat().st_size

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def now() -> float:
    return time.monotonic()


assert HEADER_BYTES == 32
