"""Nested values with tensors, as bytes and as files. They contain no code; safetensors' own tools can read them too.

    offset  size  field
    0       8     n: length of the header, unsigned, little-endian
    8       n     JSON: {"__metadata__": {key: text}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    8+n     ...   the tensors' bytes, one after the other, without gaps or trailing bytes

A learner's state has metadata `format` and `structure`: msgpack in base64, the nested value with each tensor replaced by
its name. A container is an array that starts with a letter, because msgpack has no tuples and no integer keys:
["l", ...] a list, ["t", ...] a tuple, ["d", key, value, ...] a dict, ["T", name] a tensor. A tensor that occurs in several
places is written once, and is one tensor again when read.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import errno
import hashlib
import io
import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from atoll.errors import UNDECODABLE, ConfigError, DataError, RunFailed
from atoll.tensors.local import local_value

FORMAT: Final = "atoll-state-1"
HEADER_MAX: Final = 64 * 2**20
"""Room for half a million tensors. It bounds what a peer's bytes can make the decoder allocate."""
DEPTH_MAX: Final = 32
ELEMENTS_MAX: Final = 2**48
"""A shape with a 0 has no bytes; without this bound its other sizes could overflow torch's strides."""
PARTIAL: Final = ".partial"
GENTLE_BYTES: Final = 32 * 2**20
ALLOWED: Final = "tensors, numbers, text, None, lists, tuples and dicts with integer or text keys"

_DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

ByteChunk: TypeAlias = bytes | memoryview
_Natural = Annotated[int, msgspec.Meta(ge=0)]

# Tensors are written in the byte order of memory.
assert sys.byteorder == "little", "Atoll's files are written on little-endian machines only"


NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
"""The process, or the whole machine, has no descriptor left for one more open file."""


class StorageFailed(RunFailed):
    """The bytes could not be written, or a file could not be opened because too many are open. What was stored before is
    unchanged, and the call may be repeated."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in a header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


# ---------------------------------------------------------------- nested values


def flatten(value: Any, root: str) -> tuple[bytes, dict[str, Tensor]]:
    """The structure, and the tensors by name, which is their path below `root`. Nothing is copied."""
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[object, ...], str] = {}

    def node(value: Any, path: str, depth: int) -> Any:
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int and -(2**63) <= value < 2**64:
            return value
        if depth == DEPTH_MAX:
            raise ConfigError(f"{path} is nested deeper than {DEPTH_MAX} levels")
        if type(value) in (list, tuple):
            items = [node(item, f"{path}/{at}", depth + 1) for at, item in enumerate(value)]
            return ["l" if type(value) is list else "t", *items]
        if type(value) is dict:
            flat: list[Any] = ["d"]
            for key, item in value.items():
                if type(key) not in (int, str):
                    raise ConfigError(f"{path} has a key {key!r} of type {type(key).__name__}: allowed are {ALLOWED}")
                flat += [key, node(item, f"{path}/{key}", depth + 1)]
            return flat
        if type(value) in (Tensor, nn.Parameter):
            return ["T", named(value, path)]
        raise ConfigError(f"{path} is of type {type(value).__name__}: allowed are {ALLOWED}")

    def named(tensor: Tensor, path: str) -> str:
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise ConfigError(f"{path} is a tensor of {tensor.dtype}, {tensor.layout}, {tensor.device}: it cannot be stored")
        # Two views with the same address, shape and strides are one tensor. Empty ones have no address.
        where = tensor.data_ptr() if tensor.numel() else id(tensor)
        key = (tensor.device, where, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in known:
            name = path if path not in tensors else f"{path}#{len(tensors)}"  # keys 0 and "0" look alike in a path
            known[key], tensors[name] = name, tensor
        return known[key]

    try:
        structure = msgspec.msgpack.encode(node(value, root, 0))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{root} holds text that is not Unicode: {error}") from None
    return structure, tensors


def rebuild(structure: bytes, tensors: dict[str, Tensor], what: str) -> Any:
    """The value that was flattened; DataError for bytes that `flatten` did not make."""
    try:
        return _rebuild_node(msgspec.msgpack.decode(structure), tensors, 0)
    except (*UNDECODABLE, _Malformed, TypeError) as error:
        raise DataError(f"{what}: its structure is damaged: {error}") from None


class _Malformed(Exception):
    pass


def _rebuild_node(node: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is not list or not node or type(node[0]) is not str or depth == DEPTH_MAX:
        raise _Malformed(f"a {type(node).__name__} at depth {depth}")
    match node[0]:
        case "l":
            return [_rebuild_node(item, tensors, depth + 1) for item in node[1:]]
        case "t":
            return tuple([_rebuild_node(item, tensors, depth + 1) for item in node[1:]])
        case "d" if len(node) % 2 == 1:
            keys = node[1::2]
            if not all(type(key) in (int, str) for key in keys) or len(set(keys)) != len(keys):
                raise _Malformed("a dict's keys")
            return {key: _rebuild_node(item, tensors, depth + 1) for key, item in zip(keys, node[2::2], strict=True)}
        case "T" if len(node) == 2 and type(node[1]) is str and node[1] in tensors:
            return tensors[node[1]]
    raise _Malformed(f"a node {node[0][:20]!r} of {len(node)}")


# ---------------------------------------------------------------- tensors as bytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory if it is contiguous and on the CPU, otherwise that of a copy."""
    flat: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def tensor_chunks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> list[ByteChunk]:
    """Header and tensors. The chunks alias the tensors: write them before a tensor changes."""
    header, ordered = tensor_header(tensors, metadata)
    return [header, *(tensor_bytes(tensor) for tensor in ordered if tensor.numel())]


