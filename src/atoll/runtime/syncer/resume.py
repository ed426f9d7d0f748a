"""Checks that a run can resume from a snapshot: by the command before anything is built, and again by the syncer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from atoll.config import Config
from atoll.config.resuming import refuse_changed, refuse_changed_data, reshuffled
from atoll.errors import UNDECODABLE, ConfigError, DataError, TapeError, UserError
from atoll.ids import LearnerId
from atoll.protocol.vocabulary import SyncerState
from atoll.store.snapshots import Manifest, load_syncer, read_manifest
from atoll.store.tokenizer_file import home_of, refuse_other_tokenizer
from atoll.tape.format import Tape
from atoll.tasks.task import Task

TAPE: Final = "run.tape"


def load_resumable_state(part: Path, config: Config) -> SyncerState:
    """The syncer state of a snapshot. Raises if the syncer's part does not fit this config."""
    found = load_syncer(part)
    if found.manifest.config:
        refuse_changed(found.manifest.config, config)
    try:
        syncer_state = msgspec.json.decode(found.machine_state, type=SyncerState)
    except UNDECODABLE as error:
        raise DataError(f"snapshot {part}: the syncer's state cannot be read ({error}); choose another snapshot") from None
    if len(syncer_state.kept) != config.protocol.fragments:
        raise UserError(
            f"snapshot {part}: has {len(syncer_state.kept)} fragments and the recipe {config.protocol.fragments}; "
            f"resume with the same model and fragmentation"
        )
    last, most = max(_learners_in(syncer_state), default=0), config.limits.members_max
    if last >= most:
        named = f"the snapshot in {part} names learner {last}"
        raise ConfigError(f"key limits.members_max = {most}: {named}; give at least {last + 1}")
    return syncer_state


def _learners_in(syncer_state: SyncerState) -> Iterable[LearnerId]:
    """The learners whose streams the state mentions: a learner that continues a unit names its stream in every Hello."""
    yield from (learner for learner, _ in syncer_state.own_next)
    yield from (unit.stream for unit in syncer_state.pool)
    for lease in syncer_state.leases:
        yield lease.learner
        yield from (unit.stream for unit in (*lease.granted, *lease.done))


def refuse_other_data(part: Path, task: Task) -> None:
    """Refuses another tokenizer, and other data under a changed key. Under the same key, other data is a warning, as for a
    restarted syncer."""
    refuse_other_tokenizer(home_of(part), task)
    manifest = read_manifest(part)
    if manifest.config and _data_differs(part, manifest, task):
        refuse_changed_data(manifest.config, task.config)


def resume_warnings(part: Path, config: Config, task: Task | None) -> list[str]:
    """Sentences about differences that are allowed."""
    manifest = read_manifest(part)
    warnings = []
    if manifest.config and (sentence := reshuffled(manifest.config, config)):
        warnings.append(sentence)
    if task is not None and _data_differs(part, manifest, task):
        warnings.append("the data differs from that of the resumed run: its positions now refer to other samples")
    return warnings


def _data_differs(part: Path, manifest: Manifest, task: Task) -> bool:
    """By the tape beside the snapshot. False, for lack of evidence, if there is none or it is of another run."""
    with suppress(TapeError):
        header = Tape(home_of(part) / TAPE).header
        return header.run == manifest.run and header.data_fingerprint not in ("", task.fingerprint)
    return False
