"""Eager updates: what a learner adds to an announced version, so that its own newest work does not wait for the network.

The outer step is linear in the outer gradients. So an outer optimiser that runs on (own newest share) + (all shares of the round
before) - (own share of the round before) ends at the announced version plus the steps of an outer optimiser that runs on the own
shares alone. The announced part is the syncer's; the rest needs this learner's outer gradients only, and is kept here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.config import Config
from atoll.ids import FragmentId
from atoll.tensors.outer import OuterState, initial_state, outer_rule, outer_step


class EagerShares:
    def __init__(self, config: Config) -> None:
        rule = outer_rule(config)
        assert rule is not None, "config/checks.py refuses eager updates without an outer optimiser"
        self._rule, self._learners = rule, config.learners
        self._states: dict[FragmentId, OuterState] = {}
        self._steps: dict[FragmentId, Tensor] = {}

    def staged(self, p: FragmentId, difference: Tensor) -> None:
        """A learner that resumes from a snapshot may stage the same boundary again: that is not another outer gradient."""
        if p in self._steps:
            return
        state = self._states.get(p) or initial_state(self._rule, difference.numel(), device=difference.device)
        self._steps[p], self._states[p] = outer_step(torch.zeros_like(difference), difference / self._learners, state, self._rule)

    def take(self, p: FragmentId) -> Tensor | None:
        return self._steps.pop(p, None)

    def clear(self) -> None:
        """These shares were of weights that are gone."""
        self._states.clear()
        self._steps.clear()

    def record(self) -> dict[str, dict[FragmentId, Tensor]]:
        momenta = {p: state.momentum for p, state in self._states.items() if state.momentum is not None}
        return {"momenta": {p: momentum.cpu() for p, momentum in momenta.items()},
                "steps": {p: step.cpu() for p, step in self._steps.items()}}  # fmt: skip

    def restore(self, recorded: dict[str, Any], device: torch.device) -> None:
        """The count of outer steps decides only whether there was one before."""
        self._states = {p: OuterState(momentum.to(device), None, 1) for p, momentum in recorded["momenta"].items()}
        self._steps = {p: step.to(device) for p, step in recorded["steps"].items()}
