"""How a learner finds its run: addresses, token and certificates, and the place the syncer gives it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.errors import UserError
from atoll.runtime.syncer.places import JoinRequest, Placement
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
from atoll.transport.keys import LEARNER_NAME, SYNCER_NAME, is_loopback, load_learner, read_token, split_address

log = logging.getLogger("atoll.learner")


@dataclass(frozen=True)
class Address:
    """How to reach the syncer, and how to be reached by peers that recover."""

    syncer: str
    token: str
    run: str = ""
    credentials: ClientCredentials | None = None
    peer_credentials: ClientCredentials | None = None
    server_credentials: ServerCredentials | None = None
    listen: str = ""
    """Where peers are served; empty: they are not, and recover from others."""
    advertise: str = ""
    """What peers are told to dial; by default where we listen."""
    connections: int = 1
    patience_seconds: float = 60.0
    """How long to knock at first."""
    give_up_seconds: float = 3600.0
    """How long to train on without a syncer."""


async def ask_for_place(address: Address, wants: int, rng: random.Random) -> Placement:
    """Knock until the syncer answers. A refusal that will not change is the user's to mend."""
    backoff, said = Backoff(rng), ""
    deadline = asyncio.get_running_loop().time() + address.patience_seconds
    metadata = {"token": address.token} | ({"run": address.run} if address.run else {})
    request = msgspec.msgpack.encode(JoinRequest(wants=wants))
    while True:
        try:
            reply = await call(address.syncer, "Join", metadata, request, address.credentials)
            return msgspec.msgpack.decode(reply, type=Placement)
        except Refused as no:
            if not no.retry:
                raise UserError(f"syncer {address.syncer}: refuses this learner: {no.reason}") from None
            why = no.reason
        except LinkFailed as error:
            why = str(error)
        if asyncio.get_running_loop().time() > deadline:
            raise UserError(f"syncer {address.syncer}: cannot be joined: {why}")
        if why != said:
            log.info("knocking at %s: %s", address.syncer, why)
            said = why
        await asyncio.sleep(backoff.next())


def own_directory(out: Path | None, placement: Placement) -> Path:
    directory = out or Path("runs") / f"{placement.run}-learner{placement.learner}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be made a directory ({error.strerror})") from None
    return directory


def address_of(
    syncer: str, token: str | Path | None, keys: Path | None, name: str | None, run: str, listen: str, advertise: str,
    insecure: bool, *, connections: int = 1, dash: str = "",
) -> Address:  # fmt: skip
    """The environment speaks where an argument does not: a loop that runs in many places names neither in its source.
    `dash` is how the caller spells its arguments: "--" on a command line."""
    if keys is None and os.environ.get("ATOLL_KEYS"):
        keys = Path(os.environ["ATOLL_KEYS"])
    for argument, value in (("syncer", syncer), ("listen", listen), ("advertise", advertise)):
        if value or argument == "syncer":
            try:
                split_address(value)
            except UserError as error:
                raise UserError(f"{dash}{argument}: {error}") from None
    for argument, value in (("syncer", syncer), ("listen", listen)):
        if value and not is_loopback(value) and keys is None and not insecure:
            raise UserError(
                f"{dash}{argument} {value}: goes beyond this machine; give {dash}keys, a folder that `atoll keys` made, or say "
                f"{dash}insecure"
            )
    if listen and is_loopback(listen) and not is_loopback(syncer) and not advertise:
        log.warning("%slisten %s: peers on other machines cannot reach it, so none recovers from this learner", dash, listen)
    found = load_learner(keys, name) if keys is not None else None
    for warning in found.warnings if found is not None else ():
        log.warning(warning)
    shown = _token(token, keys, dash)
    if found is None:
        return Address(syncer=syncer, token=shown, run=run, listen=listen, advertise=advertise, connections=connections)
    return Address(
        syncer=syncer, token=shown, run=run, listen=listen, advertise=advertise, connections=connections,
        credentials=client_credentials(found.ca, found.certificate, found.key, SYNCER_NAME),
        peer_credentials=client_credentials(found.ca, found.certificate, found.key, LEARNER_NAME),
        server_credentials=server_credentials(found.certificate, found.key, found.ca),
    )  # fmt: skip


def _token(token: str | Path | None, keys: Path | None, dash: str) -> str:
    if token is None and keys is not None and (keys / "token").exists():
        token = keys / "token"
    found = read_token(token).reveal() if isinstance(token, Path) else token or os.environ.get("ATOLL_TOKEN", "")
    if not found:
        raise UserError(f"no token: give {dash}token, a file (the syncer's folder holds it as `token`), or set ATOLL_TOKEN")
    return found
