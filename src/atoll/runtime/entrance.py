"""How a loop of the user's own finds its way into a run: address, token and certificates, and the model it brings."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from atoll.errors import ConfigError, RunFailed, UserError
from atoll.executor.offer import pack_offer
from atoll.runtime.learner import Address
from atoll.runtime.placement import Placement
from atoll.tensors.access import read_buffers, read_params
from atoll.tensors.inventory import AND_FROZEN, with_frozen
from atoll.tensors.layout import Layout
from atoll.transport import LinkFailed, Refused, client_credentials, server_credentials, upload
from atoll.transport.keys import LEARNER_NAME, SYNCER_NAME, is_loopback, load_learner, read_token, split_address

log = logging.getLogger("atoll.learner")

UPLOAD_SECONDS: Final = 60.0
UPLOAD_BYTES_PER_SECOND_LEAST: Final = 1e6


async def agree_on_model(
    address: Address, placement: Placement, layout: Layout, tensors: Mapping[str, Tensor], frozen: str
) -> None:
    """The first learner brings the model's shapes and weights. Whoever else thought to be the first is told what was there
    before, so the answer is what counts, for both. `frozen` is the digest of what does not travel."""
    digest = placement.layout
    if placement.needs_model:
        params = [read_params(tensors, fragment).cpu() for fragment in layout.fragments]
        buffers = [read_buffers(tensors, fragment).cpu() for fragment in layout.fragments]
        whole = replace(layout, fingerprint=with_frozen(layout.fingerprint, frozen))
        digest = (await _offer(address, placement, pack_offer(whole, params, buffers))).decode("ascii", "replace")
    travels, _, frozen_there = digest.partition(AND_FROZEN)
    if travels != layout.fingerprint:
        raise ConfigError(
            "the model here is not the one this run trains: another learner brought one whose tensors have other names, shapes "
            "or dtypes; build the same model, or start a run of its own"
        )
    if frozen and not frozen_there:  # an older Atoll brought the model, or keeps it: nobody could come back to such a run
        log.warning(
            "this run was not told of its model's frozen part (requires_grad=False), so it is not compared: see to it that it is "
            "the same on every learner"
        )
    elif frozen != frozen_there:
        raise ConfigError(
            "the frozen part of the model here (requires_grad=False) is not the one this run trains with, and it does not "
            "travel; load the same weights, in the same dtype, into the frozen part on every learner, before atoll.join"
        )


async def _offer(address: Address, placement: Placement, payload: Sequence[Any]) -> bytes:
    metadata = {
        "run": placement.run, "learner": str(placement.learner), "incarnation": str(placement.incarnation), "key": placement.key,
    }  # fmt: skip
    seconds = UPLOAD_SECONDS + sum(memoryview(part).nbytes for part in payload) / UPLOAD_BYTES_PER_SECOND_LEAST
    try:
        return await upload(address.syncer, "Offer", metadata, payload, address.credentials, seconds)
    except Refused as no:
        raise UserError(f"syncer {address.syncer}: refuses this model: {no.reason}") from None
    except LinkFailed as error:
        raise RunFailed(f"syncer {address.syncer}: the model could not be brought: {error}") from None


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
