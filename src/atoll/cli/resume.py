"""The snapshot that a resumed run starts from, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.snapshot import problems_of, snapshots_of
from atoll.errors import UserError

if TYPE_CHECKING:
    from atoll.config import Config
    from atoll.store.snapshots import SnapshotInfo


def _refuse_nothing_left(settings: Config, where: Path, outer_step: int) -> None:
    """A syncer ends when it stores the last step. Resumed behind that step it would wait for ever."""
    if settings.total_steps <= outer_step:
        raise UserError(
            f"key total_steps = {settings.total_steps}: the snapshot in {where} is of step {outer_step} already; give more"
        )


def snapshot_to_resume(run: Path, wanted: int | None, settings: Config) -> tuple[Path, int]:
    """The newest complete one, or the wanted one. A learner whose part is missing joins the resumed run as a newcomer; parts
    that exist must be sound. A damaged snapshot is refused, not replaced by an older one: the user decides to go back."""
    from atoll.runtime.syncer.resume import load_resumable_state

    infos = snapshots_of(run)
    complete = [info.outer_step for info in infos if info.complete]
    if wanted is not None and wanted not in complete:
        raise UserError(f"run {run}: has no complete snapshot of step {wanted}; there are {complete}")
    sealed = [step for step in complete if wanted is None or step == wanted]
    tried = [info.outer_step for info in infos if info.outer_step in sealed or (wanted is None and _is_damaged(run, info))]
    if not tried:
        raise UserError(f"run {run}: none of its snapshots is complete")
    chosen = tried[-1]
    absent = _absent_parts(run, infos, chosen)
    if damaged := [each for each in problems_of(run, chosen) if not (each.missing and each.part in absent)]:
        others = [step for step in complete if step != chosen]
        instead = f"give --snapshot {others[-1]} to resume from that one" if others else "there is no other"
        raise UserError(f"run {run}: snapshot {chosen} is damaged: {damaged[0]}; {instead}")
    _refuse_nothing_left(settings, run, chosen)
    load_resumable_state(_syncer_part(run, chosen), settings)
    return run, chosen


def _is_damaged(run: Path, info: SnapshotInfo) -> bool:
    """Sealed, and changed since. A snapshot that the syncer gave up was never sealed, and is not damaged."""
    part = _syncer_part(run, info.outer_step)
    return not info.complete and part.is_dir() and any(each.part == part for each in problems_of(run, info.outer_step))


def _absent_parts(run: Path, infos: Sequence[SnapshotInfo], snapshot: int) -> list[Path]:
    from atoll.store.snapshots import learner_root, snapshot_dir

    (info,) = (info for info in infos if info.outer_step == snapshot)
    parts = [snapshot_dir(learner_root(run, learner), snapshot) for learner in info.missing]
    return [part for part in parts if not part.is_dir()]


def what_is_resumed(run: Path, snapshot: int) -> Iterator[str]:
    yield f"resuming from the snapshot of step {snapshot} of {run}"
    for part in _absent_parts(run, snapshots_of(run), snapshot):
        yield f"warning: {part} is missing: its learner joins as a newcomer"


def _syncer_part(run: Path, snapshot: int) -> Path:
    from atoll.store.snapshots import snapshot_dir, syncer_root

    return snapshot_dir(syncer_root(run), snapshot)
