"""Checks a peer's recovery state before a learner loads it: a newcomer takes all of its training state from one other learner.

What is checked: that the versions named can be; names, shapes and dtypes of weights, buffers, anchors and optimiser state; that
all of it is finite, and that second moments and step counts are not negative; that anchors are the announced bytes, where the
newcomer knows these (the syncer sends digests with the ticket, and what it announced since is here); and that the weights are
near the anchors. What cannot be checked is the training itself: a peer may have trained badly, within these bounds.

Hyper-parameters (learning rate, betas, maximize and so on) and tensors that are not exchanged are never taken from a peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.config import Config
from atoll.executor.optim.build import state_keys
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import StateTransfer
from atoll.store.durable import is_anchor
from atoll.tensors.access import is_finite, read_buffers, read_params
from atoll.tensors.layout import Fragment

Announcements: TypeAlias = Mapping[FragmentId, tuple[OuterStep, Tensor, Tensor]]
Digests: TypeAlias = Mapping[FragmentId, Mapping[OuterStep, str]]

NOT_NEGATIVE = frozenset({"step", "exp_avg_sq", "max_exp_avg_sq"})
"""Optimiser state whose root is taken, or that is an exponent: one negative number makes the next step NaN."""
DETAIL_MAX = 300
STATE_BYTES_PER_PARAMETER = 256
"""Weights, anchors, the start of the round, announced versions and AdamW's moments are 28 bytes a parameter in fp32. A user's own
optimiser may keep more."""


class _Flaw(Exception):
    def __init__(self, words: str, why: Why = Why.BAD_STATE) -> None:
        self.reason = Reason(why, words[:DETAIL_MAX])


def state_bytes_max(fragments: Iterable[Fragment]) -> int:
    """A larger state is not a peer's, and is not received."""
    return (64 << 20) + STATE_BYTES_PER_PARAMETER * sum(f.numel + f.buffer_numel for f in fragments)


class PeerStateCheck:
    def __init__(
        self, config: Config, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *,
        users_own: bool,
    ) -> None:  # fmt: skip
        """`users_own`: learners may have different optimisers, so one that does not fit is nobody's fault."""
        self._config = config
        self._fragments = fragments
        self._tensors = tensors
        self._optimizer = optimizer
        self._misfit = Why.OTHER_OPTIMIZER if users_own else Why.BAD_STATE

    def flaw(self, body: StateTransfer, state: Any, kept: Announcements) -> Reason | None:
        """`kept`: what the syncer announced to this learner meanwhile."""
        try:
            self._check(body, state, kept)
        except _Flaw as found:
            return found.reason
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
            return Reason(Why.BAD_STATE, f"it is not a learner's state ({type(error).__name__}: {error})"[:DETAIL_MAX])
        return None

    def _check(self, body: StateTransfer, state: Any, kept: Announcements) -> None:
        self._check_versions(body)
        if set(state) != {"tensors", "optimizer", "anchors", "round_start", "kept"}:
            raise _Flaw(f"it has the parts {sorted(map(str, state))}")
        self._check_tensors(state["tensors"])
        self._check_optimizer(state["optimizer"])
        self._check_anchors(body, state["anchors"], kept)
        self._check_round_start(state["round_start"])
        self._check_kept(body, state["kept"], kept)
        self._check_drift(state["tensors"], state["anchors"])

    def _check_versions(self, body: StateTransfer) -> None:
        last, pending = self._config.total_steps, dict(body.pending)
        if len(body.held) != len(self._fragments) or not pending.keys() <= set(range(len(self._fragments))):
            raise _Flaw("it names other fragments than the model has")
        if len(pending) != len(body.pending) or not all(version > body.held[p] for p, version in body.pending):
            raise _Flaw("it names announcements twice, or older than what it holds")
        if not all(0 <= version <= last for version in (*body.held, *pending.values())):
            raise _Flaw(f"it names versions beyond 0 to {last}")

    def _check_tensors(self, there: Mapping[str, Tensor]) -> None:
        if there.keys() != self._tensors.keys():
            raise _Flaw(f"it has other tensors than the model: {min(there.keys() ^ self._tensors.keys())}")
        for name, own in self._tensors.items():
            if not isinstance(there[name], Tensor) or (there[name].shape, there[name].dtype) != (own.shape, own.dtype):
                raise _Flaw(f"tensor {name} has another shape or dtype than the model's")
        for fragment in self._fragments:
            for read in (read_params, read_buffers):
                _require_finite(read(there, fragment), f"the weights of fragment {fragment.id}")

    # ------------------------------------------------------------ what the syncer announced

    def _check_anchors(self, body: StateTransfer, anchors: Sequence[Tensor], kept: Announcements) -> None:
        if len(anchors) != len(self._fragments):
            raise _Flaw(f"it has {len(anchors)} anchors for {len(self._fragments)} fragments")
        for fragment, anchor, version in zip(self._fragments, anchors, body.held, strict=True):
            _require_flat(anchor, fragment.numel, f"the anchor of fragment {fragment.id}")
            _require_announced(anchor, version, fragment.id, kept)

    def _check_round_start(self, starts: Sequence[Tensor | None]) -> None:
        if len(starts) != len(self._fragments):
            raise _Flaw("it has other round starts than fragments")
        for fragment, start in zip(self._fragments, starts, strict=True):
            if start is not None:
                _require_flat(start, fragment.numel, f"the round start of fragment {fragment.id}")

    def _check_kept(self, body: StateTransfer, there: Announcements, kept: Announcements) -> None:
        if not set(there) <= set(range(len(self._fragments))) or any(there[p][0] != version for p, version in body.pending):
            raise _Flaw("it keeps other announcements than it names")
        for p, (version, announced, buffers) in there.items():
            _require_flat(announced, self._fragments[p].numel, f"version {version} of fragment {p}")
            _require_flat(buffers, self._fragments[p].buffer_numel, f"the buffers of version {version} of fragment {p}")
            _require_announced(announced, version, p, kept)

    def _check_drift(self, there: Mapping[str, Tensor], anchors: Sequence[Tensor]) -> None:
        """One bound for the whole model: a fragment that starts at zero has no size of its own to compare with."""
        moved = 0.0
        for fragment, anchor in zip(self._fragments, anchors, strict=True):
            weights = read_params(there, fragment)
            moved += _square(weights - anchor.to(weights.device))
        size, factor = sum(map(_square, anchors)), self._config.limits.outlier_factor
        if size > 0 and moved > factor**2 * size:
            far = math.sqrt(moved / size)
            raise _Flaw(f"its weights are {far:.3g} times as far from the anchors as these are large (limits.outlier_factor)")

    # ------------------------------------------------------------ the optimiser

    def _check_optimizer(self, there: Mapping[str, Any]) -> None:
        groups = self._optimizer.param_groups
        numbers = [group["params"] for group in self._optimizer.state_dict()["param_groups"]]
        alike = all(self._optimizer.defaults.keys() <= group.keys() for group in there["param_groups"])
        if [list(group["params"]) for group in there["param_groups"]] != numbers or not alike:
            raise _Flaw("its optimiser has other options or groups of parameters", self._misfit)
        parameters = {
            number: (p, group) for own, group in zip(numbers, groups, strict=True)
            for number, p in zip(own, group["params"], strict=True)
        }  # fmt: skip
        if not set(there["state"]) <= set(parameters):
            raise _Flaw("its optimiser has state of parameters that are not there")
        for number, found in there["state"].items():
            self._check_parameter(number, found, *parameters[number])

    def _check_parameter(self, number: int, found: Any, parameter: Tensor, group: Mapping[str, Any]) -> None:
        known = state_keys(self._optimizer, parameter, group)
        if not isinstance(found, dict) or (found and known is not None and set(found) != known):
            raise _Flaw(f"its optimiser has other state of parameter {number}: {sorted(map(str, found))}", self._misfit)
        for key, value in found.items():
            what = f"the optimiser's {key} of parameter {number}"
            if known is not None and isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                raise _Flaw(f"{what} has another shape than the parameter", self._misfit)
            _require_sound(value, what, not_negative=key in NOT_NEGATIVE)


