"""A candidate: one value for each knob that the planner chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    preset: str
    learners: int
    interval: int
    fragments: int
    overlap: int
    quorum: int
    """0: all."""
    codec_up: str
    codec_down: str

    @property
    def synchronous(self) -> bool:
        """Rounds wait for all learners, and learners for the round."""
        return self.preset != "decoupled"
