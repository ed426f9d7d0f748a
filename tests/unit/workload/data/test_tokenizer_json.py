from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import saved, trained
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.processors import TemplateProcessing

from atoll.errors import DataError
from atoll.workload.data.tokenizer import JsonTokenizer


def test_ids_are_those_of_the_package_and_round_trip(tmp_path: Path) -> None:
    theirs = trained()
    ours = JsonTokenizer(saved(tmp_path, theirs))
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.end_of_document == theirs.token_to_id("<|endoftext|>")
    for text in ("", "the fox", "für 日本\n\n  x", " " * 50):
        assert ours.encode(text.encode()) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text.encode())) == text.encode()
    texts = [b"the end", b"", b"of the story"]
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]


def test_end_of_document_decodes_to_nothing_and_unknown_tokens_are_named(tmp_path: Path) -> None:
    ours = JsonTokenizer(saved(tmp_path, trained()))
    assert ours.decode([*ours.encode(b"a"), ours.end_of_document, *ours.encode(b"b")]) == b"ab"
    with pytest.raises(DataError, match=f"token {ours.vocab_size} is not in the vocabulary of {ours.vocab_size}"):
        ours.decode([ours.vocab_size])


def test_text_that_spells_the_end_of_a_document_does_not_end_it(tmp_path: Path) -> None:
    ours = JsonTokenizer(saved(tmp_path, trained()))
    ids = ours.encode(b"a <|endoftext|> b")
    assert ours.end_of_document not in ids
    assert ours.decode(ids) == b"a <|endoftext|> b"


def test_truncation_padding_and_dropout_of_the_file_are_switched_off(tmp_path: Path) -> None:
    theirs = trained()
    plain = JsonTokenizer(saved(tmp_path, theirs)).encode(b"the quick brown fox jumps")
    theirs.enable_truncation(max_length=2)
    theirs.enable_padding(length=50)
    model = json.loads(theirs.to_str())["model"] | {"dropout": 0.9}
    ours = JsonTokenizer(saved(tmp_path, theirs, "tuned.json", model=model))
    assert [ours.encode(b"the quick brown fox jumps") for _ in range(5)] == [plain] * 5


def unlike_training(**parts: object) -> Any:
    """All that a file may say and that training does without: a token in front, dropout, truncation, padding."""
    theirs = trained()
    theirs.add_special_tokens(["<s>"])
    theirs.post_processor = TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", theirs.token_to_id("<s>"))])
    theirs.enable_truncation(max_length=3)
    theirs.enable_padding(length=50, pad_id=theirs.token_to_id("<s>"), pad_token="<s>")
    said = json.loads(theirs.to_str())
    return said | {"model": said["model"] | {"dropout": 0.9}} | parts


def test_what_is_exported_gives_the_ids_of_training_whatever_the_file_said(tmp_path: Path) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps(unlike_training(decoder=None)))
    ours = JsonTokenizer(path)
    exported = Tokenizer.from_str(ours.exported.decode())
    for text in ("the quick brown fox jumps over the lazy dog", "für 日本\n\n  x", ""):
        wanted = ours.encode(text.encode())
        for specials in (False, True):
            assert [exported.encode(text, add_special_tokens=specials).ids for _ in range(5)] == [wanted] * 5
        assert exported.decode(wanted, skip_special_tokens=False) == text == ours.decode(wanted).decode()
    assert exported.get_vocab() == Tokenizer.from_file(str(path)).get_vocab()


def test_file_that_says_nothing_else_than_training_does_is_exported_as_it_is(tmp_path: Path) -> None:
    ours = JsonTokenizer(saved(tmp_path, trained()))
    assert ours.exported == ours.content
    assert json.loads(ours.content)["post_processor"] is None


def test_packed_file_and_folder_are_the_same_tokenizer(tmp_path: Path) -> None:
    path = saved(tmp_path, trained(), "tokenizer.json")
    (tmp_path / "packed.json.xz").write_bytes(lzma.compress(path.read_bytes()))
    prints = {JsonTokenizer(place).fingerprint for place in (path, tmp_path, tmp_path / "packed.json.xz")}
    assert len(prints) == 1


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_usual_names_of_the_end_are_found(tmp_path: Path, end: str) -> None:
    theirs = trained(end)
    assert JsonTokenizer(saved(tmp_path, theirs)).end_of_document == theirs.token_to_id(end)


def test_end_may_be_chosen_and_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    theirs = trained()
    theirs.add_special_tokens([AddedToken("<stop>")])
    path = saved(tmp_path, theirs)
    chosen = JsonTokenizer(path, "<stop>")
    assert chosen.end_of_document == theirs.token_to_id("<stop>") == chosen.vocab_size - 1
    assert chosen.fingerprint != JsonTokenizer(path).fingerprint


