"""What a restart would have to merge again, in seconds, and which fragment is written whole to keep that short.

A count of versions is no bound: a merge of eight learners takes several times as long as a merge of one, and a model of many
fragments has many chains of inputs. So every merge is timed, and while the sum over all that is stored by inputs is above
`REMERGE_SECONDS`, the fragment with most of it is next, though none before its fourth version: with merges of a second and few
fragments the syncer would write whole versions all the time. Nothing depends on the times but which files there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

from atoll.ids import FragmentId, OuterStep
from atoll.store.version_folder import StoredFiles

REMERGE_SECONDS: Final = 6.0
"""After a kill, beside a few seconds for imports and for the check of all files: together under the 15 s that a run may stand."""
WHOLE_EVERY: Final = 8
"""Of so many versions of a fragment one is written whole at the latest, however short its merges are."""
WHOLE_LEAST: Final = 4
"""And of no fewer, however long they are: to write a whole version takes half of a merge of eight learners."""


class Arrears:
    clock: Callable[[], float] | None = None
    """In seconds. Without it no merge takes any, and only their number counts."""

    def __init__(self, stored: Sequence[StoredFiles]) -> None:
        self._stored = stored
        self._began: dict[tuple[OuterStep, FragmentId], float] = {}
        """Merges that are not stored yet."""
        self._took = [0.0] * len(stored)
        """The latest merge of each fragment."""

    def begin(self, t: OuterStep, p: FragmentId) -> None:
        """A merge."""
        if self.clock is not None:
            self._began[t, p] = self.clock()

    def drop(self, t: OuterStep) -> None:
        self._began = {key: began for key, began in self._began.items() if key[0] != t}

    def ended(self, t: OuterStep, p: FragmentId) -> None:
        began = self._began.pop((t, p), None)
        if began is not None and self.clock is not None:
            self._took[p] = self.clock() - began

    def seconds(self, p: FragmentId) -> float:
        return self._took[p] * self._stored[p].since_whole()

    def due(self, p: FragmentId, waiting: Set[FragmentId | None]) -> list[FragmentId]:
        """After a version of fragment p was stored: what is to be written whole beside those that wait for it."""
        found = []
        spread = p % WHOLE_EVERY if self._stored[p].whole == {0} else 0  # not all fragments at once
        if self._stored[p].since_whole() >= WHOLE_EVERY - spread and p not in waiting:
            found.append(p)
        left = {q: self.seconds(q) for q in range(len(self._stored)) if q not in waiting and q not in found}
        long = sorted((q for q in left if self._stored[q].since_whole() >= WHOLE_LEAST), key=lambda q: (-left[q], q))
        while long and sum(left.values()) > REMERGE_SECONDS:
            found.append(long.pop(0))
            del left[found[-1]]
        return found
