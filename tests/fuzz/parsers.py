"""Everything in Atoll that reads bytes it did not write itself, with examples of what it takes and what it may raise.

A parser gets bytes. It may take them, or refuse them with one of its own exceptions; anything else that it raises is a bug, and
so is memory out of proportion to the bytes. `trees` are examples as values, which `build` turns into bytes with checksums
that fit, so that the search is not stopped at the first of them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from played_bulk import play

from atoll.chaos import load_plan
from atoll.codecs import Packet, codec
from atoll.config import Config, load
from atoll.errors import ConfigError, DataError, PlanError, TapeError, UserError
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.validity import objection
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adoption,
    Announce,
    Contribution,
    Decline,
    Envelope,
    Goodbye,
    Hello,
    Loaded,
    Message,
    Received,
    RecoveryFailed,
    Report,
    Send,
    SnapshotPart,
    Started,
    StateTransfer,
    StepDone,
    TakeTheta,
    Unit,
)  # fmt: skip
from atoll.runtime import payload as wire
from atoll.runtime.doctor.examine import examine
from atoll.runtime.loggers.wandb import log_records
from atoll.runtime.metrics import MetricsAt, scrape_answer
from atoll.runtime.syncer.places import PlaceLimits, Places
from atoll.runtime.syncer.rollback import read_request
from atoll.runtime.watch.http import HttpRefusal, parse_head
from atoll.store.durable import DurableVersions
from atoll.store.model_upload import unpack_model
from atoll.store.snapshots import begin_syncer, list_snapshots, load_learner_part, load_syncer, seal_syncer, verify, write_learner
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.store.version_file import check_version, encode_inputs, read_inputs, refers_to
from atoll.store.versions import MergeInputs, Version
from atoll.tape.cut import examine_tape
from atoll.tape.format import Gap, Header, Tape, TapeWriter
from atoll.tape.heldout import HELDOUT_FILE, points_in
from atoll.tape.tail import Tail
from atoll.transport.chunks import BulkHello, ChunkHeader, pack_chunk, pack_hello, unpack_chunk
from atoll.transport.frames import BULK, CHUNK, CONTROL, LinkLimits, Violation, frame_checksum, pack, unpack
from atoll.transport.inbox import Inbox
from atoll.transport.keys import JoinTokens, KeyPaths, check_token, load_learner, make_keys, make_token, read_token
from atoll.transport.revoked import REVOKED_FILE, Revoked
from atoll.views.index.files import IndexReader, IndexWriter
from atoll.views.index.rows import EventKind, EventRow, LaneState, LearnerBin, RoundRow

Refusals = tuple[type[Exception], ...]

CONFIG: Config = load(preset_name="decoupled", overrides={
    "learners": 2, "total_steps": 40, "protocol": {"fragments": 2, "local_steps_per_round": 4, "snapshot_interval": 5},
})  # fmt: skip
SECRET = b"s" * 32
THETA = torch.arange(6.0)


@dataclass(frozen=True)
class Parser:
    parse: Callable[[bytes], object]
    refusals: Refusals
    seeds: list[bytes] = field(default_factory=list)
    trees: list[Any] = field(default_factory=list)
    build: Callable[[Any], bytes] = msgspec.msgpack.encode


@cache
def scratch() -> Path:
    """A folder for the parsers that read files."""
    return Path(_folder.name)


_folder = tempfile.TemporaryDirectory(prefix="atoll-fuzz-")


def _file(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- the wire


def _frames(data: bytes) -> None:
    """What a link does with the frames that a peer sends, one after the other."""
    inbox = Inbox(LinkLimits(payload_bytes_max=1 << 16, queue_messages_max=64), Counter())
    for fields in msgspec.msgpack.decode(data, type=list[tuple[int, int, int, int, bytes]]):
        kind, number, at, total, body = fields
        kind, number, at, total = kind % 4, *(n % 2**64 for n in (number, at, total))
        if kind == 2:
            header = unpack_chunk(pack_chunk(ChunkHeader(number, at, total, len(body), 0)))
            if (place := inbox.claim(header, 0.0)) is not None:
                place[:] = body
                inbox.received(header)
        elif not inbox.is_full:
            inbox.message(unpack(pack((CONTROL, BULK, CHUNK, b"puls")[kind], number, at, total, [body])))
        while inbox.deliver_next() is not None:
            pass


def _bulk_stream(fields: list[tuple[int, int, int, bytes]]) -> bytes:
    """What a peer sends on a bulk connection, with checksums that fit."""
    sent = [pack_hello(BulkHello(b"s" * 16, b"k" * 32, 0))]
    for number, at, total, body in fields:
        try:
            sent += [pack_chunk(ChunkHeader(number, at, total, len(body), frame_checksum(body))), body]
        except struct.error as error:
            raise ValueError(str(error)) from None
    return b"".join(sent)


CHUNKS: list[list[tuple[int, int, int, bytes]]] = [
    [(0, 0, 6, b"abc"), (0, 3, 6, b"def"), (1, 0, 0, b""), (2, 0, 1, b"x")],
    [(1, 0, 100, bytes(64)), (0, 0, 3, b"abc"), (1, 64, 100, bytes(36))],
]


FRAMES = [
    [[0, 0, 0, 0, b"a"], [2, 0, 0, 6, b"abc"], [2, 0, 3, 6, b"def"], [1, 0, 1, 6, b"head"], [0, 1, 1, 0, b"b"]],
    [[2, 1, 0, 3, b"abc"], [2, 0, 0, 0, b""], [1, 0, 0, 0, b"x"], [1, 1, 0, 3, b"y"], [0, 0, 2, 0, b"z"]],
]
MESSAGES: list[Message] = [
    Hello((NO_VERSION,) * 2, 0, 0, True, (), 0, Reason(Why.JOINS)),
    Hello((0, 3), 4, 400, False, (Unit(0, 1),), 2, Reason(Why.RECONNECTED, "x"), 1),
    Report(1, 3, 3, 300, 3, 10**8, 0, 0, 2, (Adoption(0, 1, 2, 200, 100),), 0, 2.5),
    Contribution(1, 0, 3, 0, 1, 100, 1, 300), Decline(1, Reason(Why.OUT_OF_STEP)), Loaded(1, SYNCER, 0, (0, 0)),
    RecoveryFailed(1, Reason(Why.SOURCE_LOST)), SnapshotPart(5, None), SnapshotPart(5, Reason(Why.NOT_WRITTEN, "full")),
    Goodbye(Reason(Why.LEAVES)), Announce(1, 0, NO_VERSION, (0,)), StateTransfer(1, 3, (0, 0), ((0, 1),)),
]  # fmt: skip


def _envelope(body: Message, sender: int = 0, seq: int = 0) -> Envelope:
    return Envelope(sender, 0, SYNCER, seq, 3, body)


def _message(data: bytes) -> None:
    objection(CONFIG, wire.from_head(data).envelope)


def _to_machine(data: bytes) -> None:
    """A syncer with two learners in sync, and then whatever one of them says."""
    envelope = wire.from_head(data).envelope
    machine = SyncerMachine(CONFIG)
    machine.on(Started(0), 0)
    for learner in (0, 1):
        effects = machine.on(Received(_envelope(MESSAGES[0], learner), 0), 1)
        (take,) = [e.envelope.body for e in effects if isinstance(e, Send) and isinstance(e.envelope.body, TakeTheta)]
        machine.on(Received(_envelope(Loaded(take.ticket, SYNCER, 0, (0, 0)), learner, 1), 0), 2)
    for seq, body in ((2, Report(1, 1, 1, 100, 1, 10**8, 0, 0, 0, (), 0, 2.5)), (3, envelope.body)):
        if type(body).direction is MESSAGES[0].direction:
            size = 8 if body.lane else 0
            machine.on(Received(msgspec.structs.replace(_envelope(body, 0, seq if not body.lane else 0)), size), 10**9 * seq)
    machine.deadline()


PACKETS = [codec(name).encode(torch.randn(40, generator=torch.Generator().manual_seed(1))) for name in (
    "fp32", "bf16", "int8", "int4", "int1", "e3m0", "top_k:0.1", "random_drop:0.5",
)]  # fmt: skip


def _packet(data: bytes) -> None:
    packet = Packet.from_bytes(data)
    if packet.numel <= 1 << 16:  # the syncer compares numel with the fragment's before it decodes
        decoded = codec(packet.codec).decode(packet)
        assert decoded.numel() == packet.numel


def _payload(data: bytes) -> None:
    for body in (MESSAGES[3], MESSAGES[10]):
        wire.from_buffer(body, memoryview(data))


def _state_payload(data: bytes) -> None:
    wire.from_buffer(MESSAGES[11], memoryview(data))


def _payloads() -> list[bytes]:
    contents = [(packet, torch.zeros(2)) for packet in PACKETS[:3]] + [(THETA, torch.zeros(0))]
    return [b"".join(map(bytes, wire.to_buffers(wire.Payload("packet", 0, content)) or [])) for content in contents]


# ---------------------------------------------------------------- tensors at rest

STATES: list[Any] = [
    {"tensors": {"w": THETA}, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}},
    {"anchors": [None, (1, THETA.half())], "kept": {}, "text": "x", "flag": torch.tensor([True, False])},
]
MODEL = {
    "pattern": "blocks", "frozen": "", "params": [THETA, THETA.clone()], "buffers": [torch.zeros(0), torch.zeros(0)],
    "slots": [
        [["a", "param", 0, 6, [6], 0, 6, "torch.float32", False]], [["b", "param", 0, 2, [2, 3], 0, 6, "torch.float32", False]],
    ],
}  # fmt: skip


def _joined(state: Any) -> bytes:
    return b"".join(map(bytes, pack_state(state)))


def _raw_state(tree: list[Any]) -> bytes:
    """A safetensors file of any header, with its length right; tree: [header, structure, bytes]."""
    header, structure, data = tree
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        metadata = header["__metadata__"] | {"structure": base64.b64encode(msgspec.msgpack.encode(structure)).decode()}
        header = header | {"__metadata__": metadata}
    text = msgspec.json.encode(header)
    return len(text).to_bytes(8, "little") + text + (data if isinstance(data, bytes) else b"")


def _raw_tree(data: bytes) -> list[Any]:
    length = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + length])
    structure = msgspec.msgpack.decode(base64.b64decode(header["__metadata__"]["structure"]))
    return [header, structure, data[8 + length :]]


def _upload(data: bytes) -> None:
    unpack_model(CONFIG, memoryview(data))


VERSION_NAME = "run/versions/0000-000000000.safetensors"


def _version(data: bytes) -> None:
    path = _file(VERSION_NAME, data)
    check_version(path)
    disk = DurableVersions.open(path.parents[1])
    disk.at(0, 0)
    disk.announced(0, 0)
    disk.packet(0, 0)


def _inputs(data: bytes) -> None:
    path = _file("run/versions/0000-000000004.inputs", data)
    check_version(path)
    refers_to(path)
    read_inputs(path)


def _inputs_seed() -> bytes:
    packet = codec("int4").encode(THETA)
    inputs = MergeInputs(3, False, (1.0, 2.5), (3, 2), (packet, packet), (torch.zeros(2), torch.ones(2)), "ab")
    return b"".join(bytes(chunk) for chunk in encode_inputs(0, 1, 4, inputs)[0])


@cache
def _versions() -> Path:
    root = scratch() / "versions-of-a-run"
    packet = codec("int8").encode(THETA)
    DurableVersions.create(root, [Version(THETA, torch.zeros(2), None, {"step": torch.tensor(1.0)}, THETA.clone(), packet)])
    return root


def _version_tree(data: bytes) -> list[Any]:
    length = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + length])
    return [header, msgspec.json.decode(header["__metadata__"]["atoll"]), data[8 + length :]]


def _build_version(tree: list[Any]) -> bytes:
    """With the digest of the metadata right, and those of the tensors as they are."""
    header, metadata, data = tree
    if isinstance(header, dict):
        text = msgspec.json.encode(metadata).decode()
        header = header | {"__metadata__": {"atoll": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    encoded = msgspec.json.encode(header)
    return len(encoded).to_bytes(8, "little") + encoded + (data if isinstance(data, bytes) else b"")


# ---------------------------------------------------------------- a run's folder


def _header(worker: int = SYNCER) -> Header:
    return Header(
        config=msgspec.to_builtins(CONFIG), code_version="0", data_fingerprint="none", threads=1,
        torch_version="none", cpu_capability="none", tensors=False, run="a7", worker=worker,
    )  # fmt: skip


@cache
def _tape_bytes() -> bytes:
    path = scratch() / "seed.tape"
    with TapeWriter.create(path, _header()) as tape:
        tape.append(0, SYNCER, Started(0), ())
        for seq, body in enumerate(MESSAGES):
            event = Received(_envelope(body, 0, seq), 0)
            tape.append(seq, SYNCER, event, (Send(_envelope(body, 0, seq)),))
        tape.append_gap(Gap(tape.count + 1, tape.count + 3, "full"))
        tape.count += 3
        tape.append(99, 0, StepDone(1, 1, 1, 2.0), ())
    return path.read_bytes()


def _tape(data: bytes) -> None:
    path = _file("a.tape", data)
    condition = examine_tape(path)
    assert condition.good_bytes + condition.rest_bytes <= len(data)
    list(Tail(Tape(path)).more())
    list(Tape(path).records())


def _tape_tree() -> list[Any]:
    return [msgspec.json.decode(b"{" + line[16:]) for line in _tape_bytes().splitlines()]


def _build_tape(lines: Any) -> bytes:
    """Any lines, with their checksums right."""
    out, chain = b"", 0
    for line in lines if isinstance(lines, list) else [lines]:
        body = msgspec.json.encode(line)
        chain = zlib.crc32(body, chain)
        out += b'{"c":"%08x",' % chain + body[1:] + b"\n"
    return out


@cache
def _snapshot() -> Path:
    """A run with one snapshot."""
    run = scratch() / "with-snapshot"
    disk = DurableVersions.create(run / "syncer", [Version(THETA, torch.zeros(2), None, None, THETA, None)])
    begin_syncer(run / "syncer", 5, disk, b"{}")
    write_learner(run / "learners" / "0", 5, {"x": THETA}, b"{}", 2)
    seal_syncer(run / "syncer", 5, (0,), True, 2, run="a7", config=msgspec.to_builtins(CONFIG))
    return run


def _manifest(data: bytes, worker: str) -> None:
    run = _snapshot()
    part = run / worker / "snapshots" / "5"
    manifest = part / "manifest.json"
    before = manifest.read_bytes()
    try:
        manifest.write_bytes(data)
        list_snapshots(run)
        verify(run, 5)
        (load_syncer if worker == "syncer" else load_learner_part)(part)
    finally:
        manifest.write_bytes(before)


def _manifest_seed(worker: str) -> bytes:
    return (_snapshot() / worker / "snapshots" / "5" / "manifest.json").read_bytes()


def _places(data: bytes) -> None:
    path = _file("places/places.jsonl", data)
    Places(path.parent, "a7", JoinTokens(SECRET), PlaceLimits(16), lambda m: False, lambda m: False, Revoked(path.parent))


def _doctor(data: bytes) -> None:
    """One of a folder's files has these bytes; the doctor says so and raises nothing."""
    run = _snapshot()
    names = ("run.tape", "places.jsonl", "config.toml", "model.upload", "theta.safetensors", "token")
    path = run / "syncer" / names[len(data) % len(names)]
    path.write_bytes(data)
    try:
        examine(run)
    finally:
        path.unlink()


