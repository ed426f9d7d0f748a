"""Samples dealt out like cards: by (seed, stream, position) alone, and within an epoch nobody sees one twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.workload.data.deal import Deal


@given(samples=st.integers(1, 200), streams=st.integers(1, 7), batch_size=st.integers(1, 50), seed=st.integers(0, 5))
def test_an_epoch_deals_every_sample_at_most_once_and_leaves_out_few(
    samples: int, streams: int, batch_size: int, seed: int
) -> None:
    if samples < streams:
        with pytest.raises(DataError, match="fewer than"):
            Deal(samples, seed, streams)
        return
    deal = Deal(samples, seed, streams)
    epoch = [sample for stream in range(streams) for sample in deal.epoch_order(stream, 0).tolist()]
    assert len(set(epoch)) == len(epoch) > samples - streams and set(epoch) <= set(range(samples))
    for stream in range(streams):
        batches = [deal.batch(stream, position, batch_size) for position in range(2 * deal.share // batch_size)]
        drawn = [sample for batch in batches for sample in batch]
        two_epochs = deal.epoch_order(stream, 0).tolist() + deal.epoch_order(stream, 1).tolist()
        assert all(len(batch) == batch_size for batch in batches)
        assert drawn == two_epochs[: len(drawn)], "positions follow each other, across the end of an epoch too"


def test_order_depends_on_seed_epoch_and_on_nothing_that_happened_before() -> None:
    deal, again = Deal(100, 1, 2), Deal(100, 1, 2)
    later = again.batch(1, 40, 3)
    assert again.batch(1, 0, 3) == deal.batch(1, 0, 3) and deal.batch(1, 40, 3) == later
    assert deal.epoch_order(0, 0).tolist() != deal.epoch_order(0, 1).tolist()
    assert deal.epoch_order(0, 0).tolist() != Deal(100, 2, 2).epoch_order(0, 0).tolist()


def test_stream_beyond_the_declared_number_has_an_order_of_its_own() -> None:
    deal = Deal(100, 0, 2)
    assert deal.epoch_order(2, 0).tolist() != deal.epoch_order(0, 0).tolist()
    assert not set(deal.epoch_order(2, 0).tolist()) & set(deal.epoch_order(3, 0).tolist())
