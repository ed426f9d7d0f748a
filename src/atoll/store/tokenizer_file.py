"""The tokenizer of a run and the fingerprint of its text, kept in the run's folder.

Weights without their tokenizer cannot be used. The config only says where the tokenizer comes from (trained on the text, or a
file), and texts and files change: the same recipe later, or on another machine, may give another tokenizer of the same size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from atoll.config import Config, Data
from atoll.errors import UNDECODABLE, DataError, UserError
from atoll.workload.data.tokenizer import BpeTokenizer, ByteTokenizer, JsonTokenizer, Tokenizer

FILE: Final = "text.json"


class Tokenized(Protocol):
    """The part of a task that this file needs; the room of tasks is above this one."""

    @property
    def config(self) -> Config: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


class RunTokenizer(msgspec.Struct, frozen=True):
    kind: Literal["bytes", "bpe", "hugging_face"]
    tokenizer: str
    """Its fingerprint."""
    data: str
    """The text's, encoded."""
    merges: tuple[tuple[int, int], ...] = ()
    """Of a BPE that was trained on the text."""
    hugging_face: str = ""
    """The complete JSON of such a tokenizer."""


def write_tokenizer_file(directory: Path, task: Tokenized) -> None:
    """Nothing for a task without a tokenizer, such as images."""
    tokenizer = task.tokenizer
    if tokenizer is None:
        return
    names = (tokenizer.fingerprint, task.fingerprint)
    if isinstance(tokenizer, JsonTokenizer):
        kept = RunTokenizer("hugging_face", *names, hugging_face=tokenizer.content.decode())
    elif isinstance(tokenizer, BpeTokenizer):
        kept = RunTokenizer("bpe", *names, merges=tokenizer.merges)
    else:
        kept = RunTokenizer("bytes", *names)
    (directory / FILE).write_bytes(msgspec.json.encode(kept))


def read_tokenizer_file(run: Path) -> tuple[Path, RunTokenizer] | None:
    """Of a virtual run's folder, a live one's or a syncer's."""
    return _in(run) or _in(run / "syncer")


def _in(folder: Path) -> tuple[Path, RunTokenizer] | None:
    """None: the run is older than this file, or trains on images."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return path, msgspec.json.decode(path.read_bytes(), type=RunTokenizer)
    except (*UNDECODABLE, OSError) as error:
        raise DataError(f"{path} is not what a run keeps of its text: {error}") from None


def tokenizer_of(path: Path, kept: RunTokenizer, data: Data) -> Tokenizer:
    """The run's own tokenizer, even if the config's file or text has changed."""
    tokenizer: Tokenizer
    match kept.kind:
        case "bytes":
            tokenizer = ByteTokenizer()
        case "bpe":
            try:
                tokenizer = BpeTokenizer(kept.merges)
            except DataError as error:
                raise DataError(f"{path} is damaged: {error}") from None
        case "hugging_face":
            tokenizer = JsonTokenizer(path, data.end_of_document, kept.hugging_face.encode())
    if tokenizer.fingerprint != kept.tokenizer:
        raise DataError(f"{path} is damaged: its tokenizer is not the one that it says it is")
    return tokenizer


def refuse_other_tokenizer(syncer: Path, task: Tokenized) -> None:
    """Before a run continues from its syncer's folder: with another tokenizer its weights would be meaningless."""
    found = _in(syncer) if task.tokenizer is not None else None
    if found is not None and task.tokenizer is not None and task.tokenizer.fingerprint != found[1].tokenizer:
        was = f"{syncer} was trained under another tokenizer than {tokenizer_setting(task.config.data)} gives now"
        raise UserError(f"{was}; bring back the text or file that it had, or start anew")


def home_of(snapshot: Path) -> Path:
    """The syncer's folder, which holds its parts of snapshots in snapshots/."""
    return snapshot.resolve().parents[1]


def tokenizer_setting(data: Data) -> str:
    trained = "data.tokenizer = 'bpe', trained on data.corpus,"
    return trained if data.tokenizer == "bpe" else f"data.tokenizer = {data.tokenizer!r}"
