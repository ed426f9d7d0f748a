"""Which contribution norms are usual, so that an outlier is refused before it is merged."""

from __future__ import annotations

from collections import deque
from statistics import median

from atoll.ids import FragmentId
from atoll.protocol.interface import SUSPECT


class Norms:
    """What is usual for each fragment: the median of its last contributions' norms, each by the way its steps could have led.
    Far beyond it is poison, or a learner about to diverge; refusing one costs little, merging one may cost the run."""

    WINDOW = 32
    ENOUGH = 8
    """Below so many norms nothing is usual yet."""

    def __init__(self, fragments: int, factor: float) -> None:
        self._factor = factor
        self._seen: list[deque[float]] = [deque(maxlen=self.WINDOW) for _ in range(fragments)]

    def objection(self, fragment: FragmentId, norm: float, way: float) -> str:
        seen = self._seen[fragment]
        usual = way * median(seen) if len(seen) >= self.ENOUGH else 0.0
        if usual > 0 and norm > self._factor * usual:
            return f"{SUSPECT} {norm:.3g} of fragment {fragment} is {norm / usual:.0f} times the usual {usual:.3g}"
        seen.append(norm / way)
        return ""
