from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from atoll.errors import DataError
from atoll.workload.data import documents
from atoll.workload.data.corpus import CUT_BYTES, Skips
from atoll.workload.data.documents import FileTexts

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def lines(*texts: str, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": index, field: text}).encode() + b"\n" for index, text in enumerate(texts))


def read(wanted: Path | str, **options: str | bool) -> list[bytes]:
    return list(FileTexts(str(wanted), str(options.pop("field", "text")), **options).read())  # type: ignore[arg-type]


# ---------------------------------------------------------------- which files


def test_folder_gives_its_text_and_json_lines_in_order_of_name(tmp_path: Path) -> None:
    packed = lzma.compress(lines("three"))
    write(tmp_path, {"b.txt": b"two", "a/x.py": b"one", "c.bin": b"\xff", "d.jsonl.xz": packed, "e.md": b""})
    assert read(tmp_path) == [b"one", b"two", b"three"]


def test_folder_says_how_many_of_its_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"a/b.txt": b"two", "a/c.bin": b"\xff", "a.md": b"x"})
    (note,) = FileTexts(str(tmp_path), "text", "data.heldout").notes
    assert note == (
        f"data.heldout: files in folders ignored by name or kind: 2, such as {tmp_path}/a.md; in a folder .txt, .py, .jsonl, "
        ".ndjson, .json (compressed or not) and .parquet are read, others only if named by path or by a glob"
    )
    assert FileTexts(f"{tmp_path}/a,{tmp_path}/*/c.bin", "text").notes == (), "it is read after all"


def test_folder_with_a_pipe_in_it_does_not_wait_for_somebody_to_write(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"two"})
    os.mkfifo(tmp_path / "a.txt")
    texts = FileTexts(str(tmp_path), "text")
    assert list(texts.read()) == [b"two"]
    assert f"ignored by name or kind: 1, such as {tmp_path}/a.txt;" in texts.notes[0]


def test_linked_folders_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    write(tmp_path, {"text/b.txt": b"b", "text/deep/d.txt": b"d", "far/e.txt": b"e", "far/z/f.txt": b"f"})
    (tmp_path / "text" / "a").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "text")
    (tmp_path / "far" / "z" / "here").symlink_to(".")
    (tmp_path / "text" / "shallow").symlink_to("deep")
    texts = FileTexts(str(tmp_path / "text"), "text")
    assert [source.name for source in texts.sources] == ["a/e.txt", "a/z/f.txt", "b.txt", "deep/d.txt"]
    again = [str(tmp_path / "text" / name) for name in ("shallow", "a/back", "a/z/here")]
    assert texts.notes == (f"data.corpus: left out 3 (3 named twice and read once): {', '.join(again)}",)


def test_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": b"a", "deep/b.txt": b"b"})
    scandir = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"data.corpus: the folder .*/deep cannot be read: Permission denied"):
        FileTexts(str(tmp_path), "text")


@pytest.mark.parametrize("packed", PACKERS)
def test_suffixes_in_capitals_are_the_same_suffixes(tmp_path: Path, packed: str) -> None:
    write(tmp_path, {f"A.JSONL{packed.upper()}": PACKERS[packed](lines("one", "two")),
                     f"B.Txt{packed.upper()}": PACKERS[packed](b"three")})  # fmt: skip
    assert read(tmp_path) == [b"one", b"two", b"three"]
    assert read(tmp_path / f"A.JSONL{packed.upper()}") == [b"one", b"two"]


def test_glob_gives_the_files_that_match_sorted(tmp_path: Path) -> None:
    write(tmp_path, {"part-2.txt": b"2", "part-1.txt": b"1", "part-10.txt": b"10", "other.txt": b"no", "deep/part-3.txt": b"3"})
    assert read(tmp_path / "part-*.txt") == [b"1", b"10", b"2"]
    assert read(tmp_path / "**" / "part-*.txt") == [b"3", b"1", b"10", b"2"]


def test_folder_that_a_glob_matches_counts_as_if_it_was_named(tmp_path: Path) -> None:
    files = {"a.txt": b"1", "b/x.txt": b"2", "b/deep/y.txt": b"3", "b/x.bin": b"\xff", "c.txt": b"4", "d/.hidden.txt": b"5"}
    write(tmp_path, files)
    texts = FileTexts(f"{tmp_path}/*", "text")
    assert list(texts.read()) == [b"1", b"3", b"2", b"4", b"5"]
    (note,) = texts.notes
    assert f"ignored by name or kind: 1, such as {tmp_path}/b/x.bin;" in note
    assert read(f"{tmp_path}/[bd]") == [b"3", b"2", b"5"], "a glob may match folders alone"
    assert FileTexts(f"{tmp_path}/[bd]", "text").fingerprint == FileTexts(f"{tmp_path}/b,{tmp_path}/d", "text").fingerprint


