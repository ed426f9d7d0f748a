"""What a run's token numbers mean, kept in its folder: its tokenizer, and which text it was trained on.

Weights without their tokenizer are no model. The config only says how the tokenizer was come by (trained on the text, read from
a file), and text and files change: the same recipe later, or on another machine, gives another one of the same size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from atoll.config import Data
from atoll.errors import DataError, UserError
from atoll.tasks.task import Task
from atoll.workload.data.tokenizer import BpeTokenizer, ByteTokenizer, JsonTokenizer, Tokenizer

FILE: Final = "text.json"


class RunTokenizer(msgspec.Struct, frozen=True):
    kind: Literal["bytes", "bpe", "hugging_face"]
    tokenizer: str
    """Its fingerprint."""
    data: str
    """The text's, encoded."""
    merges: tuple[tuple[int, int], ...] = ()
    """Of a BPE that was trained on the text."""
    hugging_face: str = ""
    """The JSON of such a tokenizer, whole."""


def write_tokenizer_file(directory: Path, task: Task) -> None:
    """Pictures have no tokenizer, and leave nothing."""
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
    """None: the run is of a time before this was kept, or of pictures."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return path, msgspec.json.decode(path.read_bytes(), type=RunTokenizer)
    except (msgspec.MsgspecError, OSError) as error:
        raise DataError(f"{path} is not what a run keeps of its text: {error}") from None


def tokenizer_of(path: Path, kept: RunTokenizer, data: Data) -> Tokenizer:
    """The run's own, whatever the config's file or text has become."""
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


def refuse_other_tokenizer(syncer: Path, task: Task) -> None:
    """Before a run goes on from what lies in its syncer's folder: under another tokenizer its weights would mean nothing."""
    found = _in(syncer) if task.tokenizer is not None else None
    if found is not None and task.tokenizer is not None and task.tokenizer.fingerprint != found[1].tokenizer:
        was = f"{syncer} was trained under another tokenizer than {said(task.config.data)} gives now"
        raise UserError(f"{was}; bring back the text or file that it had, or start anew")


def home_of(snapshot: Path) -> Path:
    """The syncer's folder, in whose snapshots/ its parts lie."""
    return snapshot.resolve().parents[1]


def said(data: Data) -> str:
    trained = "data.tokenizer = 'bpe', trained on data.corpus,"
    return trained if data.tokenizer == "bpe" else f"data.tokenizer = {data.tokenizer!r}"
