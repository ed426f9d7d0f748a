from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from atoll.errors import DataError
from atoll.workload.data import tokenizer as module
from atoll.workload.data.tokenizer import (
    END_OF_DOCUMENT,
    BpeTokenizer,
    ByteTokenizer,
    Sampler,
    Tokenizer,
    train_bpe,
    training_sample,
)

SAMPLE = b"the quick brown fox jumps over the lazy dog; the end of the story is the end.\n" * 20
SAMPLE += "für Ünïcode\n".encode() * 9
WORD = re.compile(rb" ?[A-Za-z_\x80-\xff]{1,64}| ?[0-9]{1,64}| ?[^\sA-Za-z_0-9\x80-\xff]{1,64}|\s{1,64}(?!\S)|\s{1,64}")
"""The words over bytes, as the first tokenizers of Atoll cut them."""
TEXTS = [
    b"",
    b"a",
    b"the the the",
    b"  \n\n\t  indented\r\n    x = 1_000\n\n",
    bytes(range(256)) * 3,
    "日本語 und Ümläute".encode(),
    b"a" * 1000 + b" " * 1000 + b"1" * 300,
]


def naive_bpe(sample: bytes, merges: int) -> list[tuple[int, int]]:
    """The definition, with everything recounted after every merge."""
    words = [list(word) for word in WORD.findall(sample)]
    learnt: list[tuple[int, int]] = []
    for token in range(257, 257 + merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts or max(counts.values()) < 2:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        learnt.append(best)
        for word in words:
            index = 0
            while index < len(word) - 1:
                if (word[index], word[index + 1]) == best:
                    word[index : index + 2] = [token]
                index += 1
    return learnt


@pytest.fixture(scope="module")
def trained() -> BpeTokenizer:
    return train_bpe(SAMPLE, 300)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizers_on_any_bytes_round_trip(trained: BpeTokenizer, text: bytes) -> None:
    tokenizers: list[Tokenizer] = [ByteTokenizer(), trained]
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size and token != END_OF_DOCUMENT for token in ids)


def test_bpe_on_random_bytes_round_trips(trained: BpeTokenizer) -> None:
    chance = random.Random(0)
    for length in range(0, 400, 7):
        text = bytes(chance.choice(b" \n\x00\xc3\xbc\xffthe09_;") for _ in range(length))
        assert trained.decode(trained.encode(text)) == text


def test_train_bpe_learns_the_merges_of_the_naive_definition() -> None:
    chance = random.Random(1)
    sample = bytes(chance.choice(b"aaab c") for _ in range(600))
    assert list(train_bpe(sample, 257 + 30).merges) == naive_bpe(sample, 30)
    assert list(train_bpe(SAMPLE, 257 + 40).merges) == naive_bpe(SAMPLE, 40)


@pytest.mark.parametrize("letters", [b"ab", b"aab \n", b" \n\t\r\x0b\x0c\x1c\x85\xa0\xff\x00a0_;", bytes(range(256))])
def test_train_bpe_learns_the_naive_merges_of_any_bytes(letters: bytes) -> None:
    """Runs of one byte, where pairs overlap; blanks of Unicode that are none in ASCII; bytes that are no text."""
    for seed in range(5):
        chance = random.Random(seed)
        sample = bytes(chance.choice(letters) for _ in range(chance.randrange(200, 900)))
        expected = naive_bpe(sample, 60)
        tokenizer = train_bpe(sample, 257 + len(expected))
        assert list(tokenizer.merges) == expected
        words = WORD.findall(sample)
        assert tokenizer.encode(sample) == [token for word in words for token in tokenizer.encode(word)], "merges stay in words"


def test_parts_of_a_long_sample_have_the_words_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(2)
    sample = bytes(chance.choice(b"ab \n_;0") for _ in range(3000))
    whole = train_bpe(sample, 320).merges
    monkeypatch.setattr(module, "PART", re.compile(rb"(?s).{10,}?\S(?=\s)|.+"))
    assert train_bpe(sample, 320).merges == whole


EARLIER = "be7ecbddb53b636fef68eba1dbba7f2c03bb7a2b5c418b4d2a660ab984ae00c6"
"""What the trainer that Atoll had of its own learnt from the text below."""
TRAINING = """
import random
from atoll.workload.data.tokenizer import train_bpe
chance = random.Random(7)
words = ["".join(chance.choices("abcdefgh_0 \\n.", k=chance.randrange(1, 9))) for _ in range(400)]
print(train_bpe(" ".join(chance.choice(words) for _ in range(60000)).encode(), 650).fingerprint, end="")
"""


@pytest.mark.parametrize("settings", [
    {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}, {"RAYON_NUM_THREADS": "2", "PYTHONHASHSEED": "2"},
    {"RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "3"}, {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"},
], ids=lambda settings: " ".join(settings.values()))  # fmt: skip
def test_tokenizer_is_the_same_with_any_number_of_threads(settings: dict[str, str]) -> None:
    """Learners train it each for themselves and must agree. A platform or a release of the package that gives another one fails
    here; 240 of the 393 merges win a tie."""
    done = subprocess.run([sys.executable, "-c", TRAINING], env=os.environ | settings, capture_output=True, text=True, check=True)
    assert done.stdout == EARLIER


