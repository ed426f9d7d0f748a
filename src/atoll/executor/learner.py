"""A learner's executor: trains, stages, keeps and adopts. Weights are read and written at step boundaries only.

On CUDA the host does not wait for the device at a boundary; `executor.cuda` has that part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.codecs import Packet, codec, encode_with_feedback
from atoll.config.codecs import codec_spec
from atoll.errors import NotFinite
from atoll.executor.compute import BatchLoss, ComputeMode, loss_of, resolved, warm_up
from atoll.executor.cuda.ahead import BatchesAhead, BatchPosition, micro_batches
from atoll.executor.cuda.learner import CudaSide, Key, cuda_device_of
from atoll.executor.cuda.staging import adopt_into, masters_of, read_live
from atoll.executor.cuda.transfer import on_host, to_device
from atoll.executor.eager import EagerShares
from atoll.executor.optim.build import build_optimizer, divisors, optimizer_step
from atoll.executor.overlap import OverlapWork
from atoll.executor.peer_state import PeerStateCheck
from atoll.executor.ranks.state import StateParts
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.interface import CLEAN, Finding, Payload
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adopt,
    Announce,
    ApplyOwnShare,
    Contribution,
    Effect,
    Event,
    InnerStep,
    Keep,
    LearnerState,
    LoadSnapshot,
    LoadState,
    LoadTheta,
    Message,
    Poisoned,
    RecordState,
    Send,
    Stage,
    StateTransfer,
    StateWritten,
    StepDone,
    Unstage,
)  # fmt: skip
from atoll.rules import Schedule
from atoll.store.tensor_files import load_moments, load_optimizer
from atoll.tasks.task import Task
from atoll.tensors.access import cast_like, is_finite, named_tensors, read_buffers, read_params
from atoll.tensors.pieces import BlockSplit
from atoll.workload.data.seeds import generator


class StateStore(Protocol):
    """Stores and loads a learner's side of snapshots."""

    def put_learner(
        self, snapshot: OuterStep, learner: LearnerId, learner_state: LearnerState, state: Any
    ) -> StateWritten | None:
        """None: it is being written, and the store says later what became of it."""
        ...

    def learner_state(self, snapshot: OuterStep, learner: LearnerId) -> Any:
        """A list: the parts of a learner of several ranks."""
        ...


class StagedCopy(NamedTuple):
    """Taken at a step boundary, and encoded only when it is pulled: few staged copies are."""

    effect: Stage
    difference: Tensor
    buffers: Tensor
    residual: Tensor | None


