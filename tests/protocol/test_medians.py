"""The median of the others, for each of many numbers."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.medians import Medians

NUMBERS = st.floats(-1e6, 1e6) | st.integers(0, 5)


@given(st.lists(NUMBERS, min_size=2, max_size=40))
def test_the_median_of_the_others_is_to_the_bit_that_of_a_list_without_it(values: list[float]) -> None:
    medians = Medians(values)
    assert (len(medians), medians.all()) == (len(values), median(values))
    for i, value in enumerate(values):
        assert medians.without(value) == median(values[:i] + values[i + 1 :])
