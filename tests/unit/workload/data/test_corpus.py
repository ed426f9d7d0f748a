from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from atoll.errors import DataError
from atoll.workload.data.corpus import NAMED_MAX, Corpus, Skips, split_documents, stdlib_corpus

TOPICS = [f"document {index}\n".encode() * 3 for index in range(200)]


def corpus_of(documents: list[bytes]) -> Corpus:
    return Corpus("test", tuple(documents), "0" * 64)


def fake_stdlib(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, bytes]) -> None:
    write(root, files)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_stdlib_corpus_read_twice_is_the_same() -> None:
    first, second = stdlib_corpus(500_000), stdlib_corpus(500_000)
    assert first == second
    assert len(first.fingerprint) == 64


def test_stdlib_corpus_by_default_is_megabytes_within_its_budget() -> None:
    corpus = stdlib_corpus()
    assert 1_000_000 < corpus.size_bytes <= 8_000_000
    assert all(corpus.documents)


def test_stdlib_corpus_with_a_larger_budget_only_adds_documents_at_the_end() -> None:
    small, large = stdlib_corpus(300_000), stdlib_corpus(600_000)
    assert large.documents[: len(small.documents)] == small.documents
    assert len(large.documents) > len(small.documents)
    assert large.fingerprint != small.fingerprint


def test_stdlib_corpus_skips_tests_packages_and_build_files_and_sorts_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outside = [
        "test/a.py",
        "x/tests/b.py",
        "site-packages/c.py",
        "idlelib/d.py",
        "__pycache__/e.py",
        "lib2to3/tests/f.py",
    ]
    build = ["_sysconfigdata_linux.py", "config-3.11/g.py"]
    fake_stdlib(
        monkeypatch, tmp_path, dict.fromkeys(outside + build, b"no") | {"z.py": b"2", "b/a.py": b"1", "n.txt": b""}
    )
    corpus = stdlib_corpus()
    assert corpus.documents == (b"1", b"2")
    assert corpus.skipped == 0


def test_stdlib_corpus_with_unusable_files_names_each_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_stdlib(
        monkeypatch, tmp_path, {"a.py": b"text", "b.py": b"\xff\xfe", "c.py": b"", "d.py": b"x" * 100, "e.py": b"x"}
    )
    corpus = stdlib_corpus(50)
    assert corpus.documents == (b"text",)
    assert corpus.skipped == 4
    assert [(skip.path, skip.reason) for skip in corpus.skipped_files] == [
        ("b.py", "not utf-8"),
        ("c.py", "empty"),
        ("d.py", "over the budget of 50 bytes"),
        ("e.py", "over the budget of 50 bytes"),
    ]


def test_stdlib_corpus_where_nothing_fits_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_stdlib(monkeypatch, tmp_path, {"a.py": b"text"})
    with pytest.raises(DataError, match=r"a\.py is over the budget of 2 bytes; name a text file or folder instead"):
        stdlib_corpus(2)


def test_skips_count_everything_and_name_the_first_few() -> None:
    skips = Skips()
    assert skips.sentence("data.corpus") is None
    for line in range(NAMED_MAX + 5):
        skips.add(f"a.jsonl line {line}", "empty" if line else "blank line")
    sentence = skips.sentence("data.corpus")
    assert sentence is not None
    assert sentence.startswith(f"data.corpus: left out {NAMED_MAX + 5} (1 blank line, {NAMED_MAX + 4} empty): a.jsonl line 0, ")
    assert sentence.endswith(f"a.jsonl line {NAMED_MAX - 1} and 5 more")


def test_corpus_in_memory_is_read_again_and_again() -> None:
    corpus = corpus_of(TOPICS)
    assert list(corpus.read()) == list(corpus.read()) == TOPICS
    corpus.check_unchanged()


def test_split_holds_out_about_a_twentieth_and_never_overlaps() -> None:
    split = split_documents(corpus_of(TOPICS))
    assert not set(split.train) & set(split.heldout)
    assert sorted(split.train + split.heldout) == sorted(TOPICS)
    assert 2 <= len(split.heldout) <= 25
    assert split == split_documents(corpus_of(TOPICS))


def test_split_with_a_document_added_moves_no_other() -> None:
    before, after = split_documents(corpus_of(TOPICS)), split_documents(corpus_of([b"new", *TOPICS]))
    assert set(before.train) <= set(after.train)
    assert set(before.heldout) <= set(after.heldout)


def test_split_with_duplicates_keeps_all_copies_on_one_side() -> None:
    split = split_documents(corpus_of(TOPICS + TOPICS))
    assert not set(split.train) & set(split.heldout)
    assert len(split.train) + len(split.heldout) == 2 * len(TOPICS)


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_split_of_two_documents_gives_each_side_one_at_any_share(share: float) -> None:
    split = split_documents(corpus_of([b"one", b"two"]), share)
    assert len(split.train) == len(split.heldout) == 1


def test_split_of_one_distinct_document_is_refused() -> None:
    with pytest.raises(DataError, match="only one distinct document"):
        split_documents(corpus_of([b"same", b"same"]))
