"""An outsider as a process: `open_connections.py ADDRESS SOURCE COUNT SECONDS KIND HOLD`.

Opens COUNT connections within SECONDS from the address SOURCE and holds the newest HOLD of them. KIND says what each sends:
nothing, the start of a TLS handshake, of HTTP/2, or of a bulk connection. Prints what became of them, as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import json
import resource
import socket
import sys
import time

WORDS = {
    "silent": b"",
    "tls": bytes([0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3]) + bytes(200),
    "bulk": b"ATOLL/1\n" + bytes([0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3]),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
}


def main(address: str, source: str, count: int, seconds: float, kind: str, hold: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = address.rpartition(":")
    held: collections.deque[socket.socket] = collections.deque()
    outcomes: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for number in range(count):
        one = socket.socket()
        one.settimeout(60)
        try:
            one.bind((source, 0))
            one.connect((host, int(port)))
            outcomes["connected"] += 1
            with contextlib.suppress(ConnectionError):
                one.sendall(WORDS[kind])
        except OSError as error:
            outcomes[type(error).__name__] += 1
        held.append(one)
        if len(held) > hold:
            held.popleft().close()
        early = began + (number + 1) * seconds / count - time.monotonic()
        if early > 0:
            time.sleep(early)
    print(json.dumps({"seconds": time.monotonic() - began, "held": len(held), **outcomes}), flush=True)
    sys.stdin.read()  # holds them until its parent has seen enough


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
