"""Ports for those who must know one before they listen on it."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def unused_port(count: int = 1) -> int:
    """The first of so many in a row. Below those that the kernel gives to whoever asks for any: one of those may be gone before
    it is listened on."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError):
            for each in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
            return port
    raise AssertionError("a hundred ports are taken")