def test_merges_of_an_earlier_version_encode_as_they_did() -> None:
    """A run's text.json and the token cache keep merges, and ids that were trained on mean what they meant."""
    merges = [(104, 101), (116, 257), (32, 258), (32, 101), (110, 100), (260, 261), (32, 195)]
    tokenizer = BpeTokenizer(merges)
    assert tokenizer.fingerprint == "8ae6fceb54cacc9b02f9de6c98d8b1d5feff848edaa5a22f7a196c1a5ed42302"
    text = "the end für the  end\n 日".encode() + b"\xff\x80 \xc3"
    ids = [258, 262, 32, 102, 195, 188, 114, 259, 32, 262, 10, 32, 230, 151, 165, 255, 128, 263]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("merges", [
    [(97, 300)], [(97, 257)], [(-1, 97)], [(97, END_OF_DOCUMENT)], [(97, 98), (257, 99), (98, 99), (97, 259)],
], ids=["no such token", "itself", "negative", "the end of a document", "one piece twice"])  # fmt: skip
def test_merges_that_no_training_gives_are_refused(merges: list[tuple[int, int]]) -> None:
    with pytest.raises(DataError, match=r"a BPE cannot merge .*: its merges are damaged$"):
        BpeTokenizer(merges)


def test_train_bpe_on_a_tie_takes_the_smallest_ids() -> None:
    assert train_bpe(b"xy\nab\nxy\nab", 258).merges == ((ord("a"), ord("b")),)


def test_train_bpe_twice_gives_the_same_fingerprint_and_another_size_another() -> None:
    assert train_bpe(SAMPLE, 280).fingerprint == train_bpe(SAMPLE, 280).fingerprint
    assert train_bpe(SAMPLE, 280).fingerprint != train_bpe(SAMPLE, 281).fingerprint
    assert train_bpe(SAMPLE, 257).fingerprint != ByteTokenizer().fingerprint


def test_bpe_on_text_like_its_sample_is_shorter_than_bytes(trained: BpeTokenizer) -> None:
    assert trained.vocab_size == 300
    assert len(trained.encode(SAMPLE)) < len(SAMPLE) / 2


def test_bpe_encoding_a_text_again_or_in_a_batch_is_the_same(trained: BpeTokenizer) -> None:
    assert trained.encode(SAMPLE) == trained.encode(SAMPLE)
    assert trained.encode_batch(TEXTS) == [trained.encode(text) for text in TEXTS]


@pytest.mark.parametrize("token", [-1, 300])
def test_decode_of_an_unknown_token_names_it(trained: BpeTokenizer, token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} is not in the vocabulary of 300"):
        trained.decode([token])
    with pytest.raises(DataError, match=f"token {token} is not in the vocabulary of 257"):
        ByteTokenizer().decode([token])


def test_decode_of_the_end_of_a_document_is_nothing(trained: BpeTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), trained):
        assert tokenizer.decode([97, END_OF_DOCUMENT, 98]) == b"ab"


@pytest.mark.parametrize("size", [0, 256, 65_537])
def test_train_bpe_with_an_impossible_vocabulary_names_the_range(size: int) -> None:
    with pytest.raises(DataError, match=f"data.vocab = {size}: is not possible for a BPE: ask for 257 to 65536 entries"):
        train_bpe(SAMPLE, size)


def test_train_bpe_on_too_little_text_says_how_far_it_goes() -> None:
    with pytest.raises(DataError, match=r"data.vocab = .*: a sample of 5 bytes repeats too little .* ask for at most 258"):
        train_bpe(b"ab ab", 1024 - 512)
    assert train_bpe(b"ab ab", 258).vocab_size == 258


def words(count: int, seed: int = 0) -> bytes:
    """Each twice, so that every one of them has merges of its own."""
    chance = random.Random(seed)
    found = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(count)]
    return " ".join(word for word in found for _ in range(2)).encode()


def test_sample_grows_until_it_has_the_entries_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1000)
    sample = words(800)
    small = train_bpe(sample[:1000], 600)
    assert train_bpe(sample, 600).merges == small.merges, "what the first bytes are enough for is learnt from them, as ever"
    with pytest.raises(DataError, match="a sample of 1000 bytes repeats too little"):
        train_bpe(sample[:1000], 1400)
    assert train_bpe(sample, 1400).merges == train_bpe(sample[:4000], 1400).merges
    assert train_bpe(sample, 1400).vocab_size == 1400


def test_more_text_is_asked_for_only_where_all_of_it_was_seen() -> None:
    with pytest.raises(DataError, match=r"ask for at most 258, or give more text$"):
        train_bpe(b"ab ab", 512)
    with pytest.raises(DataError, match=r"ask for at most 258, or name a Hugging Face tokenizer with data.tokenizer$"):
        train_bpe(b"ab ab", 512, complete=False)
    sampler = Sampler(5)
    sampler.see(b"key 1", b"ab ab")
    assert sampler.complete
    sampler.see(b"key 2", b"c")
    assert not sampler.complete


def test_large_sample_begins_with_the_small_one() -> None:
    documents = [bytes([65 + index]) * (50 * index) for index in range(20)]
    assert training_sample(documents, 5000)[:700] == training_sample(documents, 700)


def test_training_sample_is_full_and_does_not_depend_on_the_order_of_documents() -> None:
    documents = [bytes([65 + index]) * 100 for index in range(10)]
    sample = training_sample(documents, 250)
    assert len(sample) == 250
    assert sample == training_sample(documents[::-1], 250)
    assert len(training_sample(documents, 5000)) == 1000