def test_folder_that_a_glob_goes_into_by_itself_gives_what_matches(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1", "b/x.txt": b"2", "b/deep/y.txt": b"3", "b/.hidden.txt": b"4"})
    for glob in ("**", "**/*"):
        texts = FileTexts(f"{tmp_path}/{glob}", "text")
        assert (list(texts.read()), texts.notes) == ([b"1", b"3", b"2"], ()), glob
    every = FileTexts(f"{tmp_path}/**/", "text")
    assert (list(every.read()), every.notes) == ([b"1", b"4", b"3", b"2"], ()), "folders alone: each of them once"


def test_links_to_nothing_and_pipes_that_a_glob_matches_are_told(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1"})
    os.mkfifo(tmp_path / "pipe")
    (note,) = FileTexts(f"{tmp_path}/*", "text").notes
    assert f"ignored by name or kind: 1, such as {tmp_path}/pipe;" in note
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    for wanted in (tmp_path, f"{tmp_path}/*"):
        with pytest.raises(DataError, match=r"the file .*/b.txt cannot be read: No such file or directory"):
            FileTexts(str(wanted), "text")


def test_several_names_are_separated_by_commas_and_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path, {"z.txt": b"first", "a-1.jsonl": lines("second"), "a-2.jsonl": lines("third")})
    assert read(f"{tmp_path}/z.txt, {tmp_path}/a-*.jsonl") == [b"first", b"second", b"third"]


def test_path_that_exists_is_that_path_whatever_its_characters(tmp_path: Path) -> None:
    write(tmp_path, {"odd, [1]*.txt": b"x\n", "odd": b"no"})
    assert read(tmp_path / "odd, [1]*.txt") == [b"x\n"]


def test_file_named_twice_is_read_once_and_told(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a", "b.txt": b"b"})
    texts = FileTexts(f"{tmp_path}/*.txt,{tmp_path}/a.txt", "text")
    assert list(texts.read()) == [b"a", b"b"]
    assert texts.notes == (f"data.corpus: left out 1 (1 named twice and read once): {tmp_path}/a.txt",)


def test_home_is_found_by_its_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, {"a.txt": b"a"})
    assert read("~/a.txt") == read("~/*.txt") == [b"a"]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("gone.txt", "data.corpus: gone.txt does not exist: name a file of text, JSON lines or Parquet, a folder of them"),
        ("gone.txt", r"or a glob \(a relative path counts from the current folder\)$"),
        ("/no/such/file", "data.corpus: /no/such/file does not exist: name .* or a glob$"),
        ("~/no/such/file", "data.corpus: ~/no/such/file does not exist: name .* or a glob$"),
        ("~nobody-of-this-name/file", "data.corpus: ~nobody-of-this-name/file does not exist"),
        ("~nobody-of-this-name/*.txt", r"data.corpus = '~nobody-of-this-name/\*.txt': there is no home folder ~nobody-of"),
        ("ba[r]e", r"data.corpus: ba\[r\]e matches no .txt, .py, .jsonl, .ndjson, .json, .parquet file: put text there"),
        ("p[i]pe", r"data.corpus: p\[i\]pe matches no .txt"),
        ("gone-*.txt", r"data.corpus: no file matches gone-\*.txt: check the glob, relative to "),
        ("a.txt,,a.txt", "data.corpus: a name is missing; give a path, a glob, or several separated by commas"),
        ("a.txt,gone.txt", "data.corpus: gone.txt does not exist"),
        ("", "data.corpus: a name is missing"),
        ("a" * 5000, "does not exist"),
        ("nul\0", "does not exist"),
        ("bare", "data.corpus: the folder bare has no .txt, .py, .jsonl, .ndjson, .json, .parquet file: put text there"),
        ("pipe", "data.corpus: pipe is neither a file nor a folder"),
    ],
)
def test_name_that_leads_nowhere_says_what_would_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a.txt": b"a", "bare/x.bin": b"x"})
    os.mkfifo("pipe")
    with pytest.raises(DataError, match=sentence):
        FileTexts(wanted, "text")