def wrong_anchor(body: StateTransfer, state: Mapping[str, Any], digests: Digests) -> Reason | None:
    """Against the digests that came with the ticket: of the versions that the source held, and was sent, at that time. It can
    hold a newer one since, but no other of that time or before."""
    anchors = [(p, version, state["anchors"][p]) for p, version in enumerate(body.held)]
    anchors += [(p, version, state["kept"][p][1]) for p, version in body.pending]
    for p, version, tensor in anchors:
        known = digests.get(p, {})
        if version in known and not is_anchor(tensor, known[version]):
            return Reason(Why.BAD_STATE, f"its version {version} of fragment {p} is not the announced one")
        if known and version not in known and version < max(known):
            return Reason(Why.BAD_STATE, f"it names version {version} of fragment {p}, which its sender did not hold")
    return None


def _require_flat(tensor: Any, numel: int, what: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tuple(tensor.shape) != (numel,):
        raise _Flaw(f"{what} is not {numel} numbers in fp32")
    _require_finite(tensor, what)


def _require_announced(tensor: Tensor, version: OuterStep, p: FragmentId, kept: Announcements) -> None:
    mine = kept.get(p)
    if mine is not None and mine[0] == version and not torch.equal(mine[1].cpu(), tensor.cpu()):
        raise _Flaw(f"its version {version} of fragment {p} is not the announced one")


def _require_finite(tensor: Tensor, what: str) -> None:
    if not is_finite(tensor):
        raise _Flaw(f"{what} holds NaN or Inf")


def _require_sound(value: Any, what: str, *, not_negative: bool) -> None:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            _require_sound(inner, what, not_negative=not_negative)
    elif isinstance(value, Tensor):
        if value.is_floating_point():
            _require_finite(value, what)
        if not_negative and value.numel() and float(value.min()) < 0:
            raise _Flaw(f"{what} is negative")
    elif isinstance(value, int | float) and not (math.isfinite(value) and (value >= 0 or not not_negative)):
        raise _Flaw(f"{what} is {value}")


def _square(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
