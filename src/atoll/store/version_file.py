"""One file of the syncer's store: a version of a fragment, or the inputs from which it was merged.

    versions/0003-000000042.safetensors    fragment 3 as of outer step 42, whole

    theta, buffers                    always
    announced                         where it is another tensor object than theta, even an equal one: a merge compares them
    outer.momentum, outer.pending, outer.average   where the outer optimiser has them
    packet.codes, packet.scales       where announcements are differences
    inner/...                         the inner optimiser's tensors, data-parallel only

    versions/0003-000000042.inputs         its inputs: N.codes, N.scales and N.buffers of the N-th contribution merged

Metadata `atoll` is JSON: fragment and version, counts, and the xxh3-128 of each tensor with its name; metadata `sha256` is the
SHA-256 of that JSON. So one digest covers the whole file, and a single tensor can be read and checked by itself. xxh3 finds
damage, not malice, at the speed of memory: SHA-256 of these tensors took longer than a merge. The metadata of inputs has the
checksum of the result too: merging again must give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import torch
import xxhash
from torch import Tensor

from atoll.codecs import Packet
from atoll.errors import UNDECODABLE, DataError
from atoll.ids import FragmentId, OuterStep
from atoll.store import tensor_files as state
from atoll.store.tensor_files import ByteChunk, TensorEntry
from atoll.store.versions import MergeInputs, Met, Version
from atoll.tensors.outer import OuterState

FOLDER: Final = "versions"
FORMAT: Final = "atoll-version-2"
INPUTS_FORMAT: Final = "atoll-inputs-1"
WHOLE: Final = "safetensors"
INPUTS: Final = "inputs"
FILE_NAME: Final = re.compile(rf"(\d{{4,}})-(\d{{9,}})\.({WHOLE}|{INPUTS})")
AT_ONCE_BYTES: Final = 4 << 20
READS_AT_ONCE: Final = min(4, os.cpu_count() or 1)
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    fragment: _Natural
    fragments: _Natural
    version: _Natural
    outer_count: _Natural | None
    codec: str | None
    numel: _Natural | None
    """Number of elements that the packet encodes."""
    inner: str | None
    digests: dict[str, str]


class _InputsMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    fragment: _Natural
    fragments: _Natural
    version: _Natural
    previous: _Natural
    plain_average: bool
    weights: tuple[float, ...]
    anchors: tuple[_Natural, ...]
    codecs: tuple[str, ...]
    numel: _Natural
    result: str
    """xxh3-128 of Theta and buffers after the merge."""
    digests: dict[str, str]
    met: Met = ()


_AnyMetadata: TypeAlias = _Metadata | _InputsMetadata


def file_name(p: FragmentId, v: OuterStep, kind: str = WHOLE) -> str:
    return f"{p:04d}-{v:09d}.{kind}"


# ---------------------------------------------------------------- writing


def encode_version(p: FragmentId, fragments: int, v: OuterStep, version: Version) -> tuple[list[ByteChunk], str]:
    tensors = {"theta": version.theta, "buffers": version.buffers}
    if version.announced is not version.theta:
        tensors["announced"] = version.announced
    outer, packet = version.outer, version.packet
    if outer is not None:
        kept = (("momentum", outer.momentum), ("pending", outer.pending), ("average", outer.average))
        tensors |= {f"outer.{name}": tensor for name, tensor in kept if tensor is not None}
    if packet is not None:
        tensors |= {f"packet.{n}": t for n, t in (("codes", packet.codes), ("scales", packet.scales)) if t is not None}
    inner = None
    if version.inner is not None:
        structure, more = state.flatten(version.inner, "inner")
        inner = base64.b64encode(structure).decode("ascii")
        tensors |= more
    metadata = _Metadata(
        FORMAT, p, fragments, v, outer.count if outer else None, packet.codec if packet else None,
        packet.numel if packet else None, inner, _digests(tensors),
    )  # fmt: skip
    return _chunks(metadata, tensors)


def encode_inputs(
    p: FragmentId, fragments: int, v: OuterStep, inputs: MergeInputs, digests: Mapping[str, str] | None = None
) -> tuple[list[ByteChunk], str]:
    """`digests`: what `input_digests` gave, where it was asked before."""
    assert inputs.result, "inputs are stored once they are merged"
    tensors = _input_tensors(inputs)
    metadata = _InputsMetadata(
        INPUTS_FORMAT, p, fragments, v, inputs.previous, inputs.plain_average, inputs.weights, inputs.anchors,
        tuple(packet.codec for packet in inputs.packets), inputs.packets[0].numel, inputs.result,
        _digests(tensors) if digests is None else dict(digests), inputs.met,
    )  # fmt: skip
    return _chunks(metadata, tensors)


def input_digests(inputs: MergeInputs) -> dict[str, str]:
    return _digests(_input_tensors(inputs))


def _input_tensors(inputs: MergeInputs) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, (packet, buffers) in enumerate(zip(inputs.packets, inputs.buffers, strict=True)):
        tensors |= {f"{index}.codes": packet.codes, f"{index}.buffers": buffers}
        tensors |= {f"{index}.scales": packet.scales} if packet.scales is not None else {}
    return tensors


def _chunks(metadata: _AnyMetadata, tensors: dict[str, Tensor]) -> tuple[list[ByteChunk], str]:
    text = msgspec.json.encode(metadata)
    root = hashlib.sha256(text).hexdigest()
    return state.tensor_chunks(tensors, {"atoll": text.decode(), "sha256": root}), root


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: _tensor_xxh3(name, tensor) for name, tensor in sorted(tensors.items())}


def _tensor_xxh3(name: str, tensor: Tensor) -> str:
    xxh = xxhash.xxh3_128(_label(name, tensor.dtype, tuple(tensor.shape)))
    xxh.update(state.tensor_bytes(tensor))
    return str(xxh.hexdigest())


def _label(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype} {shape} ".encode()


# ---------------------------------------------------------------- reading


def read_metadata(path: Path) -> _AnyMetadata:
    """From its header alone."""
    found: _AnyMetadata = state.read_with(path, lambda stream, size: _read_metadata(stream, size, path)[0])
    return found


def refers_to(path: Path) -> tuple[OuterStep, tuple[OuterStep, ...]]:
    """Of inputs: the version before, and the anchors."""
    metadata = read_metadata(path)
    assert isinstance(metadata, _InputsMetadata)
    return metadata.previous, metadata.anchors


def version_sha256(path: Path) -> str:
    """The digest that covers the file, read from its header alone."""
    return str(state.read_with(path, lambda stream, size: _read_metadata(stream, size, path)[2]))


def check_version(path: Path) -> str:
    """The same digest, after checking every byte through a small buffer. DataError names the file and the tensor."""

    def use(stream: io.RawIOBase, size: int) -> str:
        metadata, entries, root = _read_metadata(stream, size, path)
        buffer = memoryview(bytearray(2**20))
        for name, entry in entries.items():
            xxh = xxhash.xxh3_128(_label(name, entry.torch_dtype, entry.shape))
            left = entry.data_offsets[1] - entry.data_offsets[0]
            while left:
                part = buffer[: min(left, len(buffer))]
                state.fill(stream, part, str(path))
                xxh.update(part)
                left -= len(part)
            _require_digest(path, name, xxh.hexdigest(), metadata)
        return root

    return str(state.read_with(path, use))


def read_packet(path: Path) -> Packet | None:
    metadata, tensors = _load(path, lambda name: name.startswith("packet."))
    assert isinstance(metadata, _Metadata)
    return _packet(metadata, tensors)


def read_announced(path: Path) -> Tensor:
    _, tensors = _load(path, lambda name: name == "announced")
    return tensors["announced"] if tensors else read_theta(path)[0]


def read_theta(path: Path) -> tuple[Tensor, Tensor]:
    _, tensors = _load(path, lambda name: name in ("theta", "buffers"))
    return _required(path, tensors, "theta"), _required(path, tensors, "buffers")


def read_version(path: Path, *, packet: bool = True) -> Version:
    metadata, tensors = _load(path, lambda name: packet or not name.startswith("packet."))
    assert isinstance(metadata, _Metadata)
    theta, buffers = _required(path, tensors, "theta"), _required(path, tensors, "buffers")
    outer = inner = None
    if metadata.outer_count is not None:
        momentum, pending, average = (tensors.get(f"outer.{name}") for name in ("momentum", "pending", "average"))
        outer = OuterState(momentum, pending, metadata.outer_count, average)
    if metadata.inner is not None:
        inner = state.rebuild(state.from_base64(metadata.inner, str(path)), tensors, str(path))
    return Version(theta, buffers, outer, inner, tensors.get("announced", theta), _packet(metadata, tensors))


def read_inputs(path: Path) -> MergeInputs:
    metadata, tensors = _load(path, lambda name: True)
    assert isinstance(metadata, _InputsMetadata)
    count = range(len(metadata.weights))
    if not count or not len(metadata.anchors) == len(metadata.codecs) == len(metadata.weights):
        raise DataError(f"{path} was not written by this Atoll: its counts of contributions differ")
    packets = tuple(
        Packet(metadata.codecs[i], metadata.numel, _required(path, tensors, f"{i}.codes"), tensors.get(f"{i}.scales"))
        for i in count
    )
    buffers = tuple(_required(path, tensors, f"{i}.buffers") for i in count)
    return MergeInputs(
        metadata.previous, metadata.plain_average, metadata.weights, metadata.anchors, packets, buffers, metadata.result,
        metadata.met,
    )  # fmt: skip


def _read_metadata(stream: io.RawIOBase, size: int, path: Path) -> tuple[_AnyMetadata, dict[str, TensorEntry], str]:
    entries, header = state.read_header(stream, size, str(path))
    text, root = header.get("atoll", ""), header.get("sha256", "")
    if hashlib.sha256(text.encode()).hexdigest() != root:
        raise DataError(f"{path} is damaged, or not a version of a fragment: the SHA-256 of its metadata is wrong")
    whole = path.suffix != f".{INPUTS}"
    expected = FORMAT if whole else INPUTS_FORMAT
    try:
        metadata: _AnyMetadata = msgspec.json.decode(text, type=_Metadata) if whole else _decode_inputs(text)
    except UNDECODABLE as error:
        raise DataError(f"{path} was not written by this Atoll: {error}") from None
    if metadata.format != expected or set(metadata.digests) != set(entries):
        raise DataError(f"{path} has format {metadata.format!r}; this Atoll reads {expected!r}")
    if isinstance(metadata, _InputsMetadata) and max(metadata.previous, *metadata.anchors, 0) >= metadata.version:
        raise DataError(f"{path} was not written by this Atoll: it is merged from a version that came after it")
    if path.name != file_name(metadata.fragment, metadata.version, WHOLE if whole else INPUTS):
        raise DataError(f"{path} holds version {metadata.version} of fragment {metadata.fragment}: its name is another file's")
    return metadata, entries, root


def _decode_inputs(text: str) -> _InputsMetadata:
    return msgspec.json.decode(text, type=_InputsMetadata)


def _load(path: Path, wanted: Callable[[str], bool]) -> tuple[_AnyMetadata, dict[str, Tensor]]:
    """The wanted tensors, each checked; large ones at once, for a core copies and checks about two gigabytes a second. Memory is
    taken in the caller's thread, which will free it (`DurableVersions.create` says why)."""

    def use(stream: io.RawIOBase, size: int) -> tuple[_AnyMetadata, dict[str, Tensor]]:
        metadata, entries, _ = _read_metadata(stream, size, path)
        start = stream.tell()
        chosen = {name: entry for name, entry in entries.items() if wanted(name)}
        tensors = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in chosen.items()}

        def read(name: str) -> None:
            entry, tensor = chosen[name], tensors[name]
            with path.open("rb", buffering=0) as own:
                own.seek(start + entry.data_offsets[0])
                state.fill_tensor(own, tensor, str(path))
            _require_digest(path, name, _tensor_xxh3(name, tensor), metadata)

        large = [name for name, tensor in tensors.items() if tensor.nbytes >= AT_ONCE_BYTES]
        with ThreadPoolExecutor(READS_AT_ONCE, "reads") as pool:
            reading = [pool.submit(read, name) for name in large[1:]]
            for name in sorted(tensors.keys() - set(large[1:]), key=lambda name: chosen[name].data_offsets):
                read(name)
            for each in reading:
                each.result()
        return metadata, tensors

    loaded: tuple[_AnyMetadata, dict[str, Tensor]] = state.read_with(path, use)
    return loaded


def _require_digest(path: Path, name: str, found: str, metadata: _AnyMetadata) -> None:
    if found != metadata.digests[name]:
        raise DataError(f"{path} is damaged: the checksum of tensor {name} is wrong")


def _required(path: Path, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise DataError(f"{path} was not written by this Atoll: tensor {name!r} is missing")
    return tensors[name]


def _packet(metadata: _Metadata, tensors: Mapping[str, Tensor]) -> Packet | None:
    if metadata.codec is None or metadata.numel is None or "packet.codes" not in tensors:
        return None
    return Packet(metadata.codec, metadata.numel, tensors["packet.codes"], tensors.get("packet.scales"))
