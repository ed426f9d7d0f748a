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
from atoll.ids import LearnerId
from atoll.protocol.vocabulary import SyncerState
from atoll.store.snapshots import Manifest, load_syncer, read_manifest
from atoll.store.tokenizer_file import home_of, refuse_other_tokenizer
from atoll.tape.format import Tape
from atoll.tasks.task import Task

TAPE: Final = "run.tape"


def refuse_unfit(part: Path, config: Config) -> SyncerState:
    """By what the syncer's part says of itself. Its books, which fit."""
    found = load_syncer(part)
    if found.manifest.config:
        refuse_changed(found.manifest.config, config)
    syncer_state = msgspec.json.decode(found.machine_state, type=SyncerState)
    if len(syncer_state.kept) != config.protocol.fragments:
        raise UserError(
            f"snapshot {part}: has {len(syncer_state.kept)} fragments and the recipe {config.protocol.fragments}; "
            f"resume with the same model and fragmentation"
        )
    last, most = max(_named(syncer_state), default=0), config.limits.members_max
    if last >= most:
        named = f"the snapshot in {part} names learner {last}"
        raise ConfigError(f"key limits.members_max = {most}: {named}; give at least {last + 1}")
    return syncer_state


def _named(syncer_state: SyncerState) -> Iterable[LearnerId]:
    """Whose streams the books speak of: whoever goes on with a unit of one names it in every Hello."""
    yield from (learner for learner, _ in syncer_state.own_next)
    yield from (unit.stream for unit in syncer_state.pool)
    for lease in syncer_state.leases:
        yield lease.learner
        yield from (unit.stream for unit in (*lease.granted, *lease.done))


def refuse_other_data(part: Path, task: Task) -> None:
    """Another tokenizer, and other data under another key. Under the same key it is a doubt, as for a syncer that comes back."""
    refuse_other_tokenizer(home_of(part), task)
    manifest = read_manifest(part)
    if manifest.config and _data_is_other(part, manifest, task):
        refuse_changed_data(manifest.config, task.config)


def doubts(part: Path, config: Config, task: Task | None) -> list[str]:
    """What is allowed and should be known: each a sentence."""
    manifest = read_manifest(part)
    said = []
    if manifest.config and (sentence := reshuffled(manifest.config, config)):
        said.append(sentence)
    if task is not None and _data_is_other(part, manifest, task):
        said.append("the data is not what the run that is resumed was trained on: its places in it name other samples now")
    return said


def _data_is_other(part: Path, manifest: Manifest, task: Task) -> bool:
    """By the tape beside it. Where there is none, or a stranger's, nobody knows."""
    with suppress(TapeError):
        header = Tape(home_of(part) / TAPE).header
        return header.run == manifest.run and header.data_fingerprint not in ("", task.fingerprint)
    return False