def tensor_header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, list[Tensor]]:
    """The first chunk, and the tensors in the order of their bytes. Of a tensor only its shape and dtype are looked at."""
    # Wide elements first, as in the safetensors library, so that every tensor is aligned in the file.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape), (start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_MAX:
        raise ConfigError(f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {HEADER_MAX} are allowed")
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


class _View(io.RawIOBase):
    """Bytes in memory as a stream, without the copy that BytesIO makes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readinto(self, target: Any, /) -> int:
        count = min(len(target), len(self._data) - self._at)
        target[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count


def fill(stream: io.RawIOBase, target: memoryview, what: str) -> None:
    while len(target):
        count = stream.readinto(target)
        if not count:
            raise DataError(f"{what} is truncated: {len(target)} more bytes were expected")
        target = target[count:]


def read_header(stream: io.RawIOBase, size: int, what: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries in the order of their bytes, and metadata. Lengths are checked before memory is allocated for them."""
    prefix = bytearray(8)
    fill(stream, memoryview(prefix), what)
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_MAX, size - 8):
        raise DataError(f"{what} is truncated or not a safetensors file: a header of {length} bytes in {size}")
    text = bytearray(length)
    fill(stream, memoryview(text), what)
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in parts.items()}
    except UNDECODABLE as error:
        raise DataError(f"{what}: the header is not a safetensors header: {error}") from None
    ordered = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    at = 0
    for name, entry in ordered.items():
        start, end = entry.data_offsets
        if entry.dtype not in _DTYPES or len(entry.shape) > 32 or math.prod(max(1, n) for n in entry.shape) > ELEMENTS_MAX:
            raise DataError(f"{what}: tensor {name[:80]!r} has a dtype or shape this Atoll does not read")
        if start != at or end - start != math.prod(entry.shape) * entry.torch_dtype.itemsize:
            raise DataError(f"{what}: tensor {name[:80]!r} has offsets that do not match its shape or its neighbours")
        at = end
    expected = 8 + length + at
    if expected != size:
        raise DataError(f"{what} is {'truncated' if expected > size else 'oversized'}: {size} bytes, not {expected}")
    return ordered, metadata


def read_tensor(stream: io.RawIOBase, entry: TensorEntry, what: str) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
    fill_tensor(stream, tensor, what)
    return tensor


def fill_tensor(stream: io.RawIOBase, tensor: Tensor, what: str) -> None:
    if tensor.numel():
        fill(stream, tensor_bytes(tensor), what)
        if tensor.dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
            raise DataError(f"{what}: a bool that is neither 0 nor 1")  # undefined behaviour in torch's kernels


# ---------------------------------------------------------------- a learner's state


def pack_state(state: Any) -> list[ByteChunk]:
    """For the wire and for files. The chunks alias the state's tensors (on the CPU) and copy nothing; they must be written
    before the state changes."""
    header, ordered = state_header(state)
    return [header, *(tensor_bytes(tensor) for tensor in ordered if tensor.numel())]


