from __future__ import annotations

import pickle

import pytest
import torch

from atoll.errors import DataError
from atoll.workload.data.corpus import Corpus, split_documents
from atoll.workload.data.stream import Stream, TokenData, heldout_batches, pack_documents, token_data
from atoll.workload.data.tokenizer import END_OF_DOCUMENT, ByteTokenizer, train_bpe


def counting(train: int, heldout: int = 100) -> TokenData:
    """Token i is i, so that a window tells where it came from."""
    return TokenData(torch.arange(train, dtype=torch.int32), torch.arange(heldout, dtype=torch.int32), 2**31, "x")


def starts(stream: Stream, learner: int, positions: range) -> list[int]:
    return [int(row[0]) for position in positions for row in stream.batch(learner, position)]


def test_batch_is_rows_of_consecutive_tokens_of_the_asked_shape() -> None:
    batch = Stream(counting(1000), seed=3, streams=2, batch_size=4, seq_len=8).batch(1, 5)
    assert batch.shape == (4, 9)
    assert batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(9).expand(4, 9))


def test_streams_within_an_epoch_share_no_window_and_cover_all_that_deal_out() -> None:
    stream = Stream(counting(8 * 103 + 1), seed=0, streams=4, batch_size=5, seq_len=8)
    assert (stream.windows, stream.share) == (103, 25)
    seen = [start for learner in range(4) for start in starts(stream, learner, range(5))]
    assert len(seen) == len(set(seen)) == 100
    assert set(seen) <= set(range(0, 8 * 103, 8))


def test_stream_in_its_second_epoch_sees_the_text_in_another_order() -> None:
    stream = Stream(counting(8 * 100 + 1), seed=0, streams=1, batch_size=10, seq_len=8)
    first, second = starts(stream, 0, range(10)), starts(stream, 0, range(10, 20))
    assert sorted(first) == sorted(second)
    assert first != second
    assert [stream.epoch_of(position) for position in (0, 9, 10, 25)] == [0, 0, 1, 2]


def test_batch_across_the_end_of_an_epoch_takes_the_rest_and_goes_on() -> None:
    stream = Stream(counting(8 * 7 + 1), seed=0, streams=1, batch_size=5, seq_len=8)
    seen = starts(stream, 0, range(7))
    assert all(len(set(seen[epoch * 7 : epoch * 7 + 7])) == 7 for epoch in range(5))


def test_batch_larger_than_an_epoch_is_still_full() -> None:
    assert Stream(counting(25), seed=0, streams=3, batch_size=16, seq_len=8).batch(2, 4).shape == (16, 9)


def test_stream_built_again_after_a_restart_continues_as_if_never_stopped() -> None:
    data = counting(5000)
    whole = starts(Stream(data, 7, 3, 4, 8), 2, range(60))
    first = starts(Stream(data, 7, 3, 4, 8), 2, range(31))
    second = starts(Stream(data, 7, 3, 4, 8), 2, range(31, 60))
    assert first + second == whole


def test_batches_asked_in_any_order_and_by_anyone_are_the_same() -> None:
    stream = Stream(counting(3000), seed=1, streams=2, batch_size=4, seq_len=8)
    forward = [stream.batch(learner, position) for learner in range(2) for position in range(200)]
    copied = pickle.loads(pickle.dumps(stream))
    backward = [copied.batch(learner, position) for learner in (1, 0) for position in reversed(range(200))]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward[::-1], strict=True))


def test_rounds_of_one_step_do_not_replay_the_first_batch() -> None:
    stream = Stream(counting(3000), seed=1, streams=2, batch_size=4, seq_len=8)
    assert len({tuple(stream.window_indices(0, position).tolist()) for position in range(40)}) == 40


def test_streams_of_other_seeds_differ_also_when_seed_and_epoch_add_up_to_the_same() -> None:
    data = counting(8 * 50 + 1)
    one, two = Stream(data, 0, 1, 50, 8), Stream(data, 1, 1, 50, 8)
    assert starts(one, 0, range(1)) != starts(two, 0, range(1))
    assert starts(one, 0, range(1, 2)) != starts(two, 0, range(1))


def test_batches_changed_by_their_owner_leave_the_data_alone() -> None:
    stream = Stream(counting(1000), 0, 1, 4, 8)
    stream.batch(0, 0).zero_()
    assert int(stream.batch(0, 0).sum()) > 0