def test_fingerprint_is_of_contents_names_and_settings_not_of_the_place(tmp_path: Path) -> None:
    same = {"a.jsonl": lines("xy"), "b.txt": b"z"}
    write(tmp_path / "here", same)
    write(tmp_path / "there", same)
    write(tmp_path / "other", same | {"b.txt": b"Z"})
    write(tmp_path / "named", {"a.jsonl": lines("xy"), "c.txt": b"z"})
    base = FileTexts(str(tmp_path / "here"), "text").fingerprint
    assert FileTexts(str(tmp_path / "there"), "text").fingerprint == base
    others = [FileTexts(str(tmp_path / name), "text").fingerprint for name in ("other", "named")]
    others.append(FileTexts(str(tmp_path / "here"), "body").fingerprint)
    others += [FileTexts(str(tmp_path / "here" / "b.txt"), "text", cut=cut).fingerprint for cut in (True, False)]
    assert len({base, *others}) == 6


def test_file_that_changes_between_two_readings_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a", "b.txt": b"b"})
    texts = FileTexts(str(tmp_path), "text")
    texts.check_unchanged()
    write(tmp_path, {"b.txt": b"bb"})
    with pytest.raises(DataError, match=r"b.txt changed while it was read: start again when it is complete"):
        texts.check_unchanged()


# ---------------------------------------------------------------- plain text


def test_lone_text_file_is_cut_at_lines_without_losing_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(b"line %d of a long file\n" % index + b"\n" * (index % 50 == 0) for index in range(4000))
    write(tmp_path, {"book": content, "packed/book.xz": lzma.compress(content)})
    pieces = read(tmp_path / "book")
    assert b"".join(pieces) == content
    assert len(pieces) > 10
    assert all(len(piece) >= CUT_BYTES and piece.endswith(b"\n") for piece in pieces[:-1])
    assert read(tmp_path / "packed" / "book.xz") == pieces
    assert read(tmp_path / "book", cut=False) == [content]
    monkeypatch.setattr(documents, "_BLOCK", 100)
    assert read(tmp_path / "book") == pieces, "whatever comes in one read"


def test_lone_text_file_beside_empty_ones_is_cut_too(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x\n" * 20_000, "b.txt": b""})
    skips = Skips()
    assert len(list(FileTexts(str(tmp_path), "text").read(skips))) > 5
    assert [(skip.path, skip.reason) for skip in skips.named] == [(str(tmp_path / "b.txt"), "empty")]


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("packed", PACKERS)
def test_byte_order_mark_of_a_text_file_is_no_text(tmp_path: Path, packed: str) -> None:
    pack, long = PACKERS[packed], b"x\n" * 20_000
    write(tmp_path, {f"{name}/a.txt{packed}": pack(text) for name, text in (("lone", MARK + long), ("bare", long))})
    write(tmp_path, {f"two/a.txt{packed}": pack(MARK + b"one" + MARK), f"two/b.txt{packed}": pack(b"two")})
    assert b"".join(read(tmp_path / "lone")) == long, "cut into documents or whole"
    assert read(tmp_path / "two") == [b"one" + MARK, b"two"], "within a text it is a character"
    with pytest.raises(DataError, match=r"not utf-8 \(line 2, byte 5 of the file is 0xff\)"):
        write(tmp_path, {f"bad.txt{packed}": pack(MARK + b"x\n\xff")})
        read(tmp_path / f"bad.txt{packed}")


def test_file_that_is_only_a_byte_order_mark_is_empty(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x\n" * 20_000, "b.txt": MARK})
    skips = Skips()
    assert len(list(FileTexts(str(tmp_path), "text").read(skips))) > 5, "the other one is alone, and cut"
    assert [(skip.path, skip.reason) for skip in skips.named] == [(str(tmp_path / "b.txt"), "empty")]


def test_fingerprint_changed_with_the_mark_for_files_that_have_one_and_for_no_other(tmp_path: Path) -> None:
    """Else tokens that were made of the mark would be found in the cache."""
    write(tmp_path, {"a.txt": b"a", "b.jsonl": MARK + lines("b")})

    def as_before(*names: str) -> str:
        digest = hashlib.sha256(b"texts cut=False field=text\n")
        for name in names:
            content = hashlib.sha256((tmp_path / name).read_bytes()).digest()
            digest.update(len(name).to_bytes(8, "little") + name.encode() + content)
        return digest.hexdigest()

    assert FileTexts(str(tmp_path), "text").fingerprint == as_before("a.txt", "b.jsonl")
    for packed, pack in PACKERS.items():
        write(tmp_path, {f"marked.txt{packed}": pack(MARK + b"a")})
        named = FileTexts(f"{tmp_path}/a.txt,{tmp_path}/marked.txt{packed}", "text")
        assert named.fingerprint != as_before("a.txt", f"marked.txt{packed}"), packed


@pytest.mark.parametrize("block", [1 << 20, 3000])
def test_one_endless_line_stays_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(documents, "_BLOCK", block)
    write(tmp_path, {"line": b"x" * 50_000, "then": b"x" * 50_000 + b"\n" + b"short\n" * 3000})
    assert read(tmp_path / "line") == [b"x" * 50_000]
    pieces = read(tmp_path / "then")
    assert pieces[0] == b"x" * 50_000 + b"\n"
    assert len(b"".join(pieces)) == 50_001 + 18_000


@pytest.mark.parametrize("packed", PACKERS)
def test_wrong_encoding_of_a_text_file_names_file_line_and_byte(tmp_path: Path, packed: str) -> None:
    write(tmp_path, {f"a.txt{packed}": PACKERS[packed](b"one\ntwo \xff\n"), "b.txt": b"x"})
    with pytest.raises(DataError, match=rf"a.txt{packed} is not utf-8 \(line 2, byte 8 of the file is 0xff\): convert it"):
        read(tmp_path)


def test_wrong_encoding_deep_in_a_file_that_is_cut_is_counted_from_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"0123456\n" * 5000 + b"\xe4\n"})
    with pytest.raises(DataError, match=r"line 5001, byte 40000 of the file is 0xe4"):
        read(tmp_path / "a.txt")


