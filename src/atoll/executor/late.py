"""The content of a `Payload` that is not there yet."""

from __future__ import annotations

from torch import Tensor

from atoll.codecs import Packet


class LateContent:
    """A packet that a device is still encoding, or that other ranks hold parts of."""

    def resolve(self) -> tuple[Packet, Tensor] | None:
        """Waits for it; not to be called by the training thread. None if it holds NaN or Inf and cannot be sent."""
        raise NotImplementedError

    def lend(self, view: memoryview) -> None:
        """`view` is of its memory, which must stay as it is while the view is read."""
