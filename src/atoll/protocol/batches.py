"""The learner's side of data leases: which batch to draw next. It never waits for a grant."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.ids import LearnerId
from atoll.protocol.vocabulary import Grant, Unit


class Batches:
    __slots__ = ("_later", "_left", "_me", "_offset", "_self_issued", "_unit_steps", "grants", "own_next", "share")

    def __init__(self, me: LearnerId, unit_steps: int) -> None:
        self._me = me
        self._unit_steps = unit_steps
        self._left: deque[Unit] = deque()
        self._later: list[Grant] = []
        self._self_issued: set[int] = set()
        self.own_next = 0
        self.grants = 0
        self._offset = 0
        self.share = 1.0
        """Of a batch that the learner's slices can hold."""

    def left(self) -> tuple[Unit, ...]:
        return tuple(self._left)

    def place(self) -> tuple[tuple[Unit, ...], int, int]:
        """For a snapshot, at a boundary: what is left, how far into the first of it, and where one's own stream goes on."""
        if self._offset == self._unit_steps:
            return tuple(self._left)[1:], 0, self.own_next
        return tuple(self._left), self._offset, self.own_next

    def restore(self, left: Sequence[Unit], offset: int, own_next: int) -> None:
        self._left, self._offset, self.own_next = deque(left), offset, own_next

    def granted(self, grant: Grant, *, later: bool = False) -> None:
        """`later`: it was sent after a snapshot's cut and must not be part of what is recorded."""
        if later:
            self._later.append(grant)
            return
        self.grants += 1
        for unit in grant.units:
            if unit.stream == self._me and unit.index in self._self_issued:
                continue  # granted while we went on by ourselves: drawn already
            self._left.append(unit)
        self._self_issued = {i for i in self._self_issued if i >= grant.own_next}
        self.own_next = max(self.own_next, grant.own_next)

    def take_later(self) -> None:
        if not self._later:
            return
        later, self._later = self._later, []
        for grant in later:
            self.granted(grant)

    def draw(self) -> tuple[LearnerId, int]:
        """(stream, position) of the next batch; beyond the grants, on in one's own stream."""
        if self._offset == self._unit_steps:  # its last batch is trained: only now it is not left any more
            self._left.popleft()
            self._offset = 0
        if not self._left:
            self._left.append(Unit(self._me, self.own_next))
            self._self_issued.add(self.own_next)
            self.own_next += 1
        unit = self._left[0]
        position = unit.index * self._unit_steps + self._offset
        self._offset += 1
        return unit.stream, position
