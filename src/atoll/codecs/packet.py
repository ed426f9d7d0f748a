"""A packet: a tensor's codes and scales, and their exact bytes.

    offset  size  field
    0       4     magic "ATPK"
    4       1     version, 1
    5       1     length of the codec's name
    6       n     the codec's name, ASCII
    6+n     8     numel, unsigned
    14+n    ...   codes, then scales; their sizes follow from name and numel

All fields are little-endian. There are no lengths that could contradict each other: name and numel determine the size of the
payload, and any other size is refused.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from typing import Final

import numpy
import torch
from torch import Tensor

from atoll.codecs.layout import CodeLayout, layout
from atoll.codecs.short_indices import indices_rise
from atoll.config.codecs import codec_spec
from atoll.errors import ConfigError, DataError

MAGIC: Final = b"ATPK"
VERSION: Final = 1
_PREFIX: Final = struct.Struct("<4sBB")
_NUMEL: Final = struct.Struct("<Q")
NUMEL_MAX: Final = 2**40
"""4 TiB of fp32. A hostile numel must not cause large sizes in the arithmetic."""
SMALL: Final = 1 << 14

# Tensors are copied byte by byte from memory. A big-endian host would write other bytes for the same packet.
assert sys.byteorder == "little", "Atoll's packets are written on little-endian machines only"


@dataclass(frozen=True, slots=True)
class Packet:
    codec: str
    numel: int
    codes: Tensor
    scales: Tensor | None

    @property
    def nbytes(self) -> int:
        """The payload: codes and scales, without the header."""
        return sum(part.numel() * part.element_size() for part in self._parts())

    def to_bytes(self) -> bytes:
        name = self.codec.encode("ascii")
        header = _PREFIX.pack(MAGIC, VERSION, len(name)) + name + _NUMEL.pack(self.numel)
        data = bytearray(len(header) + self.nbytes)
        data[: len(header)] = header
        at = len(header)
        for part in self._parts():
            size = part.numel() * part.element_size()
            if size:
                target = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
                target.copy_(part.detach().contiguous().view(torch.uint8))
            at += size
        return bytes(data)

    @staticmethod
    def from_bytes(data: bytes | memoryview, *, owned: bool = False) -> Packet:
        """`owned`: nobody else writes to `data`, which this packet may keep: what is aligned in it is not copied."""
        view = memoryview(data).cast("B")
        name, numel, at = _read_header(view)
        shape = _expected(name, numel)
        if len(view) - at != shape.nbytes:
            kind = "truncated" if len(view) - at < shape.nbytes else "oversized"
            raise DataError(
                f"packet is {kind}: {numel} elements of {name} take {shape.nbytes} payload bytes, not {len(view) - at}"
            )
        codes = _tensor(view, at, shape.code_dtype, shape.codes, owned=owned)
        at += shape.codes * shape.code_dtype.itemsize
        scales = None if shape.scales is None else _tensor(view, at, torch.float32, shape.scales, owned=owned)
        _refuse_bad_content(name, numel, codes, scales)
        return Packet(name, numel, codes, scales)

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)


def _read_header(view: memoryview) -> tuple[str, int, int]:
    if len(view) < _PREFIX.size:
        raise DataError(f"packet is truncated: {len(view)} bytes are shorter than a header")
    magic, version, name_length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise DataError(f"packet starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"packet has version {version}; this Atoll reads version {VERSION}")
    end = _PREFIX.size + name_length + _NUMEL.size
    if len(view) < end:
        raise DataError(f"packet is truncated: {len(view)} bytes, the header alone takes {end}")
    name = bytes(view[_PREFIX.size : _PREFIX.size + name_length]).decode("ascii", errors="replace")
    (numel,) = _NUMEL.unpack_from(view, _PREFIX.size + name_length)
    if numel > NUMEL_MAX:
        raise DataError(f"packet claims {numel} elements; at most {NUMEL_MAX} are read")
    return name, numel, end


def _expected(name: str, numel: int) -> CodeLayout:
    try:
        return layout(name, numel)
    except ConfigError as error:
        raise DataError(f"packet names an unknown codec: {error}") from error


def _tensor(view: memoryview, at: int, dtype: torch.dtype, count: int, *, owned: bool) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    part = numpy.frombuffer(view, dtype=numpy.uint8, count=count * dtype.itemsize, offset=at)
    # A header of odd size leaves the payload misaligned, and torch wants to be able to write. numpy copies without the
    # interpreter's lock, which a learner's training thread needs meanwhile.
    if not owned or not part.flags.writeable:
        part = part.copy()
    found = torch.from_numpy(part)
    if found.data_ptr() % dtype.itemsize:
        found = torch.from_numpy(part.copy())
    return found.view(dtype)


def _extremes(part: Tensor) -> tuple[float, float]:
    """The least and the greatest value, or NaN if there is one."""
    if part.dtype is torch.float32 and part.numel() <= SMALL:  # a call of torch costs more than the few values
        numbers = part.numpy()
        return float(numbers.min()), float(numbers.max())
    low, high = torch.aminmax(part)
    return float(low), float(high)


def _refuse_bad_content(name: str, numel: int, codes: Tensor, scales: Tensor | None) -> None:
    """For any bytes that pass, codes and scales are finite and all indices are inside the tensor. A scale near the largest float
    still decodes to Inf where an honest packet has no such code: whoever decodes a peer's packet looks at the result."""
    for part in (codes, scales):
        if part is not None and part.is_floating_point() and part.numel():
            low, high = _extremes(part)
            if not (math.isfinite(low) and math.isfinite(high)):
                raise DataError(f"packet of {name} holds NaN or Inf")
    if codec_spec(name).kind == "chunks" and not indices_rise(name, numel, codes):
        raise DataError(f"packet of {name} holds indices that are not rising inside their chunks")
    if codec_spec(name).kind == "sparse" and codes.numel():
        # Strictly rising also excludes a repeated index, which would add one element twice.
        rising = codes.numel() == 1 or bool((codes[1:] > codes[:-1]).all())
        if not rising or int(codes[0]) < 0 or int(codes[-1]) >= numel:
            raise DataError(f"packet of {name} holds indices that are not rising inside 0..{numel - 1}")
