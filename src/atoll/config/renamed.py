"""Renamed and removed config keys. An old name is an error that gives the new one; it is never ignored or accepted silently."""

from __future__ import annotations

from typing import Final

RENAMED: Final = {
    "outer_steps": "total_steps",
    "limits.muster_seconds": "limits.start_wait_seconds",
}
"""Old name to new name, with their sections."""

GONE: Final = {
    "model.dtype": "weights are fp32 always; for bf16 arithmetic write model.precision = 'bf16'",
}
"""Keys without a successor of the same values, and what to write instead."""
