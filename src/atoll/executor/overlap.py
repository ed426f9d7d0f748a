"""What a learner trained on a fragment between its pull and its adoption, where `keep_overlap` adds it to the adopted version.

The copy that answers a pull is taken at a step boundary, and the version that it went into comes back one or more steps later.
The difference between the weights then and the weights of that copy is in no contribution yet. Only the copy that was sent last
is remembered; the machine, which remembers the same, says in `Adopt.keeps` whether it is the one that was merged.
"""

from __future__ import annotations

from torch import Tensor

from atoll.executor.cuda.learner import Key
from atoll.executor.cuda.staging import StagedPacket
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import NO_VERSION

Taken = Tensor | StagedPacket
"""The weights of a copy, those of the optimiser's masters where there are any; on a GPU else the packet staged with them."""


class OverlapWork:
    def __init__(self) -> None:
        self._copies: dict[Key, Taken] = {}
        self._sent: dict[FragmentId, tuple[OuterStep, Taken]] = {}

    def staged(self, key: Key, weights: Taken) -> None:
        self._copies[key] = weights

    def drop(self, key: Key) -> None:
        self._copies.pop(key, None)

    def sent(self, p: FragmentId, outer_step: OuterStep) -> None:
        copied = self._copies.get((p, outer_step), self._copies.get((p, NO_VERSION)))
        if copied is not None:  # else NaN or Inf was in it, and nothing is sent
            self._sent[p] = outer_step, copied

    def taken_for(self, p: FragmentId, version: OuterStep, *, keeps: bool) -> Tensor | None:
        """The weights that went into this version, if what came after them is kept. Whatever was sent for another version is
        forgotten: it refers to weights that this adoption replaces."""
        found = self._sent.pop(p, None)
        if not keeps:
            return None
        assert found is not None and found[0] == version, f"fragment {p}: the copy sent for version {version} is not known"
        return found[1].weights if isinstance(found[1], StagedPacket) else found[1]

    def clear(self) -> None:
        self._copies.clear()
        self._sent.clear()
