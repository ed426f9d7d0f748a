"""`atoll doctor`: reads everything in a run's folder, says what is wrong, and repairs what it is asked to repair.

Reading changes nothing. A syncer may run meanwhile; repairs need its directory to itself.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

from atoll.errors import UserError
from atoll.runtime.doctor.files import (
    check_config,
    check_permissions,
    check_places,
    check_snapshots,
    check_versions,
    close_to_others,
)
from atoll.runtime.doctor.health import HealthReport, Remedy
from atoll.runtime.doctor.tapes import SyncerTape, report_learner_tape
from atoll.store.lock import LOCK_FILE, lock_directory, refuse_locked
from atoll.tape.cut import cut_tape, examine_tape
from atoll.tape.folder import RunFolder, find_run

_LEARNER_TAPE = re.compile(r"\d+\.tape")


def examine(path: Path, keys: Path | None = None) -> HealthReport:
    run = find_run(path)
    report = HealthReport(str(run.folder))
    live = (run.home / "versions").is_dir() or (run.home / "places.jsonl").is_file()
    try:
        refuse_locked(run.home)
    except UserError:
        report.note(run.home, "a syncer is running there: what it writes just now may look unfinished")
    header = None
    if run.tape.is_file():
        tape = SyncerTape(run.tape)
        header = tape.condition.header
        tape.report_to(report, run.home, live=live)
    elif live:
        report.problem("tape", run.tape, "is missing", "put a copy of it back, or resume from a snapshot (atoll train --resume)")
    _check_learners(run, header.run if header is not None else "", report)
    check_versions(run.home, report)
    check_versions(run.home / "start", report)
    check_snapshots(run, report)
    check_places(run.home, report)
    check_config(run, header, report)
    check_permissions(run.home, keys, report)
    return report


def _check_learners(run: RunFolder, name: str, report: HealthReport) -> None:
    folder = run.folder / "learners"
    numbered = (path for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else ()
    for learner in sorted(numbered, key=lambda path: int(path.name)):
        for tape in sorted(path for path in learner.iterdir() if _LEARNER_TAPE.fullmatch(path.name)):
            report_learner_tape(tape, int(learner.name), name, report)


def repair(path: Path, keys: Path | None, *, permissions: bool, tapes: bool) -> HealthReport:
    """Carries out the remedies asked for, and examines the run again."""
    run = find_run(path)
    done: list[str] = []
    ever_locked = (run.home / LOCK_FILE).exists()  # a virtual run has no syncer that could hold it
    with lock_directory(run.home) if ever_locked else nullcontext():
        for finding in examine(path, keys).problems:
            where = Path(finding.path)
            if permissions and finding.remedy is Remedy.REPAIR:
                done.append(close_to_others(where))
            elif tapes and finding.remedy is Remedy.CUT_TAPE:
                condition = examine_tape(where)
                saved = cut_tape(condition)
                done.append(f"{where}: cut after record {condition.records}; {condition.rest_bytes:,} bytes are in {saved}")
    report = examine(path, keys)
    report.repaired = done
    return report