def _heldout(data: bytes) -> None:
    points_in(_file(f"heldout/{HELDOUT_FILE}", data).parent)


HTTP = b"GET /api/bins?from=0&to=5 HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAuthorization: Bearer x\r\n\r\n"


@cache
def _index_folder() -> Path:
    folder = scratch() / "index"
    writer = IndexWriter(folder, _header())
    for step in range(1, 6):
        writer.put_event(EventRow(step, EventKind.STANDING, 0, step, "is lost", LaneState.LOST))
        lanes = (LearnerBin(0, LaneState.TRAINING, (1, 0, 0, 0, 0, 0)),)
        writer.put_round(RoundRow(
            outer_step=step, begins_at=step - 1, opened_at=step, quorum_at=step, fixed_at=step, closed_at=step, fragments=(0,),
            participants=(0,), merged=(0,), left_out=(), why="all_reported", text="", learners=lanes,
        ))  # fmt: skip
    writer.close()
    return folder


def _index_seed() -> bytes:
    """The table, its length before it, and the rows."""
    table, rows = ((_index_folder() / f"0.{kind}").read_bytes() for kind in ("table", "rows"))
    return bytes((len(table),)) + table + rows


def _index(data: bytes) -> None:
    folder, length = _index_folder(), data[0] if data else 0
    for name in ("0", "1", "events"):
        (folder / f"{name}.table").write_bytes(data[1 : 1 + length])
        (folder / f"{name}.rows").write_bytes(data[1 + length :])
    index = IndexReader(folder)
    index.row_of(3)
    index.row_at(2)
    for read in (lambda: index.rows(0, 9), lambda: index.bins(0, 99, 1), lambda: index.events_between(0, 99, 9)):
        with suppress(TapeError):
            read()
    index.rows(1, 3)


