from __future__ import annotations

import json
import lzma
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_tokenizer import saved, trained

from atoll.config import Data, load
from atoll.errors import ConfigError, DataError
from atoll.tasks.task import language_task
from atoll.workload.data import tokens
from atoll.workload.data.corpus import Corpus, split_documents, stdlib_corpus
from atoll.workload.data.documents import FileTexts
from atoll.workload.data.stream import pack_documents, token_data
from atoll.workload.data.tokenizer import ByteTokenizer, train_bpe, training_sample
from atoll.workload.data.tokens import Work, default_cache, text_data

STORIES = [f"story {number}: the fox and the dog, told {number} times over.\n" * (1 + number % 7) for number in range(120)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(lines(STORIES)))
    (tmp_path / "val-a.jsonl").write_bytes(lines(["never seen a"] * 9))
    (tmp_path / "val-b.jsonl").write_bytes(lines(["never seen b"] * 9))
    return tmp_path


def data(here: Path, **changes: Any) -> Data:
    return Data(**{"corpus": str(here / "train.jsonl.xz"), "cache": str(here / "cache")} | changes)


def folders(here: Path) -> list[Path]:
    return [path for path in sorted((here / "cache" / "tokens").iterdir()) if path.suffix != ".lock"]


def memory(texts: list[str] = STORIES) -> Corpus:
    return Corpus("memory", tuple(text.encode() for text in texts), "0" * 64)


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    encode_into = Work.encode_into

    def counted(self: Work, folder: Path) -> Any:
        made.append(self.key)
        return encode_into(self, folder)

    monkeypatch.setattr(Work, "encode_into", counted)
    return made


# ---------------------------------------------------------------- the same tokens as in memory


@pytest.mark.parametrize("cache", ["", "off", "cache"])
def test_tokens_of_files_are_those_of_the_same_documents_in_memory(here: Path, cache: str) -> None:
    found = text_data(data(here, cache=cache and (cache if cache == "off" else str(here / cache))))
    expected = token_data(memory(), ByteTokenizer())
    assert torch.equal(found.tokens.train, expected.train)
    assert torch.equal(found.tokens.heldout, expected.heldout)
    assert found.tokens.train.dtype == torch.int16
    assert found.notes == ()


def test_bpe_is_trained_on_the_documents_that_are_not_held_out(here: Path) -> None:
    split = split_documents(memory())
    expected = train_bpe(training_sample(split.train), 300)
    found = text_data(data(here, tokenizer="bpe", vocab=300))
    assert found.tokenizer.fingerprint == expected.fingerprint
    assert torch.equal(found.tokens.heldout, pack_documents(split.heldout, expected))
    again = text_data(data(here, tokenizer="bpe", vocab=300))
    assert again.tokenizer.fingerprint == expected.fingerprint, "from the cache, with its merges"
    assert again.tokens.fingerprint == found.tokens.fingerprint


