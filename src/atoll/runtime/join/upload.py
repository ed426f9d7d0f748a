"""How a loop of the user's own finds its way into a run: address, token and certificates, and the model it brings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from atoll.errors import ConfigError, RunFailed, UserError
from atoll.runtime.learner.address import Address
from atoll.runtime.syncer.places import Placement
from atoll.store.model_upload import pack_model
from atoll.tensors.access import read_buffers, read_params
from atoll.tensors.inventory import AND_FROZEN, with_frozen
from atoll.tensors.layout import Layout
from atoll.transport import LinkFailed, Refused, upload

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
        digest = (await upload_model(address, placement, pack_model(whole, params, buffers))).decode("ascii", "replace")
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


async def upload_model(address: Address, placement: Placement, data: Sequence[Any]) -> bytes:
    metadata = {
        "run": placement.run, "learner": str(placement.learner), "incarnation": str(placement.incarnation), "key": placement.key,
    }  # fmt: skip
    seconds = UPLOAD_SECONDS + sum(memoryview(part).nbytes for part in data) / UPLOAD_BYTES_PER_SECOND_LEAST
    try:
        return await upload(address.syncer, "Upload", metadata, data, address.credentials, seconds)
    except Refused as no:
        raise UserError(f"syncer {address.syncer}: refuses this model: {no.reason}") from None
    except LinkFailed as error:
        raise RunFailed(f"syncer {address.syncer}: the model could not be brought: {error}") from None




