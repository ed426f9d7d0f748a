"""Config keys that have a new name. The old one is refused with the new one, never ignored and never taken silently."""

from __future__ import annotations

from typing import Final

RENAMED: Final = {
    "outer_steps": "total_steps",
    "limits.muster_seconds": "limits.start_wait_seconds",
}
"""Old name to new name, with their sections."""
