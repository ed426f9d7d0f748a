"""A learner that was asked to stop: it goes on for a while, so that what it trained is merged, each fragment once."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.ids import FragmentId, Nanos
from atoll.protocol.reasons import Reason


class Departure:
    __slots__ = ("_undelivered", "by", "reason")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.by: Nanos | None = None
        self._undelivered: set[FragmentId] = set()

    @property
    def asked(self) -> bool:
        return self.reason is not None

    def ask(self, reason: Reason, undelivered: Iterable[FragmentId], by: Nanos) -> bool:
        """True: go at once, because nothing is left to deliver, or it was asked before."""
        again, self.reason = self.asked, reason
        self._undelivered = set(undelivered)
        if again or not self._undelivered:
            return True
        self.by = by
        return False

    def merged(self, fragment: FragmentId) -> bool:
        """True: that was the last."""
        self._undelivered.discard(fragment)
        return self.asked and not self._undelivered

    def is_due(self, now: Nanos) -> bool:
        return self.by is not None and now >= self.by
