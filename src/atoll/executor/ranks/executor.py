"""One rank's executor: a learner's executor on the pieces that this rank holds.

It stages, keeps and adopts as any learner does, on flat vectors of its own pieces. Only what it sends is different: a part of a
packet, of the pieces that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.codecs import BLOCK
from atoll.codecs import codec as codec_of
from atoll.config.codecs import codec_spec
from atoll.errors import NotFinite
from atoll.executor.cuda.learner import Key
from atoll.executor.learner import StateStore, TensorLearner
from atoll.executor.ranks.stitch import EncodedPart, block_of, encode_part
from atoll.ids import FragmentId, LearnerId
from atoll.protocol.vocabulary import NO_VERSION, Stage
from atoll.tasks.task import Task
from atoll.tensors.access import named_tensors, read_buffers, read_params
from atoll.tensors.layout import Fragment
from atoll.tensors.local import LocalTensors
from atoll.tensors.pieces import BlockSplit, Boxes, HeldPieces, held_of, owned_of, put_runs, split_of


class StagedPart(NamedTuple):
    """Encoded, and ready to be sent."""

    effect: Stage
    part: EncodedPart
    buffers: Tensor
    residual: Tensor | None


class RankExecutor(TensorLearner):
    def __init__(
        self, task: Task, learner: LearnerId, rank: int, world: Sequence[Boxes], *, model: torch.nn.Module,
        optimizer: torch.optim.Optimizer, device: torch.device, snapshots: StateStore | None = None,
    ) -> None:  # fmt: skip
        """`world`: of every rank what it holds. `task` is of the whole model."""
        self.rank = rank
        self.whole: Sequence[Fragment] = task.layout.fragments
        protocol = task.config.protocol
        codec = codec_of(protocol.codec_up)
        self._random = protocol.stochastic_rounding or codec_spec(codec.name).random
        align = block_of(codec, rounds_randomly=self._random)
        self.held: list[list[HeldPieces]] = [[held_of(fragment, boxes) for boxes in world] for fragment in self.whole]
        """By fragment and rank."""
        self.splits: list[list[BlockSplit]] = [
            [split_of(owned, align) for owned in owned_of(fragment, world, align or BLOCK)] for fragment in self.whole
        ]
        local = replace(task.layout, fragments=tuple(held[rank].fragment for held in self.held))
        super().__init__(
            replace(task, layout=local), learner, snapshots, model=model, optimizer=optimizer, device=device, resident=True,
            tensors=LocalTensors(named_tensors(model)),
        )  # fmt: skip
        self._parts: dict[Key, StagedPart] = {}

    # ------------------------------------------------------------ sending

    def staged_key(self, p: FragmentId, slot: int) -> Key:
        """Of the copy that answers a pull: the one staged for that outer step, else the newest."""
        key = (p, slot)
        return key if key in self._copies or key in self._parts else (p, NO_VERSION)

    def encoded(self, key: Key) -> tuple[EncodedPart, Tensor] | None:
        """This rank's part of the packet, and the fragment's buffers. None if nothing is staged, or NaN or Inf was."""
        copied = self._copies.pop(key, None)
        if copied is not None:
            total = copied.difference if copied.residual is None else copied.difference + copied.residual
            feedback = self._config.protocol.error_feedback
            try:
                part, residual = encode_part(self._codec, total.cpu(), self.splits[key[0]][self.rank], feedback=feedback)
            except NotFinite:
                return None
            kept = None if residual is None else residual.to(self._device)
            self._parts[key] = StagedPart(copied.effect, part, copied.buffers.cpu(), kept)
        found = self._parts.get(key)
        if found is None:
            return None
        if found.residual is not None:
            self._uncommitted[key[0]] = found.residual
        return found.part, found.buffers

    def rounding_of(self, key: Key) -> torch.Generator | None:
        """The random sequence of the whole packet, for the rank that assembles it. It is of the host."""
        return self._rounding_on_host(self._parts[key].effect) if self._random else None

    def seams_not_carried(self, p: FragmentId, values: Tensor) -> None:
        """What the assembled packet did not carry of this rank's seams."""
        residual = self._uncommitted.get(p)
        if residual is not None:
            put_runs(residual, self.splits[p][self.rank].seams, values.to(residual.device))

    def _drop(self, key: Key) -> None:
        super()._drop(key)
        self._parts.pop(key, None)

    def _forget_work(self) -> None:
        super()._forget_work()
        self._parts.clear()

    # ------------------------------------------------------------ receiving

    def _keep(self, p: FragmentId, version: int, previous: int, content: Any) -> None:
        super()._keep(p, version, previous, content)
        kept, announced, buffers = self._kept[p]
        self._kept[p] = (kept, announced.to(self._device), buffers.to(self._device))

    # ------------------------------------------------------------ the weights as they are

    def weights(self, p: FragmentId) -> tuple[Tensor, Tensor]:
        """The flat parameters and buffers that this rank holds of a fragment, on the host."""
        fragment = self._fragments[p]
        return read_params(self._tensors, fragment).cpu(), read_buffers(self._tensors, fragment).cpu()