# ---------------------------------------------------------------- secrets and settings


def _token(data: bytes) -> None:
    text = data.decode("utf8", "surrogateescape")
    assert check_token(SECRET, text, "a7") is None or isinstance(check_token(SECRET, text, "a7"), str)
    read_token(_file("token", data))


def _build_token(body: Any) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    mac = hmac.digest(SECRET, b"atoll join\0" + encoded, "sha256")
    return b"atoll1." + base64.urlsafe_b64encode(encoded + mac).rstrip(b"=")


def _revoked(data: bytes) -> None:
    Revoked(_file(f"revoked/{REVOKED_FILE}", data).parent)


def _rollback(data: bytes) -> None:
    read_request(_file("rollback.json", data))


@cache
def _keys() -> KeyPaths:
    folder = scratch() / "keys"
    make_keys(folder, learners=1)
    return KeyPaths(folder / "learner-0.pem", folder / "learner-0.key", folder / "ca.pem")


def _pem(data: bytes) -> None:
    """Each file of a learner's keys in turn."""
    good = _keys()
    bad = _file("bad.pem", data)
    for which in ("ca", "certificate", "key"):
        try:
            load_learner(good._replace(**{which: bad}))
        except UserError:
            continue


def _recipe(data: bytes) -> None:
    load(_file("recipe.toml", data))