def test_documents_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "DOCUMENT_BYTES_MAX", 10_000)
    monkeypatch.setattr(documents, "_BLOCK", 4000)
    write(tmp_path, {"a.txt": b"x" * 10_001, "b.jsonl": lines("ok", "x" * 10_001)})
    with pytest.raises(DataError, match=r"a.txt is one document of more than 10000 bytes: split it, or give JSON lines"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"b.jsonl has a line 2 of more than 10000 bytes"):
        read(tmp_path / "b.jsonl")
    write(tmp_path, {"a.txt": b"x" * 30_001})
    with pytest.raises(DataError, match=r"a.txt has a line of more than 10000 bytes: break it up"):
        read(tmp_path / "a.txt")


# ---------------------------------------------------------------- JSON lines, packed or not


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines_give_a_document_a_line(tmp_path: Path, packed: str, suffix: str) -> None:
    write(tmp_path, {f"a{suffix}{packed}": PACKERS[packed](lines("one\ntwo", "drei ü 日本", '"quoted"'))})
    assert read(tmp_path / f"a{suffix}{packed}") == [b"one\ntwo", "drei ü 日本".encode(), b'"quoted"']


def test_json_lines_take_the_chosen_field(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"text": 1, "the body": "x"}\r\n{"the body": "y"}'})
    assert read(tmp_path / "a.jsonl", field="the body") == [b"x", b"y"]


@pytest.mark.parametrize("field", ['a"b', "a\\b", "a\tb", "ü"])
def test_field_may_have_any_name(tmp_path: Path, field: str) -> None:
    write(tmp_path, {"a.jsonl": lines("x", "y", field=field), "b.jsonl": b'{"a": 1}', "c.jsonl": b"[1]"})
    assert read(tmp_path / "a.jsonl", field=field) == [b"x", b"y"]
    write(tmp_path, {"d.jsonl": json.dumps({field: 5}).encode()})
    for name, flaw in (("b", "has no field"), ("c", "is not an object but array"), ("d", "holds int, not a string")):
        with pytest.raises(DataError, match=f"{name}.jsonl, line 1: .*{flaw}"):
            read(tmp_path / f"{name}.jsonl", field=field)


def test_json_lines_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b"\xef\xbb\xbf" + lines("x")})
    assert read(tmp_path / "a.jsonl") == [b"x"]


def test_empty_documents_and_blank_lines_are_counted_and_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines("x", "", "y") + b"\n" + lines("z"), "b.jsonl": b"", "c.txt": b""})
    skips = Skips()
    assert list(FileTexts(str(tmp_path), "text").read(skips)) == [b"x", b"y", b"z"]
    assert [(skip.path.removeprefix(f"{tmp_path}/"), skip.reason) for skip in skips.named] == [
        ("a.jsonl line 2", "empty"),
        ("a.jsonl line 4", "blank line"),
        ("b.jsonl", "empty"),
        ("c.txt", "empty"),
    ]


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"[1, 2]", "is not an object but array; JSON lines hold one object per line"),
        (b'"text"', "is not an object but str"),
        (b'{"body": "x"}', "has no field 'text': name the field with the text by data.field"),
        (b'{"text": null}', "its field 'text' holds null, not a string"),
        (b'{"text": ["x"]}', "its field 'text' holds array, not a string"),
        (b'{"text": "x"', r"is not valid JSON \(input data was truncated\)"),
        (b"plain words", "is not valid JSON"),
        (b'{"text": "\\ud800"}', r"holds \\ud800, half of a surrogate pair and no character: remove it"),
        (b'{"text": "a\\udC00b"}', r"holds \\udc00, half of a surrogate pair"),
        (b'{"text": "a"}\r{"text": "b"}\r', r"is not valid JSON \(JSON is malformed: trailing characters"),
        (b'{"a": ' + b"[" * 5000, r"is not valid JSON \(maximum recursion depth exceeded"),
        (b'{"text": "a\xff"}', r"is not utf-8 \(byte 11 of the line is 0xff\): convert it"),
    ],
)
def test_line_that_is_no_document_is_refused_with_file_and_line(
    tmp_path: Path, packed: str, line: bytes, sentence: str
) -> None:
    write(tmp_path, {f"a.jsonl{packed}": PACKERS[packed](lines("fine") + line + b"\n" + lines("fine"))})
    with pytest.raises(DataError, match=rf"a.jsonl{packed}, line 2: {sentence}"):
        read(tmp_path / f"a.jsonl{packed}")