class TensorLearner:
    def __init__(
        self, task: Task, learner: LearnerId, snapshots: StateStore | None = None, *, model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None, resident: bool = False,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`model` and `optimizer`: the user's own, changed in place, never replaced or moved.
        `resident`: the syncer's tensors are on the same device, so nothing is staged through the host.
        `tensors`: by name what this process holds of the model's, if that is not all of them."""
        self._task = task
        self._config = task.config
        self._learner = learner
        self._snapshots = snapshots
        p = self._config.protocol
        self._codec = codec(p.codec_up)
        self._gradients = p.contribution == "gradient"
        self._schedule = Schedule(self._config)
        self._device = device or torch.device("cpu")
        self.model = model if model is not None else task.build().to(self._device)
        self._parameters = named_tensors(self.model)
        self._tensors = self._parameters if tensors is None else tensors
        self._fragments = task.layout.fragments
        self._exchanged = {slot.name for f in self._fragments for slot in (*f.params, *f.buffers)}
        self.optimizer = optimizer or build_optimizer(self._config, dict(self.model.named_parameters()), self._fragments)
        self._cuda: CudaSide | None = None
        gpu = cuda_device_of(self._tensors)
        if gpu is not None and not resident:
            self._device = gpu
            self._cuda = CudaSide(gpu, self._fragments, self.optimizer, self._config.inner.accumulate)
        users_own = optimizer is not None
        self._peer_state = PeerStateCheck(self._config, self._fragments, self._tensors, self.optimizer, users_own=users_own)
        self.anchors: list[Tensor | None] = [None] * len(self._fragments)
        self._round_start: list[Tensor | None] = [None] * len(self._fragments)
        self._kept: dict[FragmentId, tuple[OuterStep, Tensor, Tensor]] = {}
        self._copies: dict[Key, StagedCopy] = {}
        self._staged: dict[Key, tuple[Packet, Tensor, Tensor | None]] = {}
        self._residuals: dict[FragmentId, Tensor] = {}
        self._uncommitted: dict[FragmentId, Tensor] = {}
        self._eager = EagerShares(self._config) if p.eager else None
        self._overlap = OverlapWork() if p.keep_overlap else None
        self._loss: BatchLoss | None = None
        self._ahead: BatchesAhead | None = None
        """From the first inner step on a GPU on: a user's own loop brings its own batches."""

    def prepare(self) -> ComputeMode:
        """Resolves how this learner computes. A compiled step is built here, so that no inner step takes that long."""
        compute = resolved(self._config, self._device)
        self._loss = loss_of(self._task.loss, compute, self._device)
        if compute.compiled:
            batch = to_device(self._task.batch(self._learner, self._learner, 0), self._device)
            warm_up(self.model, self._loss, batch, self._config.model.name)
        return compute

    def close(self) -> None:
        """Removes our hook from the optimiser, which a user's loop goes on using."""
        if self._cuda is not None:
            self._cuda.unhook()
        if self._ahead is not None:
            self._ahead.close()

    # ------------------------------------------------------------ effects

    def execute(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        if isinstance(effect, InnerStep):
            return (self._inner_step(effect),)
        if self._cuda is None:
            return self._carry_out(effect, payload)
        with self._cuda.training_stream():
            return self._carry_out(effect, payload)

    def _carry_out(self, effect: Effect, payload: Payload | None) -> Sequence[Event]:
        match effect:
            case Stage():
                return self._stage(effect) if self._cuda is None else self._stage_on_device(self._cuda, effect)
            case ApplyOwnShare(fragment=fragment):
                self._apply_own_share(fragment)
            case Unstage(fragment=fragment, slot=slot):
                self._drop((fragment, slot))
            case Keep(fragment=fragment, version=version, previous=previous):
                assert payload is not None
                self._keep(fragment, version, previous, payload.content)
            case Adopt():
                self._adopt(effect)
            case LoadTheta(keep_optimizer=keep):
                if not keep:
                    self.optimizer.state.clear()
                self._forget_work()
            case LoadState():
                assert payload is not None
                self._load_state(payload.content)
            case LoadSnapshot(snapshot=snapshot):
                self._load_state(self._saved(snapshot), resumes=True)
            case RecordState(snapshot=snapshot, learner_state=learner_state):
                if self._snapshots is not None:
                    state = self.state(with_residuals=True)
                    written = self._snapshots.put_learner(snapshot, self._learner, learner_state, state)
                    return () if written is None else (written,)
            case _:
                pass
        return ()

    def _inner_step(self, effect: InnerStep) -> StepDone:
        """One optimiser step over `accumulate` micro-batches. Dropout is seeded by (seed, stream, batch)."""
        config, task = self._config, self._task
        self._seed(generator("inner step", config.seed, effect.stream, effect.batch).initial_seed())
        if not self.model.training:  # after an evaluation; walking through all modules in every step takes as long as a small one
            self.model.train()
        if self._loss is None:
            self.prepare()
        assert self._loss is not None
        if self._gradients:
            self.model.zero_grad(set_to_none=True)
        count, place = config.inner.accumulate, BatchPosition(effect.stream, effect.batch, effect.share)
        if self._cuda is not None and self._ahead is None:
            self._ahead = BatchesAhead(self._micro_batches)
        batches = self._micro_batches(place) if self._ahead is None else self._ahead.take(place)
        counts = [task.count(batch) for batch in batches]
        parts = divisors([tokens for tokens, _ in counts])
        total = 0.0
        if self._cuda is not None:
            self._cuda.use_current_stream()
        for micro, batch in enumerate(batches):
            loss = self._loss(self.model, batch if self._device.type == "cpu" else to_device(batch, self._device))
            if self._cuda is not None:
                self._cuda.record_loss(micro, loss)
            (loss / parts[micro] if count > 1 else loss).backward()
            if self._cuda is None:
                total += float(loss.detach()) / parts[micro]
        if not self._gradients:  # in data-parallel mode the syncer steps, on Theta, with all learners' gradients
            if config.protocol.freeze_not_due:
                self._freeze(effect.outer_step)
            optimizer_step(config, self.optimizer, effect.outer_step)
        if self._ahead is not None:
            self._ahead.prepare(place.following())
        tokens, samples = (sum(column) for column in zip(*counts, strict=True))
        return StepDone(tokens, samples, 0, total if self._cuda is None else self._cuda.loss(parts))

    def _micro_batches(self, place: BatchPosition) -> list[Any]:
        return micro_batches(self._task, self._learner, place)

    def _seed(self, seed: int) -> None:
        """Not torch.manual_seed: for every kind of absent device it queues a call with a stack trace, at every step, and the
        queue never empties."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # torch seeds the current device, which need not be this learner's
                torch.cuda.manual_seed(seed)

    def _freeze(self, outer_step: OuterStep) -> None:
        """FedPart: only the fragments that are due next train."""
        fragments = self._schedule.due(self._schedule.next_due(outer_step + 1))
        due = {slot.name for p in fragments for slot in self._fragments[p].params}
        for name, tensor in self._tensors.items():
            if name not in due and isinstance(tensor, torch.nn.Parameter):
                tensor.grad = None

    # ------------------------------------------------------------ staging

    def _stage(self, effect: Stage) -> Sequence[Event]:
        """Takes only the difference at the boundary, and its residual, which an adoption would replace. A pull encodes it, while
        the next step runs."""
        p = effect.fragment
        self._drop((p, effect.slot))  # if this copy holds NaN, an older one must not be sent in its place
        difference = self._difference(p)
        buffers = read_buffers(self._tensors, self._fragments[p])
        if poison := self._poison(p, difference, buffers):
            return (Poisoned(poison),)
        self._copies[p, effect.slot] = StagedCopy(effect, difference, buffers, self._residual(p))
        if self._overlap is not None:
            self._overlap.staged((p, effect.slot), read_live(self._fragments[p], self._tensors, self._masters(p)))
        if self._eager is not None:
            self._eager.staged(p, difference)
        if effect.restart:
            self._round_start[p] = read_params(self._tensors, self._fragments[p])
        return ()

    def _encoded(self, key: Key) -> tuple[Packet, Tensor, Tensor | None] | None:
        """None if nothing is staged, or if a finite difference plus the residual is not finite and cannot be encoded."""
        copied = self._copies.pop(key, None)
        if copied is not None:
            rng, residual = self._rounding(copied.effect), None
            with suppress(NotFinite):
                if self._config.protocol.error_feedback:
                    packet, residual = encode_with_feedback(self._codec, copied.difference, copied.residual, rng=rng)
                else:
                    packet = self._codec.encode(copied.difference, rng=rng)
                self._staged[key] = (packet, copied.buffers, residual)
        return self._staged.get(key)

    def _masters(self, p: FragmentId) -> dict[str, Tensor]:
        return masters_of(self._fragments[p], self._tensors, self.optimizer)

    def _drop(self, key: Key) -> None:
        self._copies.pop(key, None)
        self._staged.pop(key, None)
        if self._overlap is not None:
            self._overlap.drop(key)
        if self._cuda is not None:
            self._cuda.drop(key)

    def _stage_on_device(self, cuda: CudaSide, effect: Stage) -> Sequence[Event]:
        """NaN and Inf are found once the device is done: by the sending thread, or here at the next boundary."""
        p = effect.fragment
        fragment = self._fragments[p]
        tensors, before = self._tensors, self._round_start[p]
        if self._gradients:
            tensors, before = {**tensors, **{slot.name: _gradient(tensors[slot.name]) for slot in fragment.params}}, None
        elif before is None:
            before = self.anchors[p]
            assert before is not None
        if self._eager is not None:
            assert before is not None, "eager updates and gradients exclude each other (config/checks.py)"
            cuda.stager.settle()
            self._eager.staged(p, cast_like(fragment, before).to(self._device) - read_params(self._tensors, fragment))
        poisons = cuda.poisons()
        masters = self._masters(p) if self._overlap is not None else {}
        staged = cuda.stager.stage(
            fragment, tensors, before, self._codec, rng=self._rounding(effect),
            keep_weights=effect.restart or (self._overlap is not None and not masters),
            feedback=self._config.protocol.error_feedback, residual=self._residual(p), split=self._split_of(p),
        )  # fmt: skip
        cuda.put((p, effect.slot), staged)
        if self._overlap is not None:
            self._overlap.staged((p, effect.slot), read_live(fragment, tensors, masters) if masters else staged)
        if effect.restart:
            self._round_start[p] = staged.weights
        return tuple(Poisoned(where) for where in poisons)

    def _split_of(self, p: FragmentId) -> BlockSplit | None:
        """How ranks divide the packet; None: all of it is this process's."""
        return None

    def _residual(self, p: FragmentId) -> Tensor | None:
        """Added to the next packet."""
        residual, decay = self._not_carried(p), self._config.protocol.feedback_decay
        return residual if residual is None or decay == 1.0 else residual * decay

    def _not_carried(self, p: FragmentId) -> Tensor | None:
        """A packet that was sent and not yet acknowledged is assumed merged, as nearly all are: on a slow downlink the next one
        leaves before that version is adopted, and would otherwise carry the same values twice."""
        sent = self._uncommitted.get(p) if self._cuda is None else self._cuda.residual_sent(p)
        return self._residuals.get(p) if sent is None else sent

    def _rounding(self, effect: Stage) -> torch.Generator | None:
        """Resident tensors use a generator of their device."""
        if not (self._config.protocol.stochastic_rounding or codec_spec(self._codec.name).random):
            return None
        rng = self._rounding_on_host(effect)
        if self._cuda is not None or self._device.type == "cpu":
            return rng
        return torch.Generator(self._device).manual_seed(rng.initial_seed())

    def _rounding_on_host(self, effect: Stage) -> torch.Generator:
        return generator("rounding", self._config.seed, self._learner, effect.fragment, effect.local_step)

    def _difference(self, p: FragmentId) -> Tensor:
        """Before minus after, the sign of an outer gradient. In data-parallel mode, the gradient itself."""
        fragment = self._fragments[p]
        if self._gradients:
            return read_params({slot.name: _gradient(self._tensors[slot.name]) for slot in fragment.params}, fragment)
        before = self._round_start[p]
        if before is None:
            anchor = self.anchors[p]
            assert anchor is not None
            before = cast_like(fragment, anchor)
        return before - read_params(self._tensors, fragment)

    def _poison(self, p: FragmentId, difference: Tensor, buffers: Tensor) -> str:
        """The place of a NaN or Inf; "" if all values are finite."""
        if is_finite(difference) and is_finite(buffers):
            return ""
        for flat, slots in ((difference, self._fragments[p].params), (buffers, self._fragments[p].buffers)):
            for slot in slots:
                if not bool(torch.isfinite(flat[slot.offset : slot.offset + slot.numel]).all()):
                    return f"tensor {slot.name}"
        return f"fragment {p}"

    # ------------------------------------------------------------ adopting

    def _keep(self, p: FragmentId, version: OuterStep, previous: OuterStep, content: tuple[Packet | Tensor, Tensor]) -> None:
        sent, buffers = content
        base = self.anchors[p]
        assert not isinstance(sent, Packet) or (base is not None and previous != NO_VERSION)
        if self._cuda is not None:
            announced, buffers = self._cuda.prefetch(p, sent, buffers, base)
        elif isinstance(sent, Packet):
            assert base is not None
            announced = base + codec(sent.codec).decode(sent)
        else:
            announced = sent
        self._kept[p] = (version, announced, buffers)

    @property
    def arriving(self) -> Callable[[Message, Payload], Payload] | None:
        """To be called by the receiving thread, before the machine sees the message. None on a CPU: there is nothing to do."""
        cuda = self._cuda
        if cuda is None:
            return None
        return lambda body, payload: payload if isinstance(body, StateTransfer) else cuda.arriving(payload)

    def _adopt(self, effect: Adopt) -> None:
        p = effect.fragment
        fragment = self._fragments[p]
        version, announced, buffers = self._kept.pop(p)
        assert version == effect.version
        self.anchors[p] = announced
        own = None if self._overlap is None else self._overlap.taken_for(p, version, keeps=effect.keeps)
        if self._cuda is not None:
            self._cuda.adopt(fragment, self._tensors, announced, buffers, effect.alpha, self.optimizer, own)
            residual = self._cuda.residual_of(p, merged=effect.merged)
        else:
            adopt_into(fragment, self._tensors, announced, buffers, effect.alpha, self.optimizer, own)
            residual = self._uncommitted.pop(p, None)
        if self._config.protocol.anchor == "round_start":
            self._round_start[p] = read_params(self._tensors, fragment)
        if residual is not None and effect.merged:
            self._residuals[p] = residual
        if not self._config.inner.preserve_optimizer_state:
            for slot in fragment.params:
                self.optimizer.state.pop(self._parameters[slot.name], None)

    def _apply_own_share(self, p: FragmentId) -> None:
        """The anchor stays the announced version: what is added is this learner's alone."""
        assert self._eager is not None
        step, anchor, fragment = self._eager.take(p), self.anchors[p], self._fragments[p]
        if step is None or anchor is None:
            return
        if self._cuda is not None:  # the version is on its way to the host, and copies of the weights are being read
            self._cuda.stager.settle()
            self._cuda.stager.before_optimizer_step()
        adopt_into(fragment, self._tensors, anchor.to(step.device) + step, torch.empty(0), 0.0, self.optimizer)
        self._round_start[p] = read_params(self._tensors, fragment)

    # ------------------------------------------------------------ state, for peers and snapshots

    def state(self, *, with_residuals: bool = False) -> dict[str, Any]:
        """A copy on the host: what a peer needs, and for snapshots the residuals too. Not the RNG state or the position in the
        data: both follow from (seed, stream, batch), and the protocol holds (stream, batch)."""
        if self._cuda is not None:
            self._cuda.stager.settle()
        state: dict[str, Any] = {
            "tensors": {name: on_host(tensor) for name, tensor in self._tensors.items()},
            "optimizer": on_host(self._optimizer_state()),
            "anchors": list(self.anchors),
            "round_start": [tensor if tensor is None else tensor.cpu() for tensor in self._round_start],
            "kept": dict(self._kept),
        }
        if with_residuals:
            left = [(p, self._not_carried(p)) for p in range(len(self._fragments))]
            state["residuals"] = {p: residual.cpu() for p, residual in left if residual is not None}
            if self._eager is not None:
                state["eager"] = self._eager.record()
        return state

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _saved(self, snapshot: OuterStep) -> dict[str, Any]:
        """A learner of several ranks stores its state in parts, and may come back as one process."""
        assert self._snapshots is not None
        found = self._snapshots.learner_state(snapshot, self._learner)
        return StateParts(found if isinstance(found, list) else [found], self._fragments).whole()

    def _load_state(self, state: dict[str, Any], *, resumes: bool = False) -> None:
        """From a peer, or from this learner's snapshot: then residuals are part of it, and versions are announced again. A peer's
        hyper-parameters are not taken, and neither are tensors that are not exchanged: these are the same on every learner."""
        cuda = self._cuda
        if cuda is not None:
            cuda.stager.before_optimizer_step()
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if resumes or name in self._exchanged:
                    tensor.copy_(state["tensors"][name])
        self.optimizer.state.clear()
        if resumes:
            load_optimizer(self.optimizer, state["optimizer"])
        else:
            load_moments(self.optimizer, state["optimizer"]["state"])
        self.anchors = list(state["anchors"]) if cuda is None else cuda.pinned(list(state["anchors"]))
        self._forget_work()
        # Both come through the host; resident tensors must be on the device where they are subtracted.
        starts, residuals = list(state["round_start"]), dict(state.get("residuals", {}))
        self._round_start = [t if t is None else t.to(self._device) for t in starts] if cuda is None else cuda.on_device(starts)
        if resumes:
            here = {p: residual.to(self._device) for p, residual in residuals.items()}
            self._residuals = here if cuda is None else cuda.pinned(residuals)
            if self._eager is not None:
                self._eager.restore(state["eager"], self._device)
            return
        kept: dict[FragmentId, tuple[OuterStep, Tensor, Tensor]]
        kept = dict(state["kept"]) if cuda is None else cuda.pinned(state["kept"])
        for p, mine in self._kept.items():
            if p not in kept or kept[p][0] < mine[0]:
                kept[p] = mine
        self._kept = kept

    def _forget_work(self) -> None:
        """After a recovery the residual is zero: it belonged to weights that are gone."""
        self._residuals.clear()
        self._uncommitted.clear()
        self._copies.clear()
        self._staged.clear()
        if self._eager is not None:
            self._eager.clear()
        if self._overlap is not None:
            self._overlap.clear()
        if self._cuda is not None:
            self._cuda.forget_work()

    def inspect(self, body: Message, payload: Payload) -> Finding:
        """Checksums prove that the bytes are those sent; this checks that they are for a model of these sizes, and a peer's state
        in full."""
        if isinstance(body, StateTransfer):
            if self._cuda is not None:
                self._cuda.stager.settle()
            return Finding(self._peer_state.flaw(body, payload.content, dict(self._kept)))
        if isinstance(body, Announce) and isinstance(payload.content, tuple):
            sent, buffers = payload.content
            fragment = self._fragments[body.fragment]
            numel = sent.numel if isinstance(sent, Packet) else sent.numel()
            if (numel, buffers.numel()) != (fragment.numel, fragment.buffer_numel):
                words = f"fragment {body.fragment} has {fragment.numel} parameters here and {numel} there"
                return Finding(Reason(Why.POISONED, words))
        return CLEAN

    def answers(self, p: FragmentId, outer_step: OuterStep) -> None:
        """The staged copy is sent for this outer step."""
        if self._overlap is not None:
            self._overlap.sent(p, outer_step)

    def payload_for(self, send: Send) -> Payload | None:
        body = send.envelope.body
        if isinstance(body, Contribution):
            key = (body.fragment, body.outer_step)
            self.answers(*key)
            if self._cuda is not None:
                return self._cuda.payload([key, (body.fragment, NO_VERSION)], feedback=self._config.protocol.error_feedback)
            staged = self._encoded(key if key in self._copies or key in self._staged else (body.fragment, NO_VERSION))
            if staged is None:
                return Payload("packet", 0, None)  # NaN or Inf: there is nothing to send, and the syncer refuses this
            packet, buffers, residual = staged
            if residual is not None:
                self._uncommitted[body.fragment] = residual
            return Payload("packet", packet.nbytes + 4 * buffers.numel(), (packet, buffers))
        if isinstance(body, StateTransfer):
            with nullcontext() if self._cuda is None else self._cuda.training_stream():
                state = self.state()
            return Payload("state", _state_bytes(state), state)
        return None


def _gradient(parameter: Tensor) -> Tensor:
    """Zero for a parameter without a gradient: it took no part in the loss."""
    return torch.zeros((), device=parameter.device).expand_as(parameter) if parameter.grad is None else parameter.grad


def _state_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_state_bytes(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_state_bytes(v) for v in value)
    return 8
