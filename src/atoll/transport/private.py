"""Where gRPC listens behind the front door: a Unix socket that only this process can connect to.

On Linux its file is gone as soon as gRPC listens, and a descriptor leads there: a process that is killed leaves nothing.
Elsewhere it lies in a folder that only this user may enter.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path


class PrivateAddress:
    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atoll-"))
        self._path = self._folder / "grpc"
        self._descriptor: int | None = None
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        """As gRPC takes it."""
        return f"unix:{self._path}"

    def listening(self) -> None:
        """gRPC listens now."""
        if sys.platform == "linux":
            self._descriptor = os.open(self._path, os.O_PATH)
            self._path.unlink()
            self._folder.rmdir()

    def connect(self) -> tuple[socket.socket, str]:
        """A connection, and the name under which gRPC knows it. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)  # gRPC's backlog is full: better to refuse than to wait here
            if self._descriptor is not None:
                sock.bind("")  # Linux chooses a name that is not a file
                sock.connect(f"/proc/self/fd/{self._descriptor}")
                return sock, f"unix-abstract:{sock.getsockname()[1:].decode('ascii')}"
            own = self._folder / str(next(self._numbers))
            sock.bind(str(own))
            try:
                sock.connect(str(self._path))
            finally:
                own.unlink()
            return sock, f"unix:{own}"
        except OSError:
            sock.close()
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        shutil.rmtree(self._folder, ignore_errors=True)
