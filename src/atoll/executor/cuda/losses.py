"""Losses of a loop of the user's own on a GPU, told one step late.

Such a loop hands its loss over after the whole step was launched. To read it at once, the host would wait until the device has
nothing left to do, and every boundary and the launches after it would then be time in which the device idles. So the host reads
the loss of the step before: it waits for that step only, which also keeps launches from running further ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.tensors.local import is_dtensor


class LateLosses:
    def __init__(self) -> None:
        self._before: tuple[list[Tensor | float], torch.cuda.Event] | None = None

    def following(self, losses: Sequence[Tensor | float]) -> list[Tensor | float]:
        """Those of the call before, on the host; at the first call none."""
        before = self._before
        copies = [_copied(loss) if isinstance(loss, Tensor) else loss for loss in losses]
        on = next((loss.device for loss in losses if isinstance(loss, Tensor) and loss.is_cuda), None)
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(on))  # a loop's device need not be the current one
        self._before = (copies, done)
        if before is None:
            return []
        before[1].synchronize()
        return before[0]


def _copied(loss: Tensor) -> Tensor | float:
    """A sharded loss is a collective to read, which only its own loop can place; it is read here as before."""
    if not loss.is_cuda or is_dtensor(loss):
        return float(loss)
    return torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
