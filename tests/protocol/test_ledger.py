"""The fate of every (token, fragment): merged, discarded with a reason, or in flight."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.ledger import LEFT, LOST, NOT_IN_ROUND, OVERLAP, Fates, Ledger


def test_trained_tokens_count_once_for_every_fragment() -> None:
    ledger = Ledger(3, adoption_discards=True)
    ledger.trained(0, 100)
    assert ledger.fates() == Fates(300, 0, {}, 300)


def test_trained_is_cumulative_so_a_repeated_or_older_report_adds_nothing() -> None:
    ledger = Ledger(1, adoption_discards=True)
    for tokens in (100, 100, 50, 120):
        ledger.trained(0, tokens)
    assert ledger.fates().trained == 120


def test_merge_settles_what_its_contribution_covers_of_its_fragment() -> None:
    ledger = Ledger(2, adoption_discards=True)
    ledger.trained(0, 100)
    ledger.merged(0, 1, 80, version=1)
    assert ledger.fates() == Fates(200, 80, {}, 120)


def test_adoption_of_the_version_it_is_merged_in_discards_the_overlap() -> None:
    ledger = Ledger(1, adoption_discards=True)
    ledger.trained(0, 100)
    ledger.merged(0, 0, 80, version=1)
    ledger.adopted(0, 0, 100, version=1)
    assert ledger.fates() == Fates(100, 80, {OVERLAP: 20}, 0)


def test_adoption_of_a_version_it_is_not_merged_in_discards_all_it_had_in_flight() -> None:
    ledger = Ledger(1, adoption_discards=True)
    ledger.trained(0, 100)
    ledger.adopted(0, 0, 100, version=1)
    assert ledger.fates().discarded == {NOT_IN_ROUND: 100}


def test_adoption_under_round_start_discards_nothing() -> None:
    ledger = Ledger(1, adoption_discards=False)
    ledger.trained(0, 100)
    ledger.adopted(0, 0, 100, version=1)
    assert ledger.fates() == Fates(100, 0, {}, 100)


def test_end_of_an_incarnation_discards_what_was_in_flight_with_its_reason() -> None:
    ledger = Ledger(2, adoption_discards=True)
    ledger.trained(0, 100)
    ledger.merged(0, 0, 100, version=1)
    ledger.closed(0, LOST)
    ledger.trained(0, 30)  # a new incarnation counts from zero
    assert ledger.fates() == Fates(260, 100, {LOST: 100}, 60)


def test_end_of_somebody_who_trained_nothing_discards_nothing() -> None:
    ledger = Ledger(2, adoption_discards=True)
    ledger.closed(5, LEFT)
    assert ledger.fates() == Fates(0, 0, {}, 0)


actions = st.lists(
    st.tuples(
        st.sampled_from(["trained", "merged", "adopted", "closed"]), st.integers(0, 2), st.integers(0, 2),
        st.integers(0, 1000), st.integers(1, 9),
    ),
    max_size=60,
)  # fmt: skip


@settings(deadline=None)
@given(actions, st.booleans())
def test_fates_add_up_after_whatever_happens(happens: list[tuple[str, int, int, int, int]], discards: bool) -> None:
    ledger = Ledger(3, adoption_discards=discards)
    known: dict[int, int] = {}
    for what, learner, fragment, tokens, version in happens:
        match what:
            case "trained":
                ledger.trained(learner, tokens)
                known[learner] = max(known.get(learner, 0), tokens)
            case "merged" if learner in known:
                ledger.merged(learner, fragment, min(tokens, known[learner]), version)
            case "adopted" if learner in known:
                ledger.adopted(learner, fragment, min(tokens, known[learner]), version)
            case "closed":
                ledger.closed(learner, LOST)
                known.pop(learner, None)
        fates = ledger.fates()
        assert fates.add_up()
        assert fates.in_flight >= 0 and fates.merged >= 0 and all(v > 0 for v in fates.discarded.values())