def test_bpe_of_many_entries_is_trained_on_more_of_the_text(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.workload.data.tokenizer.SAMPLE_BYTES", 300)
    many = data(here, tokenizer="bpe", vocab=380, cache="off")
    short = r"a sample of 300 bytes repeats too little .* or name a Hugging Face tokenizer with data.tokenizer$"
    with monkeypatch.context() as small, pytest.raises(DataError, match=short):
        small.setattr("atoll.workload.data.tokens.SAMPLE_BYTES_MAX", 300)
        text_data(many)
    assert text_data(many).tokenizer.vocab_size == 380
    with pytest.raises(DataError, match=r"a sample of \d{5} bytes repeats too little .* or give more text$"):
        text_data(data(here, tokenizer="bpe", vocab=60_000, cache="off"))


def test_standard_library_with_bpe_keeps_the_fingerprint_it_had_in_memory(here: Path) -> None:
    corpus = stdlib_corpus(60_000)
    tokenizer = train_bpe(training_sample(split_documents(corpus).train), 280)
    expected = token_data(corpus, tokenizer)
    found = text_data(Data(max_bytes=60_000, tokenizer="bpe", vocab=280, cache=str(here / "cache")))
    assert found.tokens.fingerprint == expected.fingerprint
    assert torch.equal(found.tokens.train, expected.train)


def test_hugging_face_tokenizer_ends_every_document_with_its_own_token(here: Path) -> None:
    path = saved(here, trained(), "tok.json")
    found = text_data(data(here, tokenizer=str(path)))
    split = split_documents(memory())
    for side, kept in ((found.tokens.train, split.train), (found.tokens.heldout, split.heldout)):
        ids = [[*found.tokenizer.encode(document), 0] for document in kept]
        assert side.tolist() == [token for each in ids for token in each]
    assert found.tokens.vocab_size == 280


def test_heldout_text_of_several_files_is_kept_apart_and_all_the_rest_trained_on(here: Path) -> None:
    found = text_data(data(here, heldout=str(here / "val-*.jsonl")))
    decode = ByteTokenizer().decode
    assert decode(found.tokens.heldout.tolist()) == b"never seen a" * 9 + b"never seen b" * 9
    assert decode(found.tokens.train.tolist()) == "".join(STORIES).encode()


def test_lone_text_file_with_heldout_text_beside_it_is_not_cut(here: Path) -> None:
    (here / "book.txt").write_bytes(b"a line of a book\n" * 2000)
    whole = text_data(data(here, corpus=str(here / "book.txt"), heldout=str(here / "val-a.jsonl")))
    cut = text_data(data(here, corpus=str(here / "book.txt")))
    assert int((whole.tokens.train == 256).sum()) == 1
    assert int((cut.tokens.train == 256).sum()) > 2


def test_long_documents_are_encoded_in_pieces_and_end_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text_data(data(here, cache="off")).tokens
    monkeypatch.setattr(tokens, "PIECE_BYTES", 50)
    monkeypatch.setattr(tokens, "BATCH_BYTES", 120)
    assert torch.equal(text_data(data(here, cache="off")).tokens.train, expected.train)
    (here / "wide.jsonl").write_bytes(lines(["日本語" * 40, "ü" * 77]))
    wide = text_data(data(here, corpus=str(here / "wide.jsonl"), tokenizer=str(saved(here, trained())), cache="off"))
    both = torch.cat([wide.tokens.train, wide.tokens.heldout]).tolist()
    assert len(wide.tokenizer.decode(both).decode()) == 120 + 77, "no character was cut in two"


def test_vocabulary_beyond_sixteen_bits_is_kept_in_thirty_two(here: Path) -> None:
    path = here / "wide.json"
    vocab = {"</s>": 70_000} | {word: 40_000 + number for number, word in enumerate(["story", "the", "fox"])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "fox"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}), encoding="utf8")
    found = text_data(data(here, tokenizer=str(path)))
    assert found.tokens.train.dtype == torch.int32
    assert set(found.tokens.train.tolist()) == {40_000, 40_001, 40_002, 70_000}


# ---------------------------------------------------------------- the cache


def test_second_run_takes_the_tokens_from_the_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_encodings(monkeypatch)
    first, second = text_data(data(here)), text_data(data(here))
    assert len(made) == 1
    assert torch.equal(first.tokens.train, second.tokens.train)
    assert first.tokens.fingerprint == second.tokens.fingerprint
    (folder,) = folders(here)
    assert sorted(path.name for path in folder.iterdir()) == ["about.json", "heldout.npy", "train.npy"]
    assert np.array_equal(np.load(folder / "train.npy"), first.tokens.train.numpy()), "any numpy can read it"


def test_other_text_field_tokenizer_or_heldout_is_another_place_in_the_cache(here: Path) -> None:
    bpe = [{"tokenizer": "bpe", "vocab": vocab} for vocab in (270, 280)]
    for changes in ({}, *bpe, {"heldout": str(here / "val-a.jsonl")}):
        text_data(data(here, **changes))
    (here / "train.jsonl.xz").write_bytes(lzma.compress(lines(STORIES[1:])))
    text_data(data(here))
    assert len(folders(here)) == 5


