"""May a run go on from that snapshot? Asked by whoever starts it, before anything is built, and again where it is taken."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from atoll.config import Config
from atoll.config.resuming import refuse_changed, refuse_changed_data, reshuffled
from atoll.errors import ConfigError, TapeError, UserError
from atoll.executor.kept_text import home_of, refuse_other_tokenizer
from atoll.executor.snapshots import Manifest, load_syncer, read_manifest
from atoll.executor.workbench import Workbench
from atoll.ids import LearnerId
from atoll.protocol.vocabulary import Books
from atoll.tape.format import Tape

TAPE: Final = "run.tape"


def refuse_unfit(part: Path, config: Config) -> Books:
    """By what the syncer's part says of itself. Its books, which fit."""
    found = load_syncer(part)
    if found.manifest.config:
        refuse_changed(found.manifest.config, config)
    books = msgspec.json.decode(found.books, type=Books)
    if len(books.kept) != config.protocol.fragments:
        raise UserError(
            f"snapshot {part}: has {len(books.kept)} fragments and the recipe {config.protocol.fragments}; "
            f"resume with the same model and fragmentation"
        )
    last, most = max(_named(books), default=0), config.limits.members_max
    if last >= most:
        named = f"the snapshot in {part} names learner {last}"
        raise ConfigError(f"key limits.members_max = {most}: {named}; give at least {last + 1}")
    return books


def _named(books: Books) -> Iterable[LearnerId]:
    """Whose streams the books speak of: whoever goes on with a unit of one names it in every Hello."""
    yield from (learner for learner, _ in books.own_next)
    yield from (unit.stream for unit in books.pool)
    for lease in books.leases:
        yield lease.learner
        yield from (unit.stream for unit in (*lease.granted, *lease.done))


def refuse_other_data(part: Path, bench: Workbench) -> None:
    """Another tokenizer, and other data under another key. Under the same key it is a doubt, as for a syncer that comes back."""
    refuse_other_tokenizer(home_of(part), bench)
    manifest = read_manifest(part)
    if manifest.config and _data_is_other(part, manifest, bench):
        refuse_changed_data(manifest.config, bench.config)


def doubts(part: Path, config: Config, bench: Workbench | None) -> list[str]:
    """What is allowed and should be known: each a sentence."""
    manifest = read_manifest(part)
    said = []
    if manifest.config and (sentence := reshuffled(manifest.config, config)):
        said.append(sentence)
    if bench is not None and _data_is_other(part, manifest, bench):
        said.append("the data is not what the run that is resumed was trained on: its places in it name other samples now")
    return said


def _data_is_other(part: Path, manifest: Manifest, bench: Workbench) -> bool:
    """By the tape beside it. Where there is none, or a stranger's, nobody knows."""
    with suppress(TapeError):
        header = Tape(home_of(part) / TAPE).header
        return header.run == manifest.run and header.data_fingerprint not in ("", bench.fingerprint)
    return False
