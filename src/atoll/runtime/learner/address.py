"""How a learner reaches its run: addresses, token, certificates, the request for a place, and its own folder."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from atoll.config.codecs import codec_digests
from atoll.errors import NotAdmitted, UserError
from atoll.runtime.learner.place import NO_PLACE, KeptPlace
from atoll.runtime.log import PacedLog, rate_limited
from atoll.runtime.syncer.places import JoinRequest, Placement
from atoll.tape.format import Header
from atoll.tape.gaps import LossyTapeWriter
from atoll.transport import (
    Backoff,
    ClientCredentials,
    LinkFailed,
    Refused,
    ServerCredentials,
    call,
    client_credentials,
    server_credentials,
)
from atoll.transport.keys import (
    LEARNER_NAME,
    SYNCER_NAME,
    expiry_warning,
    is_loopback,
    load_learner,
    read_token,
    soon,
    split_address,
    token_expiry,
)

log = logging.getLogger("atoll.learner")
tape_log = rate_limited("atoll.tape")  # a disk that is all but full takes some records and refuses others

FILE: Final = "file:"
NEEDS_KEYS: Final = "give --keys, a folder that `atoll keys` made, or --insecure"
WAIT_LINE_SECONDS = 10.0
"""Between two lines about the same wait."""


SPREAD_FROM = 8 << 20
"""Parameters of a fragment from which its bytes go over two connections."""


@dataclass(frozen=True)
class Address:
    """How to reach the syncer, and how recovering peers reach this learner."""

    syncer: str
    """HOST:PORT, or file:PATH: a file in which a syncer that may move writes where it listens."""
    token: str
    run: str = ""
    credentials: ClientCredentials | None = None
    peer_credentials: ClientCredentials | None = None
    server_credentials: ServerCredentials | None = None
    listen: str = ""
    """Where recovering peers are served; empty: nowhere, and they recover from other learners."""
    advertise: str = ""
    """The address that peers dial; by default `listen`."""
    connections: int = 0
    """For payloads; 0: as many as fragments of this size are worth."""
    join_timeout_seconds: float = 60.0
    """How long to try to join."""
    reconnect_timeout_seconds: float = 3600.0
    """How long to go on training without a connection to the syncer."""
    warnings: Callable[[], Sequence[str]] = tuple
    """Sentences about its certificates, once a day: these may expire while it trains."""
    insecure: bool = False
    """A connection to another machine may go without TLS."""

    def connections_for(self, largest_fragment: int) -> int:
        """A connection is served by one thread, which encrypts about a gigabyte a second: sending tens of megabytes takes as long
        as merging them."""
        return self.connections or (2 if largest_fragment >= SPREAD_FROM else 1)

    def where(self) -> str:
        """The syncer's address now. A file is read anew for every connection: it may be on another machine since."""
        if not self.syncer.startswith(FILE):
            return self.syncer
        path = Path(self.syncer.removeprefix(FILE))
        try:
            found = path.read_text(encoding="ascii").strip()
            split_address(found)
        except (OSError, UnicodeDecodeError, UserError):
            raise LinkFailed(f"{path} does not say yet where the syncer listens") from None
        if not is_loopback(found) and self.credentials is None and not self.insecure:
            raise UserError(f"syncer {found}, named by {path}: is not a loopback address; {NEEDS_KEYS}")
        return found


