"""Refuses a contribution whose norm is an outlier, before it is merged."""

from __future__ import annotations

from collections import deque
from statistics import median

from atoll.ids import FragmentId
from atoll.protocol.reasons import Reason, Why


class Norms:
    """The usual norm of each fragment: the median over its last contributions, normalised by steps x learning rate. A norm far
    above it is poison or a diverging learner: to refuse one costs little, to merge one may cost the run."""

    WINDOW = 32
    ENOUGH = 8
    """With fewer norms than this, none is refused."""

    def __init__(self, fragments: int, factor: float) -> None:
        self._factor = factor
        self._seen: list[deque[float]] = [deque(maxlen=self.WINDOW) for _ in range(fragments)]

    def objection(self, fragment: FragmentId, norm: float, scale: float) -> Reason | None:
        seen = self._seen[fragment]
        usual = scale * median(seen) if len(seen) >= self.ENOUGH else 0.0
        if usual > 0 and norm > self._factor * usual:
            words = f"the norm {norm:.3g} of fragment {fragment} is {norm / usual:.0f} times the usual {usual:.3g}"
            return Reason(Why.OUTLIER, words)
        seen.append(norm / scale)
        return None