def test_vocabularies_of_other_models_are_counted_too(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "</s>": 7}, unk_token="a"))
    assert JsonTokenizer(saved(tmp_path, words)).vocab_size == 8
    pieces = Tokenizer(Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0)], unk_id=0, byte_fallback=False))
    assert JsonTokenizer(saved(tmp_path, pieces)).end_of_document == 1


WORDS = b'{"model": {"type": "WordLevel", "unk_token": "a", "vocab": %b}}'


@pytest.mark.parametrize(
    ("content", "end", "sentence"),
    [
        (None, "", r"data.tokenizer = '.*t.json': must be 'bytes', 'bpe' or a Hugging Face tokenizer's JSON file, and there"),
        (b"", "", "t.json is no Hugging Face tokenizer"),
        (b"[1]", "", "t.json is no Hugging Face tokenizer"),
        (b'{"model": ' + b"[" * 5000, "", "t.json is no Hugging Face tokenizer"),
        (b'{"model": {}}', "", "t.json is no Hugging Face tokenizer"),
        (b'{"model": []}', "", "t.json is no Hugging Face tokenizer"),
        (b'{"model": {"type": "Magic", "vocab": {"</s>": 0}}}', "", "t.json is no Hugging Face tokenizer"),
        *((WORDS % wrong, "", "t.json is no Hugging Face tokenizer") for wrong in (b'{"a": "b"}', b'{"a": -1}', b"[]", b'"a"')),
        *(
            (
                b'{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], %b]}}' % wrong,
                "",
                "is no Hugging Face tokenizer",
            )
            for wrong in (b"[]", b"5", b"[[], 0.0]", b'"b"')
        ),
        (WORDS % b"{}", "", "t.json has no entry"),
        (WORDS % b'{"a": 0}', "", r"t.json has none of <\|endoftext\|>, .*: say with data.end_of_document"),
        (WORDS % b'{"a": 0}', "b", "data.end_of_document = 'b': the tokenizer .* has no such entry"),
    ],
)
def test_file_that_is_no_tokenizer_says_what_would_be_right(
    tmp_path: Path, content: bytes | None, end: str, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        JsonTokenizer(tmp_path / "t.json", end)


def test_missing_file_says_from_where_a_relative_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no file data/t.json \(a relative path counts from the current folder\)$"):
        JsonTokenizer(Path("data/t.json"))
    with pytest.raises(DataError, match=r"no file /.*/t.json$"):
        JsonTokenizer(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("model", "flaw"),
    [
        (WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"), r"WordLevel error: Missing \[UNK\] token from the vocabulary"),
        (Unigram([("a", -1.0), ("</s>", -1.0)], None, False), "Encountered an unknown token"),
    ],
)
def test_text_the_package_cannot_encode_is_told_in_one_sentence(tmp_path: Path, model: WordLevel | Unigram, flaw: str) -> None:
    ours = JsonTokenizer(saved(tmp_path, Tokenizer(model)))
    assert ours.encode(b"a") == [0]
    with pytest.raises(DataError, match=rf"^data.tokenizer: .*tok.json cannot encode the text \({flaw}.*\): give .*$"):
        ours.encode(b"b")


def letters(**options: object) -> Tokenizer:
    """Of the small letters alone."""
    names = [*"abcdefghijklmnopqrstuvwxyz ", "</s>", *(["<unk>"] if "unk_token" in options else [])]
    return Tokenizer(BPE({name: number for number, name in enumerate(names)}, [], **options))


def test_text_that_a_tokenizer_loses_is_counted_and_shown(tmp_path: Path) -> None:
    for theirs in (letters(), letters(unk_token="<unk>")):
        ours = JsonTokenizer(saved(tmp_path, theirs))
        assert ours.losses(b"all of it comes back") is None
        assert ours.losses(("so  " * 100 + "日本 日").encode()) == (
            f"data.tokenizer: {tmp_path}/tok.json has no entry for some of the text: in a sample 3 of 203 characters are lost "
            "to the model, such as '日', '本'; a byte-level tokenizer, or one with byte fallback, loses none"
        )


def test_what_a_normaliser_or_the_joining_of_words_changes_is_not_lost(tmp_path: Path) -> None:
    folding, spaced, bare = letters(), letters(), trained()
    folding.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    words = Tokenizer(WordPiece({"do": 0, "not": 1, "u": 2, "##n": 3, "</s>": 4, "[UNK]": 5}, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaced.decoder = decoders.Replace("\u2581", " ")
    bare.decoder = None
    for theirs, text in ((folding, "Ün do\tNOT"), (words, "Ün do not   un\n"), (spaced, "un do  not"), (bare, "Ün do not 日本")):
        assert JsonTokenizer(saved(tmp_path, theirs)).losses(text.encode()) is None, text


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes utf-8 text only"):
        JsonTokenizer(saved(tmp_path, trained())).encode(b"\xff")