def test_tokens_are_mapped_and_the_file_stays_as_it_is(here: Path) -> None:
    text_data(data(here)).tokens.train.zero_()
    again = text_data(data(here))
    assert int(again.tokens.train.sum()) > 0
    assert again.notes == ()


def damage_byte(folder: Path) -> None:
    content = bytearray((folder / "train.npy").read_bytes())
    content[-3] ^= 1
    (folder / "train.npy").write_bytes(content)


def cut_off(folder: Path) -> None:
    os.truncate(folder / "heldout.npy", 200)


def remove(folder: Path) -> None:
    (folder / "train.npy").unlink()


def spoil_about(folder: Path) -> None:
    text = (folder / "about.json").read_text()
    (folder / "about.json").write_text(text.replace('"vocab_size": 257', '"vocab_size": 258'))


def empty_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_byte, cut_off, remove, spoil_about, empty_about])
def test_damaged_cache_is_noticed_and_made_anew_with_a_note(here: Path, damage: Any) -> None:
    whole = text_data(data(here)).tokens.train.clone()
    (folder,) = folders(here)
    damage(folder)
    found = text_data(data(here))
    assert torch.equal(found.tokens.train, whole)
    (note,) = found.notes
    assert note.startswith(f"the cached tokens in {folder} were damaged (")
    assert text_data(data(here)).notes == ()


def test_most_bytes_hold_for_cached_tokens_too(here: Path) -> None:
    size = sum(len(text) for text in STORIES)
    wanted = {"heldout": str(here / "val-a.jsonl")}
    for most in (size, 0):  # the corpus and the held-out text each by itself, now and from the cache
        text_data(data(here, max_bytes=most, **wanted))
        text_data(data(here, max_bytes=most, **wanted))
    with pytest.raises(DataError, match=f"the text holds more than {size - 1} bytes: give less, or raise data.max_bytes"):
        text_data(data(here, max_bytes=size - 1, **wanted))
    with pytest.raises(DataError, match="the text holds more than 50 bytes"):
        text_data(data(here, corpus=str(here / "val-b.jsonl"), max_bytes=50, **wanted))
    assert text_data(data(here, **wanted)).notes == (), "what was refused has damaged nothing"


def test_files_named_twice_or_passed_over_are_told_whatever_is_cached(here: Path) -> None:
    once, twice = str(here / "train.jsonl.xz"), f"{here}/train.jsonl.xz,{here}/train.*"
    told = (f"data.corpus: left out 1 (1 named twice and read once): {here}/train.jsonl.xz",)
    found = [text_data(data(here, corpus=corpus)).notes for corpus in (twice, once, twice)]
    assert found == [told, (), told]
    assert len(folders(here)) == 1
    (here / "folder").mkdir()
    (here / "folder" / "train.jsonl").write_bytes(lines(STORIES))
    assert text_data(data(here, corpus=str(here / "folder"))).notes == ()
    (here / "folder" / "notes.md").write_bytes(b"x")
    (note,) = text_data(data(here, corpus=str(here / "folder"))).notes
    assert note.startswith(f"data.corpus: files in folders ignored by name or kind: 1, such as {here}/folder/notes.md; in")


def test_processes_that_race_for_the_same_text_get_the_same_tokens(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_encodings(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: text_data(data(here)), range(4)))
    assert len(made) == 1, "the others waited"
    assert all(torch.equal(each.tokens.train, found[0].tokens.train) for each in found)