def test_batch_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    Stream(counting(1000), 123, 2, 4, 8).batch(0, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_helpers_count_what_a_batch_trains_on() -> None:
    stream = Stream(counting(1000), 0, 1, batch_size=4, seq_len=8)
    assert (stream.tokens_per_batch, stream.samples_per_batch) == (32, 4)


def test_negative_stream_is_refused() -> None:
    with pytest.raises(DataError, match="there is no stream -1: streams count from 0"):
        Stream(counting(1000), 0, 2, 4, 8).batch(-1, 0)


def test_streams_beyond_the_declared_number_deal_the_same_text_in_another_order() -> None:
    stream = Stream(counting(1000), 0, 2, 4, 8)
    rounds = stream.share // 4
    dealt = [{int(i) for position in range(rounds) for i in stream.window_indices(s, position)} for s in (2, 3)]
    assert not dealt[0] & dealt[1], "each other's, within the deal"
    assert stream.window_indices(2, 0).tolist() != stream.window_indices(0, 0).tolist()
    assert stream.window_indices(2, 0).tolist() == Stream(counting(1000), 0, 2, 4, 8).window_indices(2, 0).tolist()


def test_negative_position_is_refused() -> None:
    with pytest.raises(DataError, match="positions count from 0"):
        Stream(counting(1000), 0, 2, 4, 8).batch(0, -1)


def test_seq_len_longer_than_the_text_is_refused_with_the_longest_possible() -> None:
    with pytest.raises(DataError, match=r"data.seq_len = 64 is longer than the train text of 64 tokens: set it to at most 63"):
        Stream(counting(64), 0, 1, 1, 64)
    Stream(counting(65), 0, 1, 1, 64)
    with pytest.raises(DataError, match="longer than the held-out text of 10 tokens"):
        heldout_batches(counting(100, 10), 4, 16, 1)


def test_fewer_windows_than_streams_is_refused() -> None:
    with pytest.raises(DataError, match=r"gives 3 windows of data.seq_len = 8, fewer than 4 learners: give more text, .* fewer"):
        Stream(counting(25), 0, 4, 1, 8)


@pytest.mark.parametrize("name", ["streams", "batch_size", "seq_len"])
def test_stream_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} = 0: must be at least 1"):
        Stream(counting(100), 0, **({"streams": 1, "batch_size": 1, "seq_len": 8} | {name: 0}))


def test_heldout_batches_are_fixed_spread_and_limited() -> None:
    data = counting(10, heldout=8 * 40 + 1)
    batches = heldout_batches(data, batch_size=4, seq_len=8, limit=2)
    assert [batch.shape for batch in batches] == [(4, 9), (4, 9)]
    assert [int(row[0]) for batch in batches for row in batch] == [40 * index for index in range(8)]
    everything = heldout_batches(data, batch_size=16, seq_len=8, limit=100)
    assert [len(batch) for batch in everything] == [16, 16, 8]
    with pytest.raises(DataError, match="at least 1"):
        heldout_batches(data, 4, 8, 0)


def test_token_data_ends_every_document_and_keeps_heldout_apart() -> None:
    documents = tuple(f"<{index}>".encode() for index in range(100))
    corpus = Corpus("test", documents, "f" * 64)
    data, split = token_data(corpus, ByteTokenizer()), split_documents(corpus)
    for side, kept in ((data.train, split.train), (data.heldout, split.heldout)):
        assert side.dtype == torch.int16
        assert int((side == END_OF_DOCUMENT).sum()) == len(kept)
        assert ByteTokenizer().decode(side.tolist()) == b"".join(kept)
    assert data.vocab_size == 257


def test_token_data_of_another_tokenizer_or_corpus_has_another_fingerprint() -> None:
    documents = tuple(f"some text, number {index}".encode() for index in range(50))
    one, two = Corpus("test", documents, "1" * 64), Corpus("test", documents, "2" * 64)
    bpe = train_bpe(b"".join(documents), 270)
    tokenizers = (ByteTokenizer(), bpe)
    prints = {token_data(corpus, tokenizer).fingerprint for corpus in (one, two) for tokenizer in tokenizers}
    assert len(prints) == 4


def test_pack_with_a_vocabulary_beyond_sixteen_bits_keeps_the_ids() -> None:
    class Wide(ByteTokenizer):
        vocab_size = 50_000

        def encode(self, text: bytes) -> list[int]:
            return [40_000 + byte for byte in text]

    packed = pack_documents([b"\x01"], Wide())
    assert packed.dtype == torch.int32
    assert packed.tolist() == [40_001, END_OF_DOCUMENT]
    assert pack_documents([], ByteTokenizer()).numel() == 0
