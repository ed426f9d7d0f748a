"""The content of a `Payload` that is not there yet."""

from __future__ import annotations

from typing import Any


class LateContent:
    """A packet that a device is still encoding, or a packet or a state that other ranks hold parts of."""

    def resolve(self) -> Any:
        """Waits for it; not to be called by the training thread. None if it holds NaN or Inf and cannot be sent."""
        raise NotImplementedError

    def lend(self, view: memoryview) -> None:
        """`view` is of its memory, which must stay as it is while the view is read."""
