"""Data leases: which learner may draw which part of the data, so that a death loses none of it.

A unit is a run of `unit_steps` consecutive positions of one learner's stream. Units are granted at least 2H local steps
ahead. A unit is settled when every fragment has been pulled at a local step that covers it; unsettled units of a lost
learner are re-issued to whoever asks next (at least once: what had been trained already is counted as a repeat).
While the syncer is away a learner goes on in its own stream, and its next report reconciles the books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.ids import FragmentId, LearnerId, LocalStep
from atoll.protocol.vocabulary import Lease, Unit

INDEX_MAX = 2**40
"""What a learner may claim of its own stream beyond what it was granted: far from where counters end, so that what others
are granted after it can still be reported."""


class _Lease:
    """One learner's incarnation: granted units in the order in which it will draw them."""

    __slots__ = ("ahead", "done", "grant_of", "granted", "grants", "last_done", "pulled", "started")

    def __init__(self, fragments: int) -> None:
        self.granted: deque[Unit] = deque()
        self.done: deque[tuple[Unit, LocalStep]] = deque()
        self.pulled: list[LocalStep] = [0] * fragments
        self.ahead = 0
        self.started = False
        self.grants = 0
        self.grant_of: dict[Unit, int] = {}
        self.last_done: Unit | None = None

    def finish(self, local_step: LocalStep) -> None:
        """The first unit is drawn to its end."""
        unit = self.granted.popleft()
        self.grant_of.pop(unit, None)
        self.last_done = unit
        self.done.append((unit, local_step))