@pytest.mark.parametrize("packed", [".xz", ".gz", ".zst"])
def test_packed_file_that_breaks_off_or_is_none_is_refused(tmp_path: Path, packed: str) -> None:
    whole = PACKERS[packed](lines(*(str(number) for number in range(3000))))
    write(tmp_path, {f"a.jsonl{packed}": whole[:-20], f"b.jsonl{packed}": lines("not packed at all")})
    for name in ("a", "b"):
        with pytest.raises(DataError, match=rf"{name}.jsonl{packed} is damaged or not a {packed} file \("):
            read(tmp_path / f"{name}.jsonl{packed}")


def test_zst_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    pack = PACKERS[".zst"]
    write(tmp_path, {"a.jsonl.zst": pack(lines("one")) + pack(b"") + pack(lines("two" * 100_000)) + pack(lines("three"))})
    assert [len(document) for document in read(tmp_path / "a.jsonl.zst")] == [3, 300_000, 5]


def test_zst_file_with_a_large_window_is_read(tmp_path: Path) -> None:
    """`zstd --long=31`; what a reader takes by itself ends at 128 MB."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    write(tmp_path, {"a.jsonl.zst": packer.compress(lines("one", "two")) + packer.flush()})
    assert zstandard.get_frame_parameters((tmp_path / "a.jsonl.zst").read_bytes()).window_size == 1 << 31
    assert read(tmp_path / "a.jsonl.zst") == [b"one", b"two"]


def test_file_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": b"x", "b.txt": b"x"})
    texts = FileTexts(str(tmp_path), "text")

    def refused(self: Path, mode: str = "r") -> io.BytesIO:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"the file .*a.txt cannot be read: Permission denied"):
        list(texts.read())
    with pytest.raises(DataError, match=r"the file .*a.txt cannot be read: Permission denied"):
        FileTexts(str(tmp_path), "text")


@pytest.mark.parametrize(
    ("file", "hidden", "sentence"),
    [
        ("a.parquet", "pyarrow.parquet", r"to read .*a.parquet the package pyarrow is needed: pip install 'atoll\[parquet\]'"),
    ],
)
def test_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, hidden: str, sentence: str
) -> None:
    write(tmp_path, {file: b"PAR1"})
    monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(DataError, match=sentence):
        read(tmp_path / file)


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x" * 10, "b.txt": b"x" * 30})
    told: list[tuple[str, int, int]] = []
    list(FileTexts(str(tmp_path), "text").read(progress=lambda *now: told.append(now)))
    assert told == [("reading text", 10, 40), ("reading text", 40, 40)]


# ---------------------------------------------------------------- Parquet, with pyarrow


def test_parquet_gives_a_document_a_row_and_refuses_what_is_none(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {number}" for number in range(1000)] + [""]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(1001))}), tmp_path / "a.parquet")
    skips = Skips()
    assert list(FileTexts(str(tmp_path), "text").read(skips)) == [text.encode() for text in texts[:-1]]
    assert [skip.path for skip in skips.named] == [f"{tmp_path}/a.parquet row 1001"]
    with pytest.raises(DataError, match=r"a.parquet has no column 'body' but text, id: name one by data.field"):
        read(tmp_path, field="body")
    with pytest.raises(DataError, match=r"a.parquet, row 1: its column 'id' holds int, not a string"):
        read(tmp_path, field="id")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2: its column 'text' holds null, not a string"):
        read(tmp_path)
    write(tmp_path, {"a.parquet": b"PAR1 or not"})
    with pytest.raises(DataError, match=r"a.parquet is damaged or not Parquet \("):
        read(tmp_path)
