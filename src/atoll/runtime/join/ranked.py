"""`atoll.join` under torch.distributed: all ranks of the process group are one learner.

Rank 0 holds the machine and the link; the other ranks follow it (`runtime/ranks/`). Every rank makes the same calls, and leaves
each of them at the same step with the same versions adopted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, RunFailed
from atoll.executor.cuda.staging import MASTER_KEYS
from atoll.executor.ranks.executor import RankExecutor
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.vocabulary import Message, StepDone
from atoll.runtime.join import checks
from atoll.runtime.join.learner import Learner
from atoll.runtime.join.upload import agree_on_model
from atoll.runtime.learner.address import Address
from atoll.runtime.learner.leaving import LeaveRequests
from atoll.runtime.learner.live import LiveLearner
from atoll.runtime.learner.snapshots import LearnerSnapshots, SavedParts
from atoll.runtime.loop import LoopThread
from atoll.runtime.metrics import MetricsAt
from atoll.runtime.ranks.executor import LeadExecutor
from atoll.runtime.ranks.gathered import WeightsOfRanks
from atoll.runtime.ranks.lead import RankLead
from atoll.runtime.ranks.leading import LeadingLearner
from atoll.runtime.ranks.member import RankMember
from atoll.runtime.ranks.messages import Agreed, PlaceGiven, Profile
from atoll.runtime.ranks.rendezvous import lead_connects, rank_connects, world
from atoll.runtime.syncer.places import Placement
from atoll.store.snapshots import remove_rank_parts
from atoll.tensors.inventory import frozen_digest, walk
from atoll.tensors.local import is_dtensor
from atoll.tensors.pieces import Box, Boxes
from atoll.tensors.placements import box_of


class RankedLearner(Learner):
    """One rank of a learner."""

    def __init__(
        self, address: Address, model: nn.Module, optimizer: torch.optim.Optimizer, *, wants: int = -1,
        out: Path | None = None, metrics: MetricsAt | None = None, leaving: LeaveRequests | None = None,
        rank_timeout_seconds: float = 300.0, resume: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(address, model, optimizer, wants=wants, out=out, metrics=metrics, leaving=leaving, resume=resume)
        self.rank, self.ranks = world()
        self._timeout = rank_timeout_seconds
        self._world: Mapping[int, Boxes] = {}
        self._may_shrink = False
        """Whether it goes on without a rank that is lost: only where the training loop is ours."""
        self._lead: RankLead
        self._member: RankMember
        self._inner: RankExecutor
        self._leading: LeadExecutor
        self._sharded = checks.sharded_modules(model)

    # ------------------------------------------------------------ joining

    def _connect(self, stack: contextlib.ExitStack) -> None:
        if self.rank == 0:
            self._lead = RankLead(lead_connects(self.ranks, self._timeout) if self.ranks > 1 else {}, self._timeout)
            stack.push(self._end_ranks)
            self._agree_with_ranks()
            frozen = frozen_digest(self._model)
            self._connect_lead(stack, frozen)
            return
        self._member = RankMember(self.rank, rank_connects(self.rank, self._timeout), self._timeout)
        stack.callback(self._member.close)
        self._world = _boxes_of(self._member.agree(self._profile()))
        frozen_digest(self._model)  # rank 0's needs the parts of all ranks
        placement = self._member.await_place()
        self._take_place(placement)
        self._live = self._member
        self._make_executor(placement)
        stack.callback(self._inner.close)
        self._member.begin(self._inner)

    def _connect_lead(self, stack: contextlib.ExitStack, frozen: str) -> None:
        self._loop = LoopThread()
        stack.callback(self._loop.stop)
        placement = self._request_place()
        self._take_place(placement)
        shown = msgspec.structs.replace(placement, key="", place_key="")
        self._lead.tell(PlaceGiven(shown))
        self._make_executor(placement)
        stack.callback(self._inner.close)
        self._leading = LeadExecutor(self.config, self._inner, self._lead, placement.learner)
        weights = WeightsOfRanks(self._lead, self._inner)
        self._loop.run(agree_on_model(self._address, placement, self._task.layout, weights, frozen))
        stack.callback(lambda: self._place.close())
        self._begin(placement)

    def _agree_with_ranks(self) -> None:
        mine, others = self._profile(), self._lead.profiles()
        for rank, other in sorted(others.items()):
            for what, own, theirs in (("model", mine.model, other.model), ("optimizer", mine.optimizer, other.optimizer)):
                if own != theirs:
                    raise ConfigError(
                        f"ranks 0 and {rank} of this learner have another {what}: all ranks must build the same, with the same "
                        f"names, shapes, dtypes and options (pipeline stages are not supported)"
                    )
        agreed = Agreed(tuple(profile.boxes for profile in (mine, *(others[rank] for rank in sorted(others)))))
        self._lead.tell(agreed)
        self._world = _boxes_of(agreed)

    def _profile(self) -> Profile:
        entries = walk(self._model)
        model = [(e.names, str(e.tensor.dtype), tuple(e.tensor.shape), e.parameter, e.trainable) for e in entries]
        boxes = {e.name: box for e in entries if (box := box_of(e.name, e.tensor)) is not None}
        return Profile(self.rank, _digest(model), _optimizer_digest(self._model, self._optimizer), dict(boxes))

    def _make_executor(self, placement: Placement) -> None:
        self._inner = RankExecutor(
            self._task, placement.learner, self.rank, self._world, model=self._model, optimizer=self._optimizer,
            device=self._device, snapshots=SavedParts(self._resume) if self._resume is not None else None,
            may_shrink=self._may_shrink,
        )  # fmt: skip

    def _executor(
        self, placement: Placement, snapshots: LearnerSnapshots, stack: contextlib.ExitStack
    ) -> tuple[Executor, Callable[[Message, Payload], Payload]]:
        self._leading.snapshots = snapshots
        remove_rank_parts(snapshots.directory)  # of incarnations before, which may have had more ranks
        stack.callback(lambda: self._lead.write_within(self.config.limits.leave_seconds))
        return self._leading, self._leading.arriving

    def _spool(self, directory: Path) -> Path | None:
        """Rank 0 never holds the whole state of a learner in memory, neither its own nor a peer's."""
        self._lead.spool_into(directory)
        self._leading.spool = directory
        return directory

    def _reads_into(self) -> Tensor | None:
        """Rank 0 cuts a fragment and drops it, and keeps its own piece. In new memory pieces would come to lie where fragments
        were, so that the next fragment fits nowhere: rank 0's memory grew by a third of the model by that."""
        return torch.empty(self._largest_fragment())

    def _started(self, live: LiveLearner) -> None:
        self._live = LeadingLearner(live, self._leading, self._lead)

    # ------------------------------------------------------------ steps

    def _report(self, done: StepDone | None) -> bool:
        if world()[1] != self.ranks:
            raise RunFailed(
                f"the process group had {self.ranks} ranks in atoll.join and has {world()[1]}: leave the `with` statement, and "
                f"join again"
            )
        checks.reshard(self._sharded)
        return bool(self._live.step_done(done))  # type: ignore[arg-type]

    def _check_first_step(self) -> None:
        checks.reshard(self._sharded)
        super()._check_first_step()
        _refuse_local_moments(self._optimizer)
        for parameter, state in self._optimizer.state.items():
            if is_dtensor(parameter) and isinstance(state, dict) and (held := state.keys() & set(MASTER_KEYS)):
                raise ConfigError(
                    f"the optimizer keeps its own copy of sharded weights ({min(held)}), which a new version would not reach: "
                    f"train fp32 parameters with a mixed precision policy instead"
                )

    # ------------------------------------------------------------ the end

    def _leave_on_exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.rank == 0:
            super()._leave_on_exit(kind, error, trace)
            return
        self._current = None
        reason = f"its loop ended by {kind.__name__}: {error}" if kind is not None else "its loop ended"
        self._member.end(reason, failed=kind is not None, seconds=self.config.limits.leave_seconds)

    def _end_ranks(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        reason = f"rank 0 of this learner: its loop ended by {kind.__name__}: {error}" if kind is not None else "over"
        self._lead.close(reason, failed=kind is not None)


def _boxes_of(agreed: Agreed) -> dict[int, Boxes]:
    return {rank: {name: Box(*box) for name, box in boxes.items()} for rank, boxes in enumerate(agreed.boxes)}


def _refuse_local_moments(optimizer: torch.optim.Optimizer) -> None:
    """Which part of the whole such a tensor is, nobody could say."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if is_dtensor(parameter) and isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.numel() > 1 and not is_dtensor(value):
                raise ConfigError(
                    f"the optimizer keeps {key} of a sharded parameter as a plain tensor, which no other layout could take over: "
                    f"create it like the parameter (torch.zeros_like)"
                )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _optimizer_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    names: Mapping[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        options = {key: str(value) for key, value in sorted(group.items()) if key != "params"}
        groups.append([options, [names.get(id(parameter), "") for parameter in group["params"]]])
    return _digest([type(optimizer).__name__, groups])
