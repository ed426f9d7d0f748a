"""What was tried for the gap with eight learners and is no part of Atoll: merges by name, and learners that share moments.

`train.py` registers the merges, so that `--set protocol.merge=spectral` names one; `--share-moments` is the other. What they gave
is in docs/research/results.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.executor.fleet.executor import FleetExecutor, FleetLearner
from atoll.executor.optim.muon import orthogonal
from atoll.extend import MergeSpec, register_merge
from atoll.ids import SYNCER, Incarnation, WorkerId
from atoll.protocol.interface import Executor
from atoll.protocol.vocabulary import Adopt

BUFFER = "momentum_buffer"


# ---------------------------------------------------------------- merges


def _mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total.add_(delta, alpha=weight)
    return total.div_(sum(weights))


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm() + 1e-12)


def _magnitude(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([delta.norm() * weight for delta, weight in zip(deltas, weights, strict=True)]).sum() / sum(weights)


def spectral(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Of a matrix the orthogonal factor of the mean, as long as the mean. A mean shrinks directions by how little learners agree
    on them; this takes all of them alike, as Muon does."""
    mean = _mean(deltas, weights)
    return _unit(orthogonal(mean)) * mean.norm() if mean.dim() == 2 else mean


def spectral_long(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The same, as long as the learners' outer gradients are on average."""
    mean = _mean(deltas, weights)
    return _unit(orthogonal(mean)) * _magnitude(deltas, weights) if mean.dim() == 2 else mean


def halved(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Half of the mean: an outer rate of its own for embeddings."""
    return _mean(deltas, weights) / 2


def register() -> None:
    register_merge(MergeSpec(name="spectral", summary="the orthogonal factor of the mean, as long as the mean"), spectral)
    long = MergeSpec(name="spectral_long", summary="the orthogonal factor of the mean, with the mean norm of contributions")
    register_merge(long, spectral_long)
    register_merge(MergeSpec(name="halved", summary="half of the mean"), halved)


# ---------------------------------------------------------------- moments


class SharingLearner(FleetLearner):
    """Where it adopts a version that it took part in, its momentum of those rows becomes the mean of all learners' at that
    moment: what a merge of moments could gain at best. Nothing of that is sent or counted here; Atoll's learners keep theirs to
    themselves."""

    def _adopt(self, effect: Adopt) -> None:
        super()._adopt(effect)
        if effect.merged:
            names, moments = list(self._fleet._weights), self._fleet._moments._moments
            for slot in self._fragments[effect.fragment].params:
                buffer = moments[names.index(slot.name)].get(BUFFER)
                if buffer is not None:
                    rows = buffer[:, slot.row_start : slot.row_stop]  # [M, rows, columns]
                    rows[self._learner].copy_(rows.mean(dim=0))


class SharingExecutor(FleetExecutor):
    def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
        if worker == SYNCER:
            return super().__call__(worker, incarnation)
        self.learners[worker] = SharingLearner(self.task, worker, self.fleet, self.snapshots, self._device)
        return self.learners[worker]