def state_header(state: Any) -> tuple[bytes, list[Tensor]]:
    """The first chunk, and the state's tensors in the order of their bytes, which need not be there yet."""
    structure, tensors = flatten(state, "state")
    return tensor_header(tensors, {"format": FORMAT, "structure": base64.b64encode(structure).decode("ascii")})


def unpack_state(data: bytes | bytearray | memoryview, what: str = "state", *, shared: bool = False) -> Any:
    """The value with tensors of its own: `data` is copied once and may be freed. `shared`: they are views of `data`, which can be
    written to. DataError for bytes that `pack_state` did not make."""
    view = memoryview(data).cast("B")
    return _read(_View(view), len(view), what, view if shared else None)


def _read(stream: io.RawIOBase, size: int, what: str, pages: Any = None) -> Any:
    entries, metadata = read_header(stream, size, what)
    if metadata.get("format") != FORMAT:
        raise DataError(f"{what} has format {metadata.get('format', '')[:40]!r}; this Atoll reads {FORMAT!r}")
    if pages is not None:
        tensors = _views(pages, entries, size)
    else:
        tensors = {name: read_tensor(stream, entry, what) for name, entry in entries.items()}
    return rebuild(from_base64(metadata.get("structure", ""), what), tensors, what)


def _views(pages: Any, entries: dict[str, TensorEntry], size: int) -> dict[str, Tensor]:
    start = size - max((entry.data_offsets[1] for entry in entries.values()), default=0)
    tensors = {}
    for name, entry in entries.items():
        count, dtype = math.prod(entry.shape), entry.torch_dtype
        at = start + entry.data_offsets[0]
        if at % dtype.itemsize and count:  # no file of ours; a peer's bytes may be anything
            flat = torch.frombuffer(pages, dtype=torch.uint8, count=count * dtype.itemsize, offset=at).clone().view(dtype)
        else:
            flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(entry.shape)
    return tensors


def from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise DataError(f"{what}: its structure is not base64: {error}") from None


def refuse_unserialisable(optimizer: torch.optim.Optimizer) -> None:
    """State that is not plain data cannot be sent to a peer or stored in a snapshot. The check covers what the optimiser holds
    now: call it at start for the groups, and after the first step for the state, which torch creates then."""
    try:
        flatten(local_value(optimizer.state_dict()), "state_dict()")
    except ConfigError as error:
        raise ConfigError(f"inner optimizer {type(optimizer).__name__} cannot be stored or sent: {error}") from None


