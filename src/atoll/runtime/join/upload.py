"""Uploads a user's model to the syncer, or checks that it equals the one uploaded before."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from atoll.errors import ConfigError, RunFailed, UserError
from atoll.ids import FragmentId
from atoll.runtime.learner.address import WAIT_LINE_SECONDS, Address
from atoll.runtime.log import PacedLog
from atoll.runtime.syncer.places import Placement
from atoll.store.model_upload import ModelWeights, PackedModel, pack_model
from atoll.tensors.access import FragmentReader, read_buffers
from atoll.tensors.inventory import FROZEN_SEPARATOR, with_frozen
from atoll.tensors.layout import Fragment, Layout
from atoll.transport import Backoff, LinkFailed, Refused, Streamed, upload

log = logging.getLogger("atoll.learner")

UPLOAD_SECONDS: Final = 60.0
UPLOAD_BYTES_PER_SECOND_LEAST: Final = 1e6


async def agree_on_model(
    address: Address, placement: Placement, layout: Layout, weights: ModelWeights, frozen: str
) -> None:
    """The first learner uploads the model's shapes and weights. Another one waits meanwhile and is answered with the digest of
    the first one's, so both compare with the answer. `frozen` is the digest of the parameters that are not exchanged."""
    digest = placement.layout
    if placement.needs_model:
        whole = replace(layout, fingerprint=with_frozen(layout.fingerprint, frozen))
        digest = (await upload_model(address, placement, pack_model(whole, weights))).decode("ascii", "replace")
    travels, _, frozen_there = digest.partition(FROZEN_SEPARATOR)
    if travels != layout.fingerprint:
        raise ConfigError(
            "the model here is not the one that this run trains: its tensors have other names, shapes or dtypes; build the same "
            "model, or start another run"
        )
    if frozen and not frozen_there:  # uploaded by an older Atoll; an error would keep learners out of that run for good
        log.warning(
            "this run has no digest of its model's frozen part (requires_grad=False), so it is not compared: make sure that it "
            "is the same on every learner"
        )
    elif frozen != frozen_there:
        raise ConfigError(
            "the frozen part of the model here (requires_grad=False) differs from that of this run, and it is not exchanged; "
            "load the same weights, in the same dtype, into the frozen part on every learner, before atoll.join"
        )


class OwnWeights:
    """The weights of a model that this process holds whole."""

    def __init__(self, tensors: Mapping[str, Tensor], fragments: Sequence[Fragment]) -> None:
        self._tensors = tensors
        self._fragments = fragments
        self._reader = FragmentReader()

    def params(self, p: FragmentId, start: int, stop: int) -> Tensor:
        fragment = self._fragments[p]
        return self._reader.read(self._tensors, fragment, last=stop == fragment.numel)[start:stop]

    def buffers(self, p: FragmentId) -> Tensor:
        return read_buffers(self._tensors, self._fragments[p]).cpu()


async def upload_model(address: Address, placement: Placement, model: PackedModel) -> bytes:
    metadata = {
        "run": placement.run, "learner": str(placement.learner), "incarnation": str(placement.incarnation), "key": placement.key,
    }  # fmt: skip
    seconds = UPLOAD_SECONDS + model.nbytes / UPLOAD_BYTES_PER_SECOND_LEAST
    data = Streamed(*model)
    backoff, line, began = Backoff(random.Random()), PacedLog(WAIT_LINE_SECONDS), time.monotonic()
    while True:
        try:
            return await upload(address.where(), "Upload", metadata, data, address.credentials, seconds)
        except Refused as refusal:
            if not refusal.retry or time.monotonic() - began > address.reconnect_timeout_seconds:
                raise UserError(f"syncer {address.syncer}: refuses this model: {refusal.reason}") from None
            if line.due():
                log.info("waiting to upload the model to %s: %s", address.syncer, refusal.reason)
        except LinkFailed as error:
            raise RunFailed(f"syncer {address.syncer}: the model could not be uploaded: {error}") from None
        await asyncio.sleep(backoff.next())
