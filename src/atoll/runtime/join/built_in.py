"""The built-in learner on several ranks: the run's own model and data, in DistributedDataParallel or sharded by FSDP2.

Every rank draws the learner's whole batch, which is a pure function of the step, and trains its own samples of it. To the run it
is one learner with one machine, like a loop of the user's under `atoll.join`; only the model, the optimiser and the batches are
the recipe's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from atoll.config import Config, from_builtins
from atoll.errors import ConfigError, UserError
from atoll.executor.compute import loss_of, resolved, warm_up
from atoll.executor.cuda.ahead import BatchPosition, micro_batches
from atoll.executor.cuda.transfer import each_tensor, to_device
from atoll.executor.environment import use_threads
from atoll.executor.optim.build import build_optimizer, clip_gradients, divisors, optimizer_step, step_at_rate
from atoll.protocol.vocabulary import InnerStep, StepDone
from atoll.runtime.join import checks
from atoll.runtime.join.ranked import RankedLearner
from atoll.runtime.join.resharded import move_into
from atoll.runtime.learner.address import request_place
from atoll.runtime.learner.leaving import LeaveRequests
from atoll.runtime.learner.place import kept_place
from atoll.runtime.learner.process import LOG_EVERY_SECONDS, Launcher, WorkerOptions, task_for_placement
from atoll.runtime.loop import LoopThread
from atoll.runtime.ranks.group import TorchGroup, digest_of
from atoll.runtime.ranks.launch import leave_signals_to_rank_0
from atoll.runtime.ranks.leading import LeadingLearner
from atoll.runtime.ranks.member import RankMember
from atoll.runtime.ranks.messages import Reform
from atoll.runtime.ranks.rendezvous import world
from atoll.runtime.syncer.places import Placement
from atoll.tasks.task import Task
from atoll.tensors.access import named_tensors
from atoll.tensors.inventory import frozen_parameters
from atoll.workload.data.allowed import allowed_folders, refuse_outside
from atoll.workload.data.seeds import generator

log = logging.getLogger("atoll.learner")



def run_rank(options: WorkerOptions, parallel: str) -> bool:
    """One rank; every process of the group that the environment describes calls it. Returns as `run_worker` does."""
    if int(os.environ.get("RANK", "0")) > 0:
        leave_signals_to_rank_0()
    use_threads(options.threads)
    device = _own_device(options.device)
    group = TorchGroup()
    with group.forming():
        torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        return _run(options, parallel, device, group)
    finally:
        torch.distributed.destroy_process_group()


def _run(options: WorkerOptions, parallel: str, device: torch.device, group: TorchGroup) -> bool:
    rank, ranks = world()
    leaving = LeaveRequests(
        options.leave_seconds, [options.leave_file] if options.leave_file is not None else [], returns=options.out is not None
    )
    if rank == 0:
        leaving.listen_to_signals()
    folders = allowed_folders(options.data_folders)
    placement = _place_of_all(options, rank)
    config = from_builtins(placement.config)
    refuse_unfit(config, parallel)
    refuse_outside(config.data, folders)
    task = task_for_placement(config, placement, options.allowed)
    plain = task.build().to(device)
    shape = mesh_shape(parallel, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    with group.forming():
        ranks_model = RanksModel(parallelised(plain, parallel, device, shape), parallel, shape, group)
    optimizer = build_optimizer(config, dict(plain.named_parameters()), task.layout.fragments)
    learner = BuiltInRanks(options, task, placement, plain, optimizer, leaving, ranks_model)
    launcher = Launcher(options.obey_stdin and rank == 0)
    launcher.when_orphaned(lambda: learner.leave("its launcher is gone"))
    with learner:
        learner.train(launcher)
    log.info("rank %d of %d: the run is over for this learner at outer step %d", rank, ranks, learner.outer_step)
    return leaving.asked and not learner.finished


@dataclass
class RanksModel:
    """The model as the ranks train it, and how."""

    wrapped: nn.Module | None
    parallel: str
    shape: tuple[int, ...]
    """Of the mesh: replicas and the ranks of one; under fsdp2 these alone."""
    group: TorchGroup


class BuiltInRanks(RankedLearner):
    def __init__(
        self, options: WorkerOptions, task: Task, placement: Placement, model: nn.Module, optimizer: torch.optim.Optimizer,
        leaving: LeaveRequests, ranks_model: RanksModel,
    ) -> None:  # fmt: skip
        super().__init__(
            options.address, model, optimizer, wants=options.wants, out=options.out, metrics=options.metrics, leaving=leaving,
            resume=options.resume,
        )  # fmt: skip
        self._given = placement
        self._own_task = task
        self._form = ranks_model
        on_host = checks.device_of(named_tensors(model)).type == "cpu"  # NCCL was not tried
        self._may_shrink = ranks_model.parallel != "fsdp2" and self.ranks > 1 and on_host

    def _connect(self, stack: contextlib.ExitStack) -> None:
        super()._connect(stack)
        if not self._may_shrink:
            return
        if isinstance(self._live, LeadingLearner):
            self._lead.unblock = self._form.group.leave
            self._live.go_on_without(self._form.shape[-1] if self._form.parallel == "hsdp" else 1, self._timeout)
        else:
            self._member.unblock = self._form.group.leave

    def _request_place(self) -> Placement:
        return self._given

    def _task_for(self, placement: Placement) -> Task:
        return self._own_task

    def _agree_with_syncer(self, placement: Placement, frozen: str) -> None:
        """The syncer has built the same model from the same recipe."""

    @property
    def finished(self) -> bool:
        """On rank 0: the run is over, and this learner has heard so."""
        return isinstance(self._live, LeadingLearner) and self._live.finished

    # ------------------------------------------------------------ training

    def train(self, launcher: Launcher) -> None:
        compute = resolved(self.config, self._device)
        if self.config.model.compile == "auto":  # a compiled step of several ranks was never measured
            compute = compute._replace(compiled=False)
        loss = loss_of(self._task.loss, compute, self._device)
        if compute.compiled:
            batch = to_device(self._samples(self._task.batch(self.id, self.id, 0)), self._device)
            assert self._form.wrapped is not None
            warm_up(self._form.wrapped, loss, batch, self.config.model.name)
        if self.rank == 0:
            log.info("inner steps run on %d ranks, on %s in %s", self.ranks, self._device, compute)
        logged_at = time.monotonic()
        while not self.over and (step := self._current) is not None:
            began = time.monotonic_ns()
            mean = self._inner_step(loss, step)
            if mean is None:
                if not self._go_on_smaller():
                    log.info("rank %d of this learner: a rank of its replica is lost, and the others go on without it", self.rank)
                    return
                continue
            launcher.delay(time.monotonic_ns() - began)
            self.step()
            if self.rank == 0 and time.monotonic() - logged_at > LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                log.info("local step %d, step %d of the run, loss %.4f", step.local_step, step.outer_step, float(mean))

    def _inner_step(self, loss: Any, step: InnerStep) -> Tensor | float | None:
        """None: a rank was lost before all had their gradients, and no rank has taken the step. After that a rank needs no other
        one to take it. So those that are left have the same weights and moments, whenever a rank is lost."""
        if not self._may_shrink:
            mean = self._gradients(loss, step)
            optimizer_step(self.config, self._optimizer, step.outer_step)
            return mean
        live = self._live
        assert isinstance(live, LeadingLearner | RankMember)
        if live.has_lost:
            return None
        try:
            mean = self._gradients(loss, step)
            clip_gradients(self.config, self._optimizer)
        except RuntimeError as error:
            if not live.await_loss(error):
                raise
            return None
        if not live.ready(StepDone(self._counts.tokens, self._counts.samples, 0, self._counts.mean_loss())):
            return None
        step_at_rate(self.config, self._optimizer, step.outer_step)
        return mean

    def _gradients(self, loss: Any, step: InnerStep) -> Tensor | float:
        """Every rank's gradient counts by its tokens: torch takes the mean over ranks, and their samples may differ by one."""
        model = self._form.wrapped
        assert model is not None
        seed = generator("inner step", self.config.seed, step.stream, step.batch, self.rank).initial_seed()
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        if not model.training:
            model.train()
        batches = micro_batches(self._task, self.id, BatchPosition(step.stream, step.batch, step.share))
        totals = [self._task.count(batch)[0] for batch in batches]
        mean: Tensor | float = 0.0
        for micro, (batch, part) in enumerate(zip(batches, divisors(totals), strict=True)):
            own = self._samples(batch)
            tokens, samples = self._task.count(own)
            with _gradients_stay(model, last=micro + 1 == len(batches)):
                own_loss = loss(model, to_device(own, self._device))
                (own_loss * (self.ranks * tokens / totals[micro] / part)).backward()
            self.count(tokens, own_loss, samples)
            mean = mean + own_loss.detach() / part
        return mean

    # ------------------------------------------------------------ the loss of ranks

    def _go_on_smaller(self) -> bool:
        """False: this rank is not needed in the smaller group. The step is begun anew."""
        assert isinstance(self._live, LeadingLearner | RankMember)
        self._forget_counts()
        self._optimizer.zero_grad(set_to_none=True)
        self._form.wrapped = None
        gc.collect()  # the hooks of the wrapper before end with it
        return self._live.regroup(self._form.group, self._in_group)

    def _in_group(self, note: Reform, store: Any) -> str:
        """The same model in the smaller group; a digest of its weights and moments."""
        place = note.order.index(0 if isinstance(self._live, LeadingLearner) else self._member.rank)
        self._form.group.form(store, place, len(note.order))
        self.rank, self.ranks = world()
        if self._form.parallel == "ddp":
            self._form.wrapped = parallelised(self._model, "ddp", self._device, (), synced=True)
            return digest_of(self._optimizer)
        shards = self._form.shape[-1]
        plain = self._task.build().to(self._device)
        self._form.wrapped = parallelised(plain, self._form.parallel, self._device, (self.ranks // shards, shards))
        move_into(self._model, plain, self._optimizer)
        self._model, self._tensors, self._sharded = plain, named_tensors(plain), checks.sharded_modules(plain)
        self._frozen = frozen_parameters(plain)
        self._inner.rebind(plain)
        return digest_of(self._optimizer)

    def _samples(self, batch: Any) -> Any:
        """This rank's."""
        samples = self._task.count(batch)[1]
        if samples < self.ranks:
            raise ConfigError(f"a batch of {samples} samples cannot be divided among {self.ranks} ranks: raise data.batch_size")
        return each_tensor(batch, lambda tensor: tensor[self.rank :: self.ranks] if tensor.dim() else tensor)


# ---------------------------------------------------------------- the ranks


def refuse_unfit(config: Config, parallel: str) -> None:
    """What a learner of several ranks cannot do."""
    p = config.protocol
    for unfit, why in (
        (p.contribution == "gradient", f"preset {config.preset!r} has one process a learner: leave out --ranks"),
        (p.freeze_not_due, "key protocol.freeze_not_due: is not for learners of several ranks; leave out --ranks"),
        (parallel != "ddp" and config.inner.optimizer == "Muon",
         f"key inner.optimizer = 'Muon': turns whole matrices, and {parallel} gives a rank a part of them; say --parallel ddp"),
    ):  # fmt: skip
        if unfit:
            raise UserError(why)


def parallelised(
    model: nn.Module, parallel: str, device: torch.device, shape: tuple[int, ...], *, synced: bool = False
) -> nn.Module:
    """What the loss is computed with. Else than under ddp the model itself is changed: its parameters become sharded ones.
    `synced`: all ranks have the same weights already."""
    if parallel == "ddp":
        return DistributedDataParallel(model, init_sync=not synced)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            if not any(isinstance(inside, nn.ModuleList) for inside in block.modules()):
                fully_shard(block, mesh=mesh)
                if hasattr(block, "with_balance"):  # what the decoder calls of its blocks in place of `forward`
                    register_fsdp_forward_method(block, "with_balance")
    fully_shard(model, mesh=mesh)
    return model


def mesh_shape(parallel: str, ranks: int, of_machine: int) -> tuple[int, ...]:
    """Under hsdp the ranks of a machine share the model, and machines hold the same; on one machine, two halves of its ranks."""
    if parallel != "hsdp":
        return (ranks,)
    groups, rest = divmod(ranks, of_machine) if 0 < of_machine < ranks else (2, ranks % 2)
    if rest:
        raise UserError(f"--parallel hsdp: {ranks} ranks are not two or more groups of one size; give an even number of ranks")
    return groups, ranks // groups


@contextlib.contextmanager
def _gradients_stay(model: nn.Module, *, last: bool) -> Any:
    """Ranks exchange the gradients of the last micro-batch only, with those before it in them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    with contextlib.nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
        yield


def _place_of_all(options: WorkerOptions, rank: int) -> Placement:
    """Rank 0 asks for the place; the others are told which, without its keys."""
    told: list[Any] = [None]
    if rank == 0:
        loop = LoopThread()
        try:
            placement: Placement = loop.run(
                request_place(options.address, options.wants, random.Random(), kept_place(options.out))
            )
        except BaseException as error:
            torch.distributed.broadcast_object_list([str(error)], src=0)
            raise
        finally:
            loop.stop()
        shown = msgspec.structs.replace(placement, key="", place_key="")
        torch.distributed.broadcast_object_list([msgspec.json.encode(shown)], src=0)
        return placement
    torch.distributed.broadcast_object_list(told, src=0)
    if isinstance(told[0], str):
        raise UserError(f"rank 0 of this learner: {told[0]}")
    return msgspec.json.decode(told[0], type=Placement)


def _own_device(name: str) -> torch.device:
    """Each rank of a machine has a GPU of its own."""
    if name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name != "cuda" or not torch.cuda.is_available() or local >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UserError(
            f"--device {name}: ranks take 'cpu', or 'cuda' with a GPU for each rank of a machine; there are {found} here"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)