def use_plain_floats(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler that computes with numpy leaves numpy floats behind, which messages and files cannot carry."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, float) and type(value) is not float:
                group[key] = float(value)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict` with dtypes and strides as if the state had been created here. torch casts state to its parameter's
    dtype, which rounds the fp32 master weights of a bf16 parameter. And stored bytes have no strides: the moments of a
    channels_last parameter arrive contiguous, while fused kernels walk both in raw memory order. Nothing is shared with
    `saved`, which may be a peer's."""
    optimizer.load_state_dict(copy.deepcopy(saved))
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(parameter, optimizer.state[parameter], saved["state"][number])


def load_moments(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """The same with a peer's state alone: learning rate, betas and all other options stay the optimiser's own, and the same
    objects, as a scheduler may hold them."""
    chosen = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    load_optimizer(optimizer, {"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, own in zip(optimizer.param_groups, chosen, strict=True):
        group.update(own)


def _as_saved(parameter: Tensor, loaded: Any, saved: Any) -> Any:
    """A parameter's loaded state with the dtypes of `saved`; a tensor of the parameter's shape gets its strides too."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.shape == parameter.shape and loaded.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=saved.dtype, device=loaded.device, requires_grad=False).copy_(saved)
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys() - {"step"}:  # stays as torch made it: fp32, maybe on the host
            loaded[key] = _as_saved(parameter, loaded[key], saved[key])
    elif isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(parameter, *pair) for pair in zip(loaded, saved, strict=True))
    return saved if isinstance(saved, str) else loaded  # torch turns a str into the repr of a generator


def write_state(path: Path, state: Any) -> str:
    """Write atomically and durably; returns the SHA-256 of the file."""
    chunks = pack_state(state)
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(chunk)
    write_file(path, chunks)
    return sha.hexdigest()


def read_state(path: Path, sha256: str | None = None, *, mapped: bool = False) -> Any:
    """`mapped`: its tensors are pages of the file, which take memory only while they are used."""

    def read(stream: io.RawIOBase, size: int) -> Any:
        if sha256 is not None:
            # Two passes over the file, the second from the page cache: cheaper than a copy of the state in memory.
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                raise DataError(f"{path} is damaged: its SHA-256 is not {sha256}")
            stream.seek(0)
        # Of a private mapping: what is written to the tensors stays in this process.
        return _read(stream, size, str(path), mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else None)

    return read_with(path, read)


# ---------------------------------------------------------------- files


def read_with(path: Path, use: Callable[[io.RawIOBase, int], Any]) -> Any:
    """`use(stream, size)` on a file; DataError names a file that is missing or cannot be read, StorageFailed one that cannot be
    opened now."""
    try:
        with path.open("rb", buffering=0) as stream:
            return use(stream, os.fstat(stream.fileno()).st_size)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise StorageFailed(f"{path} cannot be opened: {error.strerror}") from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def write_file(path: Path, chunks: Sequence[ByteChunk]) -> None:
    """All or nothing, and on the disk when it returns."""
    publish_file(stage(path, chunks), path)


def publish_file(synced: Path, path: Path) -> None:
    """Give a file that was synced its final name, durably. It is deleted if that fails."""
    try:
        os.replace(synced, path)
        sync_directory(path.parent)
    except OSError as error:
        discard(synced)
        raise storage_failed(path, 0, error) from error


def temporary_name(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def padded_header(header: ByteChunk, size: int) -> bytes | None:
    """The first chunk of `tensor_chunks`, so long that tensors begin at `size`. None if it is longer."""
    text = bytes(header[8:])
    if len(text) > size - 8 or size - 8 > HEADER_MAX:
        return None
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def write_at_start(staged: Path, data: bytes) -> None:
    """Of a file that `stage` wrote from an offset on; synced when it returns."""
    try:
        handle = os.open(staged, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_chunk(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        discard(staged)
        raise storage_failed(staged, len(data), error) from error


class OldFiles(Protocol):
    def take(self, temporary: Path, size: int) -> int | None:
        """A descriptor of an old file, now of this name, to write over; None: a new file is made."""
        ...


def stage(
    path: Path, chunks: Sequence[ByteChunk], *, gently: bool = False, at: int = 0, over: OldFiles | None = None
) -> Path:
    """Write and sync under a temporary name beside `path`; the caller renames it. `gently` syncs every few megabytes: what
    another thread syncs meanwhile does not wait for gigabytes. `at`: so many bytes at the start are left for later. `over`: where
    there may be a file to write over."""
    temporary, size = temporary_name(path), at + sum(map(len, chunks))
    try:
        handle = over.take(temporary, size) if over is not None else None
        if handle is None:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.lseek(handle, at, os.SEEK_SET)
            for chunk in chunks:
                _write_chunk(handle, chunk, gently=gently)
            os.ftruncate(handle, size)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        discard(temporary)
        raise storage_failed(path, sum(map(len, chunks)), error) from error
    return temporary


def _write_chunk(handle: int, chunk: ByteChunk, *, gently: bool = False) -> None:
    rest = memoryview(chunk)
    while len(rest):
        count = os.write(handle, rest[: GENTLE_BYTES if gently else 2**30])
        if not count:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        rest = rest[count:]
        if gently:
            os.fsync(handle)


def storage_failed(path: Path, size: int, error: OSError) -> StorageFailed:
    return StorageFailed(f"{path}: {size} bytes were needed and {free_bytes(path.parent)} are free: {error.strerror or error}")


def sync_directory(directory: Path) -> None:
    """A rename is durable only after its directory is synced."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_cached(stream: io.RawIOBase) -> None:
    """What is read next comes from the disk and not from memory, where the system knows how. For a file that was synced."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def discard(path: Path) -> None:
    """Delete the file if it exists. If even that fails, the next start deletes it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def free_bytes(directory: Path) -> int:
    """Free bytes on the disk of `directory`; 0 if unknown."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0
