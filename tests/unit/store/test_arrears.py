"""Which fragment is written whole, by how long its inputs would take to merge again."""

from __future__ import annotations

from atoll.store.arrears import REMERGE_SECONDS, WHOLE_EVERY, WHOLE_LEAST, Arrears
from atoll.store.version_folder import StoredFiles


class Rounds:
    """Fragments that were merged once each, in so many seconds a merge."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.stored = [StoredFiles(whole={1}) for _ in seconds]
        self.arrears = Arrears(self.stored)
        self.arrears.clock = lambda: self.now
        self.seconds = seconds

    def merge(self, p: int, waiting: frozenset[int | None] = frozenset()) -> list[int]:
        t = 2 + max(self.stored[p].all(), default=1)
        self.arrears.begin(t, p)
        self.now += self.seconds[p]
        self.arrears.ended(t, p)
        self.stored[p].logged[t] = (t - 1, ())
        return self.arrears.due(p, waiting)


def test_short_merges_wait_for_their_number() -> None:
    rounds = Rounds(0.01, 0.01)
    assert [rounds.merge(0) for _ in range(WHOLE_EVERY)] == [[]] * (WHOLE_EVERY - 1) + [[0]]


def test_fragment_with_most_seconds_is_next() -> None:
    rounds = Rounds(REMERGE_SECONDS / 10, REMERGE_SECONDS / 5)
    for _ in range(WHOLE_LEAST - 1):
        assert rounds.merge(0) == rounds.merge(1) == []
    assert rounds.merge(0) == []
    assert rounds.merge(1) == [1]


def test_no_fragment_is_written_whole_all_the_time() -> None:
    rounds = Rounds(2 * REMERGE_SECONDS)
    assert [rounds.merge(0) for _ in range(WHOLE_LEAST)] == [[]] * (WHOLE_LEAST - 1) + [[0]]


def test_fragments_that_wait_count_as_written() -> None:
    rounds = Rounds(REMERGE_SECONDS / WHOLE_LEAST, REMERGE_SECONDS / WHOLE_LEAST)
    for _ in range(WHOLE_LEAST - 1):
        rounds.merge(0), rounds.merge(1)
    assert rounds.merge(0) == [0]
    assert rounds.merge(1, frozenset({0, None})) == []


def test_all_that_is_needed_to_come_below_the_limit() -> None:
    rounds = Rounds(*[2 * REMERGE_SECONDS] * 3)
    for _ in range(WHOLE_LEAST - 1):
        assert [rounds.merge(p) for p in range(3)] == [[]] * 3
    assert [rounds.merge(p) for p in range(3)] == [[0], [0, 1], [0, 1, 2]]


def test_merge_that_was_dropped_is_not_timed() -> None:
    rounds = Rounds(1.0)
    rounds.arrears.begin(5, 0)
    rounds.arrears.drop(5)
    rounds.now += 100.0
    rounds.arrears.ended(5, 0)
    rounds.stored[0].logged[5] = (1, ())
    assert rounds.arrears.seconds(0) == 0.0


def test_initial_versions_are_not_replaced_all_at_once() -> None:
    rounds = Rounds(0.01, 0.01)
    for files in rounds.stored:
        files.whole = {0}
    first = [next(n for n in range(1, 20) if p in rounds.merge(p)) for p in (0, 1)]
    assert first == [WHOLE_EVERY, WHOLE_EVERY - 1]