def test_file_system_without_locks_only_does_the_work_twice(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(tokens.fcntl, "flock", refused)
    inner: list[Any] = []
    encode_into = Work.encode_into

    def slow(self: Work, folder: Path) -> Any:
        about = encode_into(self, folder)
        if not inner:  # another process comes and is done before this one renames
            inner.append(None)
            inner.append(text_data(data(here)))
        return about

    monkeypatch.setattr(Work, "encode_into", slow)
    outer = text_data(data(here))
    assert torch.equal(outer.tokens.train, inner[1].tokens.train)
    assert len(folders(here)) == 1


def test_what_a_killed_process_left_is_swept_and_a_failed_one_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_data(data(here))
    (done,) = folders(here)
    left = done.with_name(f"{done.name[:16]}-1-dead.part")
    left.mkdir()
    (left / "train.npy").write_bytes(b"half")
    text_data(data(here))
    assert folders(here) == [done]

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "_checked", full)
    with pytest.raises(DataError, match=r"cannot be used \(No space left on device\): name another folder with data.cache"):
        text_data(data(here, heldout=str(here / "val-a.jsonl")))
    assert folders(here) == [done]


def test_cache_folder_that_cannot_be_made_says_what_to_do(here: Path) -> None:
    with pytest.raises(DataError, match=r"\(Not a directory\): name another folder with data.cache, or say data.cache=off"):
        text_data(data(here, cache=str(here / "val-a.jsonl" / "x")))


def test_default_cache_is_where_the_system_keeps_such_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "atoll"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == tmp_path / ".cache" / "atoll"


@pytest.mark.parametrize("key", ["tokenizer", "cache"])
def test_home_of_nobody_is_told_by_its_key(here: Path, key: str) -> None:
    said = f"data.{key} = '~nobody-of-this-name/x': there is no home folder ~nobody-of-this-name; write the path out"
    with pytest.raises(DataError, match=f"^{said}$"):
        text_data(data(here, **{key: "~nobody-of-this-name/x"}))


def test_user_without_a_home_is_asked_for_a_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a number that nobody has."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(DataError, match=r"data.cache = '': there is no home folder ~; name a folder with data.cache"):
        text_data(data(here, cache=""))


# ---------------------------------------------------------------- what the user is told


def test_documents_left_out_are_told_now_and_from_the_cache(here: Path) -> None:
    (here / "holes.jsonl").write_bytes(lines(["", *STORIES, ""]))
    wanted = data(here, corpus=str(here / "holes.jsonl"))
    (note,) = text_data(wanted).notes
    assert note == f"data.corpus: left out 2 (2 empty): {here}/holes.jsonl line 1, {here}/holes.jsonl line 122"
    assert text_data(wanted).notes == (note,)


