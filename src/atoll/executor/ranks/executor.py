"""One rank's executor: a learner's executor on the pieces that this rank holds.

It stages, keeps and adopts as any learner does, on flat vectors of its own pieces. Only what it sends is different: a part of a
packet, of the pieces that it owns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from atoll.codecs import codec as codec_of
from atoll.errors import NotFinite
from atoll.executor.cuda.learner import CudaSide, Key, StagedSend
from atoll.executor.cuda.transfer import each_tensor
from atoll.executor.learner import StateStore, TensorLearner
from atoll.executor.ranks.state import Empty, StateParts, boxes_of_moments, like_parameters, names_of, part_of
from atoll.executor.ranks.stitch import EncodedPart, block_of, encode_part, owned_block, packs_randomly
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import NO_VERSION, Event, Stage
from atoll.store.tensor_files import use_plain_floats
from atoll.tasks.task import Task
from atoll.tensors.access import FragmentReader, named_tensors, read_buffers
from atoll.tensors.layout import Fragment
from atoll.tensors.local import LocalTensors, local_value
from atoll.tensors.pieces import BlockSplit, Boxes, HeldPieces, Run, clipped, held_of, owned_of, put_runs, split_of, take_runs


class StagedPart(NamedTuple):
    """Encoded, and ready to be sent."""

    effect: Stage
    part: EncodedPart
    buffers: Tensor
    residual: Tensor | None
    total: Tensor | None
    """What was encoded, where the learner may go on with fewer ranks: these then divide it anew."""


OwnPart: TypeAlias = tuple[EncodedPart, Tensor] | StagedSend


def part_of_packet(own: OwnPart) -> tuple[EncodedPart, Tensor] | None:
    """Waits for the device: not for the training thread. None if NaN or Inf was found. The part is valid while `own` lives."""
    if not isinstance(own, StagedSend):
        return own
    found = own.part()
    return None if found is None else (found[0], found[1].clone())


class RankExecutor(TensorLearner):
    def __init__(
        self, task: Task, learner: LearnerId, rank: int, world: Mapping[int, Boxes], *, model: torch.nn.Module,
        optimizer: torch.optim.Optimizer, device: torch.device, snapshots: StateStore | None = None, may_shrink: bool = False,
    ) -> None:  # fmt: skip
        """`world`: of every rank what it holds, in the order of torch's group. `task` is of the whole model."""
        self.rank = rank
        self.world = dict(world)
        self.whole: Sequence[Fragment] = task.layout.fragments
        self._random = packs_randomly(task.config)
        self.held: list[dict[int, HeldPieces]] = [
            {other: held_of(fragment, boxes) for other, boxes in self.world.items()} for fragment in self.whole
        ]
        """By fragment and rank."""
        self.splits = self._splits(task)
        self.generation = 0
        """How often ranks were lost. The splits change with it."""
        self.may_shrink = may_shrink
        self._splitting = threading.Lock()
        local = replace(task.layout, fragments=tuple(held[rank].fragment for held in self.held))
        super().__init__(
            replace(task, layout=local), learner, snapshots, model=model, optimizer=optimizer, device=device,
            tensors=LocalTensors(named_tensors(model)),
        )  # fmt: skip
        self._reader = FragmentReader()
        self._parts: dict[Key, StagedPart] = {}
        self._randomly: dict[Key, Stage] = {}
        """On a GPU, with a codec that rounds or draws at random: what each staged copy was staged for."""
        self._asked: dict[int, tuple[Key, StagedPart | None]] = {}
        """By request, what rank 0 has not assembled yet."""
        self.names = names_of(model, optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._of_number = dict(zip(self.names, held, strict=True))

    # ------------------------------------------------------------ sending

    def staged_key(self, p: FragmentId, slot: int) -> Key:
        """Of the copy that answers a pull: the one staged for that outer step, else the newest."""
        key = (p, slot)
        found = key in self._copies or key in self._parts if self._cuda is None else self._cuda.has(key)
        return key if found else (p, NO_VERSION)

    def encoded(self, key: Key, request: int = 0) -> OwnPart | None:
        """This rank's part of the packet, and the fragment's buffers. None if nothing is staged, or NaN or Inf was. On a GPU they
        are still being encoded: `part_of_packet` waits for them."""
        if self._cuda is not None:
            return self._cuda.send(key, feedback=self._config.protocol.error_feedback)
        copied = self._copies.pop(key, None)
        if copied is not None:
            total = copied.difference if copied.residual is None else copied.difference + copied.residual
            staged = self._staged_part(key[0], copied.effect, total.cpu(), copied.buffers.cpu())
            if staged is not None:
                self._parts[key] = staged
        found = self._parts.get(key)
        if self.may_shrink:
            self._asked[request] = key, found
        return self._sent(key[0], found)

    def _staged_part(self, p: FragmentId, effect: Stage, total: Tensor, buffers: Tensor) -> StagedPart | None:
        feedback = self._config.protocol.error_feedback
        try:
            part, residual = encode_part(self._codec, total, self.splits[p][self.rank], feedback=feedback)
        except NotFinite:
            return None
        kept = None if residual is None else residual.to(self._device)
        return StagedPart(effect, part, buffers, kept, total if self.may_shrink else None)

    def _sent(self, p: FragmentId, found: StagedPart | None) -> tuple[EncodedPart, Tensor] | None:
        if found is None:
            return None
        if found.residual is not None:
            self._uncommitted[p] = found.residual
        return found.part, found.buffers

    def encoded_again(self, request: int, again: int) -> tuple[EncodedPart, Tensor] | None:
        """This rank's part as the smaller group divides it, of a packet that rank 0 could not assemble."""
        key, found = self._asked[again] = self._asked.pop(request)
        return self._sent(key[0], found)

    def assembled(self, request: int) -> None:
        with self._splitting:
            self._asked.pop(request, None)

    def rounding_of(self, key: Key, request: int = 0) -> torch.Generator | None:
        """The random sequence of the whole packet, for the rank that assembles it. It is of the host."""
        if not self._random:
            return None
        if self._cuda is not None:
            return self._rounding_on_host(self._randomly[key])
        asked = self._asked[request][1] if self.may_shrink else self._parts[key]
        return None if asked is None else self._rounding_on_host(asked.effect)

    def seams_not_carried(self, p: FragmentId, values: Tensor, generation: int = 0) -> None:
        """What the assembled packet did not carry of this rank's seams, as that generation of the group divided it."""
        if self._cuda is not None:
            self._cuda.seams_not_carried(p, self.splits[p][self.rank].seams, values)
            return
        with self._splitting:
            residual = self._uncommitted.get(p)
            if residual is not None and generation == self.generation:
                put_runs(residual, self.splits[p][self.rank].seams, values.to(residual.device))

    # ------------------------------------------------------------ fewer ranks

    def _splits(self, task: Task) -> list[dict[int, BlockSplit]]:
        """By fragment and rank."""
        align = block_of(codec_of(task.config.protocol.codec_up), rounds_randomly=self._random)
        world, block = list(self.world.values()), owned_block(task.config)
        return [
            dict(zip(self.world, (split_of(owned, align) for owned in owned_of(fragment, world, block)), strict=True))
            for fragment in self.whole
        ]

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but rank 0, in the order of torch's group."""
        return tuple(rank for rank in self.world if rank)

    def shrink(self, order: Sequence[int]) -> None:
        """Those ranks are left, and divide anew what they send. What packets did not carry is known to the rank that sent it:
        of a lost rank's it is lost, and a range that changes hands begins without."""
        with self._splitting:
            self.world = {rank: self.world[rank] for rank in order}
            self.splits, self.generation = self._splits(self._task), self.generation + 1
            for residuals in (self._residuals, self._uncommitted):
                for p, residual in residuals.items():
                    own = self.splits[p][self.rank]
                    residuals[p] = torch.zeros_like(residual)
                    for runs in own:
                        put_runs(residuals[p], runs, take_runs(residual, runs))
            parts, asked = self._parts, self._asked
            again = {id(staged): self._divided_anew(key, staged) for key, staged in (*parts.items(), *asked.values())}
            self._parts = {key: new for key, staged in parts.items() if (new := again[id(staged)]) is not None}
            self._asked = {request: (key, again[id(staged)]) for request, (key, staged) in asked.items()}

    def _divided_anew(self, key: Key, staged: StagedPart | None) -> StagedPart | None:
        if staged is None:
            return None
        assert staged.total is not None, "only a learner that may shrink does"
        return self._staged_part(key[0], staged.effect, staged.total, staged.buffers)

    def rebind(self, model: torch.nn.Module) -> None:
        """The same weights in another model, sharded over a smaller group; the optimiser's are its already."""
        self.model, self._parameters = model, named_tensors(model)
        self._tensors = LocalTensors(self._parameters)
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._of_number = dict(zip(self.names, held, strict=True))

    def _drop(self, key: Key) -> None:
        super()._drop(key)
        self._parts.pop(key, None)
        self._randomly.pop(key, None)

    def _stage_on_device(self, cuda: CudaSide, effect: Stage) -> Sequence[Event]:
        found = super()._stage_on_device(cuda, effect)
        if self._random:
            self._randomly[effect.fragment, effect.slot] = effect
        return found

    def _split_of(self, p: FragmentId) -> BlockSplit | None:
        return self.splits[p][self.rank]

    def _forget_work(self) -> None:
        super()._forget_work()
        self._parts.clear()
        self._randomly.clear()

    # ------------------------------------------------------------ receiving

    def pinned(self, value: Any) -> Any:
        """For the receiving thread: from pinned memory the device takes it without the host. On a CPU the same value."""
        return value if self._cuda is None else self._cuda.pinned(value)

    def pinned_payload(self, payload: Payload) -> Payload:
        """The same of an announced version."""
        return payload if self._cuda is None else self._cuda.arriving(payload)

    @property
    def is_whole_on_device(self) -> bool:
        """One rank, on a GPU: what arrives is decoded there."""
        return self._cuda is not None and len(self.world) == 1

    # ------------------------------------------------------------ state, in parts

    def part(self, *, with_residuals: bool = False) -> dict[str, Any]:
        """This rank's part of the learner's state, copied to the host."""
        use_plain_floats(self.optimizer)
        boxes = boxes_of_moments(self.optimizer.state_dict()["state"])
        with nullcontext() if self._cuda is None else self._cuda.training_stream():
            state = each_tensor(self.state(with_residuals=with_residuals), lambda tensor: tensor.cpu())
        return part_of(state, self.world[self.rank], boxes, owned_block(self._config))

    @property
    def announced(self) -> dict[FragmentId, tuple[OuterStep, Tensor]]:
        """This rank's pieces of the versions that wait to be adopted."""
        if self._cuda is not None:
            self._cuda.stager.settle()
        return {p: (version, announced) for p, (version, announced, _) in dict(self._kept).items()}

    def cut(self, parts: StateParts, rank: int, into: Empty | None = None) -> dict[str, Any]:
        """What `rank` holds of a state."""
        return parts.of(self.world[rank], self.names, into)

    def parts_of(self, found: Any) -> StateParts:
        """`found`: a whole state, or a list of parts."""
        return StateParts(found if isinstance(found, list) else [found], self.whole)

    def _optimizer_state(self) -> dict[str, Any]:
        local: dict[str, Any] = local_value(self.optimizer.state_dict())
        return local

    def _saved(self, snapshot: OuterStep) -> dict[str, Any]:
        """Copied: what is read may be pages of a file."""
        assert self._snapshots is not None
        own = self.cut(self.parts_of(self._snapshots.learner_state(snapshot, self._learner)), self.rank)
        copied: dict[str, Any] = each_tensor(own, torch.clone)
        return copied

    def _load_state(self, state: dict[str, Any], *, resumes: bool = False) -> None:
        """`state` is this rank's own."""
        optimizer = state["optimizer"]
        placed = {**optimizer, "state": like_parameters(optimizer["state"], self._of_number)}
        super()._load_state({**state, "optimizer": placed}, resumes=resumes)

    # ------------------------------------------------------------ the weights as they are

    def owned_weights(self, p: FragmentId, start: int, stop: int) -> Tensor:
        """What this rank sends of a range of a fragment, on the host. Ranges are asked for in rising order."""
        own = self._reader.read(self._tensors, self._fragments[p], last=stop == self.whole[p].numel)
        return take_runs(own, self.owned_between(self.rank, p, start, stop))

    def owned_between(self, rank: int, p: FragmentId, start: int, stop: int) -> list[Run]:
        split = self.splits[p][rank]
        return [part for run in (*split.blocks, *split.seams) for part in clipped(run, start, stop)]

    def own_buffers(self, p: FragmentId) -> Tensor:
        return read_buffers(self._tensors, self._fragments[p]).cpu()