class Leases:
    def __init__(self, fragments: int, interval: int) -> None:
        self._fragments = fragments
        self.unit_steps = interval
        self._ahead_least = 2 * interval
        self.by_learner: dict[LearnerId, _Lease] = {}
        self._next: dict[LearnerId, int] = {}
        self._pool: deque[Unit] = deque()
        self._awaited: set[LearnerId] = set()
        """Learners of a snapshot that have not come back yet: their leases wait for them."""
        self.repeats = 0
        self.settled = 0

    def own_next(self, learner: LearnerId) -> int:
        return self._next.get(learner, 0)

    def top_up(self, learner: LearnerId) -> tuple[Unit, ...]:
        """Grant until at least 2H steps lie ahead; re-issued units go first."""
        lease = self.by_learner.setdefault(learner, _Lease(self._fragments))
        units = []
        while lease.ahead < self._ahead_least:
            if self._pool:
                unit = self._pool.popleft()
            else:
                unit = Unit(learner, self.own_next(learner))
                self._next[learner] = unit.index + 1
            lease.granted.append(unit)
            lease.grant_of[unit] = lease.grants + 1
            lease.ahead += self.unit_steps
            units.append(unit)
        lease.grants += bool(units)
        return tuple(units)

    def is_low(self, learner: LearnerId) -> bool:
        lease = self.by_learner.get(learner)
        return lease is None or lease.ahead < self._ahead_least

    def never_given(self, learner: LearnerId, left: Sequence[Unit]) -> bool:
        """It names units of another's stream that nobody was ever granted, or of its own that no run ever reaches."""
        return any(
            unit.index >= self.own_next(unit.stream) and (unit.stream != learner or unit.index > INDEX_MAX) for unit in left
        )

    def may_draw(self, learner: LearnerId, stream: LearnerId, batch: int) -> bool:
        """What it was granted, and beyond that its own stream."""
        index = batch // self.unit_steps
        if stream == learner and (index <= INDEX_MAX or index <= self.own_next(stream)):
            return True
        lease, unit = self.by_learner.get(learner), Unit(stream, index)
        return lease is not None and (unit in lease.granted or unit == lease.last_done)

    def drew(self, learner: LearnerId, stream: LearnerId, batch: int, local_step: LocalStep) -> None:
        """A report says which batch was trained. Units are drawn to their ends, in the order of grant; but one that it gave
        itself while the grant was on its way comes before the others of that grant."""
        lease = self.by_learner.get(learner)
        if lease is None:
            lease = self.by_learner[learner] = _Lease(self._fragments)
        unit = Unit(stream, batch // self.unit_steps)
        offset = batch % self.unit_steps
        if unit not in lease.granted and lease.last_done == unit:
            return  # the report of its last batch, repeated on entering
        if lease.started and lease.granted[0] != unit:
            lease.finish(local_step)
        if unit not in lease.granted:  # it had nothing left and went on by itself in its own stream: the books follow
            self._next[stream] = max(self.own_next(stream), unit.index + 1)
            lease.granted.appendleft(unit)
        elif lease.granted[0] != unit:
            lease.granted.remove(unit)
            lease.granted.appendleft(unit)
        lease.started = True
        lease.ahead = len(lease.granted) * self.unit_steps - offset - 1
        if offset == self.unit_steps - 1:
            lease.finish(local_step)
            lease.started = False

    def square(
        self, learner: LearnerId, left: Sequence[Unit], own_next: int, local_step: LocalStep, grants: int, *, broke: bool = True
    ) -> None:
        """On a Hello of a known incarnation: what it has left is right. Of the rest, units of a grant that has not arrived
        are on their way while the connection stands, and go back to the pool where it `broke`; the others were drawn,
        though the reports that said so were lost."""
        lease = self.by_learner.setdefault(learner, _Lease(self._fragments))
        missing = [unit for unit in lease.granted if unit not in left]
        not_there = [unit for unit in missing if lease.grant_of.get(unit, 0) > grants]
        lease.done.extend((unit, local_step) for unit in missing if unit not in not_there)
        left = [unit for unit in left if unit != lease.last_done]
        coming, back = ([], not_there) if broke else (not_there, [])
        self._pool = deque([*back, *(unit for unit in self._pool if unit not in left)])
        lease.started = lease.started and bool(left) and bool(lease.granted) and left[0] == lease.granted[0]
        lease.granted = deque([*left, *coming])
        lease.grant_of = {unit: lease.grant_of.get(unit, 0) for unit in lease.granted}
        lease.grants = grants if broke else lease.grants
        lease.ahead = len(lease.granted) * self.unit_steps - (1 if left else 0)
        beyond = [unit.index + 1 for unit in left if unit.stream == learner]  # its own, drawn while the syncer was away
        self._next[learner] = max(self.own_next(learner), own_next, *beyond)

    def record(self) -> tuple[tuple[tuple[LearnerId, int], ...], tuple[Unit, ...], tuple[Lease, ...]]:
        """For a snapshot: where every stream goes on, the pool, and what each learner holds."""
        leases = tuple(
            Lease(learner, tuple(lease.granted), tuple(unit for unit, _ in lease.done))
            for learner, lease in sorted(self.by_learner.items())
        )  # fmt: skip
        return tuple(sorted(self._next.items())), tuple(self._pool), leases

    def restore(self, own_next: Sequence[tuple[LearnerId, int]], pool: Sequence[Unit], leases: Sequence[Lease]) -> None:
        self._next, self._pool = dict(own_next), deque(pool)
        for recorded in leases:
            lease = self.by_learner[recorded.learner] = _Lease(self._fragments)
            lease.granted.extend(recorded.granted)
            lease.done.extend((unit, 0) for unit in recorded.done)
            self._awaited.add(recorded.learner)

    def claim(self, learner: LearnerId, left: Sequence[Unit], own_next: int, local_step: LocalStep) -> bool:
        """A learner of the snapshot is back with its state: what it had in hand is its own again."""
        if learner not in self._awaited:
            return False
        self._awaited.discard(learner)
        lease = self.by_learner[learner]  # its work is in the weights of this local step, not yet in Theta
        lease.done = deque((unit, local_step) for unit, _ in lease.done)
        self.square(learner, left, own_next, local_step, 0)
        return True

    def pulled(self, learner: LearnerId, fragment: FragmentId, local_step: LocalStep) -> None:
        lease = self.by_learner.get(learner)
        if lease is None:
            return
        if local_step > lease.pulled[fragment]:
            lease.pulled[fragment] = local_step
        if lease.done:
            covered = min(lease.pulled)
            while lease.done and lease.done[0][1] <= covered:
                lease.done.popleft()
                self.settled += 1

    def release(self, learner: LearnerId) -> tuple[tuple[Unit, ...], int]:
        """The incarnation is over. Its unsettled units go back to the pool; those it had begun will be repeats."""
        self._awaited.discard(learner)
        lease = self.by_learner.pop(learner, None)
        if lease is None:
            return (), 0
        begun = [unit for unit, _ in lease.done] + ([lease.granted[0]] if lease.started and lease.granted else [])
        units = tuple(unit for unit, _ in lease.done) + tuple(lease.granted)
        self._pool.extend(units)
        self.repeats += len(begun)
        return units, len(begun)