async def request_place(address: Address, wants: int, rng: random.Random, kept: KeptPlace = NO_PLACE) -> Placement:
    """Tries until the syncer answers. A final refusal is an error for the user."""
    backoff, line, began = Backoff(rng), PacedLog(WAIT_LINE_SECONDS), time.monotonic()
    log.info("joining the run at %s", address.syncer)
    metadata = {"token": address.token} | ({"run": address.run} if address.run else {})
    asked = JoinRequest(wants=wants, codecs=codec_digests(), place=kept.learner, place_key=kept.key)
    request = msgspec.msgpack.encode(asked)
    while True:
        try:
            reply = await call(address.where(), "Join", metadata, request, address.credentials)
            return msgspec.msgpack.decode(reply, type=Placement)
        except Refused as refusal:
            if not refusal.retry:
                raise not_admitted(address, refusal.reason) from None
            why = refusal.reason
        except LinkFailed as error:
            why = str(error)
        waited = time.monotonic() - began
        if waited > address.join_timeout_seconds:
            hint = "; if its run has certificates, give --keys" if address.credentials is None else ""
            raise UserError(f"syncer {address.syncer}: cannot be joined: {why}{hint}")
        if line.due():
            limit = address.join_timeout_seconds
            log.warning("waiting for a place at %s, %.0f of at most %.0f s: %s", address.syncer, waited, limit, why)
        await asyncio.sleep(backoff.next())


def not_admitted(address: Address, reason: str) -> NotAdmitted:
    return NotAdmitted(f"syncer {address.syncer}: refuses this learner: {reason}")


def open_tape(directory: Path, placement: Placement, header: Header) -> LossyTapeWriter:
    return LossyTapeWriter.begin(directory / f"{placement.incarnation}.tape", header, tape_log.warning)


def address_of(
    syncer: str, token: str | Path | None, keys: Path | None, name: str | None, run: str, listen: str, advertise: str,
    insecure: bool, *, connections: int = 0, dash: str = "",
) -> Address:  # fmt: skip
    """ATOLL_KEYS and ATOLL_TOKEN are the defaults of `keys` and `token`, so that a script that runs at many sites need not
    contain them. `dash` is how the caller spells its arguments: "--" on a command line."""
    if keys is None and os.environ.get("ATOLL_KEYS"):
        keys = Path(os.environ["ATOLL_KEYS"])
    by_file = syncer.startswith(FILE)
    for argument, value in (("syncer", syncer), ("listen", listen), ("advertise", advertise)):
        if (value or argument == "syncer") and not (by_file and argument == "syncer"):
            try:
                split_address(value)
            except UserError as error:
                raise UserError(f"{dash}{argument}: {error}") from None
    for argument, value in (("syncer", syncer), ("listen", listen)):
        if value and not value.startswith(FILE) and not is_loopback(value) and keys is None and not insecure:
            raise UserError(
                f"{dash}{argument} {value}: is not a loopback address; give {dash}keys, a folder that `atoll keys` made, or "
                f"{dash}insecure"
            )
    if listen and not by_file and is_loopback(listen) and not is_loopback(syncer) and not advertise:
        log.warning("%slisten %s: peers on other machines cannot reach it, so none recovers from this learner", dash, listen)
    found = load_learner(keys, name) if keys is not None else None
    shown = _token(token, keys, dash)
    for warning in _warnings(keys, name, shown):
        log.warning(warning)
    if found is None:
        return Address(
            syncer=syncer, token=shown, run=run, listen=listen, advertise=advertise, connections=connections, insecure=insecure,
        )  # fmt: skip
    return Address(
        syncer=syncer, token=shown, run=run, listen=listen, advertise=advertise, connections=connections, insecure=insecure,
        credentials=client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME),
        peer_credentials=client_credentials(found.ca, found.certificate, found.key, LEARNER_NAME),
        server_credentials=server_credentials(found.certificate, found.key, found.ca),
        warnings=lambda: _warnings(keys, name, ""),
    )  # fmt: skip


def _warnings(keys: Path | None, name: str | None, token: str) -> list[str]:
    found = load_learner(keys, name).warnings if keys is not None else []
    ends = token_expiry(token)
    return [*found, expiry_warning("the join token", ends)] if ends is not None and soon(ends) else found


def _token(token: str | Path | None, keys: Path | None, dash: str) -> str:
    if token is None and keys is not None and (keys / "token").exists():
        token = keys / "token"
    found = read_token(token).reveal() if isinstance(token, Path) else token or os.environ.get("ATOLL_TOKEN", "")
    if not found:
        raise UserError(f"no token: give {dash}token, a file (the syncer's folder holds it as `token`), or set ATOLL_TOKEN")
    return found