def test_text_that_the_tokenizer_loses_is_told_now_and_from_the_cache(here: Path) -> None:
    vocab = {letter: number for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz")} | {"</s>": 27}
    (here / "small.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}))
    wanted = data(here, tokenizer=str(here / "small.json"))
    (note,) = text_data(wanted).notes
    assert note.startswith(f"data.tokenizer: {here}/small.json has no entry for some of the text: in a sample ")
    assert text_data(wanted).notes == (note,)
    assert text_data(data(here, tokenizer=str(saved(here, trained())))).notes == ()


def test_training_documents_that_are_held_out_too_are_told(here: Path) -> None:
    (here / "leak.jsonl").write_bytes(lines(["fresh", STORIES[3], STORIES[4]]))
    (note,) = text_data(data(here, heldout=str(here / "leak.jsonl"))).notes
    assert note == "data.heldout: 2 of the training documents are held out too, which flatters the loss"


def test_progress_reaches_the_end_of_reading_and_of_encoding(here: Path) -> None:
    told: list[tuple[str, int, int]] = []
    text_data(data(here), lambda *now: told.append(now))
    size = sum(len(text) for text in STORIES)
    assert told[-1] == ("encoding text", size, size)
    assert told[0][0] == "reading text"
    assert told[0][1] == told[0][2]
    text_data(data(here, heldout=str(here / "val-a.jsonl")), lambda *now: told.append(now))
    assert told[-1] == ("encoding text", size + 108, size + 108), "held-out text too"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"corpus": "gone/*.txt"}, r"data.corpus: no file matches gone/\*.txt"),
        ({"heldout": "gone.jsonl"}, "data.heldout: gone.jsonl does not exist"),
        ({"heldout": "train.jsonl.xz"}, "data.heldout: .*train.jsonl.xz is in data.corpus too: what is held out must not be"),
        ({"heldout": "empty.jsonl"}, "data.heldout: empty.jsonl is empty: it must hold some text"),
        ({"corpus": "empty.jsonl"}, "data.corpus: empty.jsonl is empty: it must hold some text"),
        ({"corpus": "empty.txt"}, "data.corpus: empty.txt is empty: it must hold some text"),
        ({"corpus": "one.jsonl"}, "one.jsonl has only one distinct document, .* or data.heldout"),
        ({"max_bytes": 1000}, "the text holds more than 1000 bytes: give less, or raise data.max_bytes"),
        ({"tokenizer": "byte"}, "data.tokenizer = 'byte': must be 'bytes', 'bpe' or a Hugging Face tokenizer's JSON file"),
        ({"field": "body"}, "train.jsonl.xz, line 1: has no field 'body'"),
    ],
)
def test_text_that_cannot_be_used_says_what_would_be_right(
    here: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(here)
    for name in ("empty.jsonl", "empty.txt"):
        (here / name).write_bytes(b"")
    (here / "one.jsonl").write_bytes(lines(["same", "same"]))
    with pytest.raises(DataError, match=sentence):
        text_data(data(here, **changes))
    assert not (here / "cache" / "tokens").exists() or folders(here) == []


def test_text_that_changes_while_it_is_encoded_is_not_cached(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = FileTexts.check_unchanged

    def late(self: FileTexts) -> None:
        (here / "train.jsonl.xz").write_bytes(b"other")
        check(self)

    monkeypatch.setattr(FileTexts, "check_unchanged", late)
    with pytest.raises(DataError, match=r"train.jsonl.xz changed while it was read"):
        text_data(data(here))
    assert folders(here) == []


# ---------------------------------------------------------------- the task that stands on it


def test_task_on_files_trains_on_their_tokens_and_passes_the_notes_on(here: Path) -> None:
    (here / "val-b.jsonl").write_bytes(lines(["", "never seen b" * 9]))
    path = saved(here, trained())
    config = load(overrides={"data": {
        "corpus": str(here / "train.jsonl.xz"), "heldout": f"{here}/val-a.jsonl,{here}/val-b.jsonl", "seq_len": 16,
        "tokenizer": str(path), "cache": str(here / "cache"), "batch_size": 2,
    }})  # fmt: skip
    task = language_task(config)
    assert task.notes == (f"data.heldout: left out 1 (1 empty): {here}/val-b.jsonl line 1",)
    assert task.batch(0, 0, 0).shape == (2, 17)
    assert task.tokenizer is not None
    assert task.tokenizer.vocab_size == 280
    assert 5.0 < task.evaluate(task.build()) < 6.5, "about log 280: the model's vocabulary is the tokenizer's"


def test_sequence_longer_than_the_text_is_refused_with_the_longest_possible(here: Path) -> None:
    files = {"corpus": str(here / "train.jsonl.xz"), "heldout": str(here / "val-a.jsonl")}
    with pytest.raises(DataError, match=r"data.seq_len = 500 is longer than the held-out text of 117 tokens: .* at most 116"):
        language_task(load(overrides={"data": files | {"seq_len": 500}}))


def test_command_line_says_what_was_left_out_and_how_far_long_work_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.cli import building

    monkeypatch.setattr(building, "SAY_EVERY_SECONDS", -1.0)
    (here / "holes.jsonl").write_bytes(lines(["", *STORIES]))
    said: list[str] = []
    settings = load(overrides={"data": {"corpus": str(here / "holes.jsonl"), "cache": str(here / "cache"), "seq_len": 16}})
    building.built(settings, (), said.append)
    assert said == [
        "reading text: 0 of 0 MB",
        "encoding text: 0 of 0 MB",
        f"warning: data.corpus: left out 1 (1 empty): {here}/holes.jsonl line 1",
    ]


def test_end_of_document_of_a_tokenizer_of_ours_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match=r"data.end_of_document = '</s>'"):
        load(assignments=["data.end_of_document=</s>"])
