"""Files compressed with xz, gz or zst, opened as streams; and imports of optional packages."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from atoll.errors import DataError

PACKED: Final = (".xz", ".gz", ".zst")
_BLOCK: Final = 1 << 17
_ZST_BLOCK: Final = 1 << 14
"""Smaller, because one block may expand to thousands of times its size."""
_ZST_WINDOW_LOG: Final = 31
"""The maximum (`zstd --long=31`). zstd's default of 128 MB protects readers of untrusted files; these are the user's own."""


def relative_path_note(path: Path) -> str:
    """Addition to an error about a missing file: most often the command was started in another folder."""
    at_home = str(path).startswith("~")
    return "" if path.is_absolute() or at_home else " (a relative path counts from the current folder)"


def expand_home(path: str, key: str, right: str = "write the path out") -> Path:
    """The path with a leading ~ or ~user expanded. `key` names the path's origin in an error message."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise DataError(f"{key}: there is no home folder {found.partition('/')[0]}; {right}")
    return Path(found)


def import_optional(module: str, purpose: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{purpose} the package {package} is needed: pip install 'atoll[{extra}]'") from error


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes. A truncated file is an error and not a short text."""
    zst = _zst_module(path) if path.suffix.lower() == ".zst" else None
    broken: tuple[type[Exception], ...] = (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)
    if zst is not None:
        broken += (zst.ZstdError,)
    try:
        with _unpacked(path, zst) as stream:
            yield stream
    except broken as error:
        raise DataError(f"the file {path} is damaged or not a {path.suffix} file ({error})") from error
    except OSError as error:
        raise DataError(f"the file {path} cannot be read: {error.strerror or error}") from error


def _unpacked(path: Path, zst: Any) -> BinaryIO:
    if path.suffix.lower() == ".xz":
        return io.BufferedReader(lzma.open(path), _BLOCK)
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(cast(Any, gzip.open(path)), _BLOCK)
    if zst is None:
        return path.open("rb")
    if hasattr(zst, "ZstdFile"):
        options = {zst.DecompressionParameter.window_log_max: _ZST_WINDOW_LOG}
        return io.BufferedReader(zst.ZstdFile(path, options=options), _BLOCK)
    return io.BufferedReader(_ZstStream(path, zst.ZstdDecompressor(max_window_size=1 << _ZST_WINDOW_LOG)), _BLOCK)


def _zst_module(path: Path) -> Any:
    try:
        return importlib.import_module("compression.zstd")  # Python 3.14
    except ImportError:
        return importlib.import_module("zstandard")


class _ZstStream(io.RawIOBase):
    """zstandard's own reader accepts a truncated file; here the last frame must be complete."""

    def __init__(self, path: Path, decompressor: Any) -> None:
        self._file = path.open("rb")
        self._decompressor = decompressor
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._file.read(_ZST_BLOCK)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
        count = min(len(self._ready), len(target))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