def _plan(data: bytes) -> None:
    load_plan(str(_file("plan.toml", data)), 4)


ROLLBACK = b'{"request": "1f0c", "to": 40, "reset_optimizer": true, "reason": "the loss went up"}'
RECIPE = b'learners = 3\n[protocol]\nfragments = 4\nquorum = "all"\n[model]\nnumbers = {width = 16}\n'
SCRAPE = b"GET /metrics?x=1 HTTP/1.1\r\nHost: 127.0.0.1:9100\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n"
WANDB_LOG = b":W&B\xe1\xbe\0" + b"\0\0\0\0\x02\0\x01{}" + b"\0\0\0\0\x01\0\x02{" + b"\0\0\0\0\x01\0\x04}"


def _scrape(data: bytes) -> None:
    """An open page, and one that asks for a token."""
    for token in ("", "0123456789abcdef"):
        assert scrape_answer(data, MetricsAt("127.0.0.1:9100", token), str).startswith(b"HTTP/1.1 ")


PLAN = b'[[faults]]\nfault = "kill"\nat = 1.0\nlearner = 1\nlasts = 2.0\n'


@cache
def parsers() -> dict[str, Parser]:
    heads = [wire.to_head(_envelope(body)) for body in MESSAGES]
    head_trees = [msgspec.msgpack.decode(head) for head in heads]
    states = [_joined(state) for state in STATES]
    version = next((_versions() / "versions").iterdir()).read_bytes()
    raw = msgspec.json.decode
    return {
        "frame": Parser(unpack, (Violation,), [pack(CHUNK, 3, 5, 99, [b"body"])]),
        "bulk": Parser(play, (Violation,), [_bulk_stream(each) for each in CHUNKS], CHUNKS, _bulk_stream),
        "frames": Parser(_frames, (Violation, msgspec.MsgspecError), [], FRAMES),
        "message": Parser(_message, (DataError,), heads, head_trees),
        "machine": Parser(_to_machine, (DataError,), heads, head_trees),
        "packet": Parser(_packet, (DataError,), [packet.to_bytes() for packet in PACKETS]),
        "payload": Parser(_payload, (DataError,), _payloads()),
        "state": Parser(_state_payload, (DataError,), states, [_raw_tree(state) for state in states], _raw_state),
        "state_file": Parser(unpack_state, (DataError,), states),
        "upload": Parser(_upload, (DataError,), [_joined(MODEL)], [_raw_tree(_joined(MODEL))], _raw_state),
        "version": Parser(_version, (DataError,), [version], [_version_tree(version)], _build_version),
        "inputs": Parser(_inputs, (DataError,), [_inputs_seed()], [_version_tree(_inputs_seed())], _build_version),
        "tape": Parser(_tape, (TapeError,), [_tape_bytes()], [_tape_tree()], _build_tape),
        "syncers_manifest": Parser(lambda data: _manifest(data, "syncer"), (DataError,), [_manifest_seed("syncer")],
                                   [raw(_manifest_seed("syncer"))], msgspec.json.encode),
        "learners_manifest": Parser(lambda data: _manifest(data, "learners/0"), (DataError,), [_manifest_seed("learners/0")],
                                    [raw(_manifest_seed("learners/0"))], msgspec.json.encode),
        "places": Parser(_places, (DataError,), [b'{"learner":0,"incarnation":0}\n' * 2], [{"learner": 0, "incarnation": 1}],
                         lambda tree: msgspec.json.encode(tree) + b"\n"),
        "doctor": Parser(_doctor, (), [_tape_bytes()[:3000], RECIPE, states[0]]),
        "heldout": Parser(_heldout, (), [b'{"outer_step":3,"loss":1.5}\n'], [{"outer_step": 3, "loss": 1.5}],
                          msgspec.json.encode),
        "token": Parser(_token, (), [make_token(SECRET).encode()], [{"run": "*", "expires": None, "nonce": b"n" * 16}],
                        _build_token),
        "rollback": Parser(_rollback, (DataError,), [ROLLBACK], [msgspec.json.decode(ROLLBACK)], msgspec.json.encode),
        "revoked": Parser(_revoked, (), [b"certificate learner-3\ntoken 1f0c5a9e2b7d4c68\n# a comment\n"]),
        "pem": Parser(_pem, (), [_keys().ca.read_bytes(), _keys().key.read_bytes()]),
        "index": Parser(_index, (TapeError,), [_index_seed()]),
        "http": Parser(parse_head, (HttpRefusal,), [HTTP]),
        "recipe": Parser(_recipe, (ConfigError,), [RECIPE]),
        "plan": Parser(_plan, (PlanError,), [PLAN]),
        "scrape": Parser(_scrape, (), [SCRAPE, SCRAPE.replace(b"/metrics", b"/").replace(b"127.0.0.1:9100", b"[::1]")]),
        "wandb_log": Parser(lambda data: list(log_records(data)), (), [WANDB_LOG]),
    }  # fmt: skip
