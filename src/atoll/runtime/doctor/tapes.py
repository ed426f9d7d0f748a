"""Do a run's tapes hold, and can a syncer go on from its own?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.config import from_builtins
from atoll.errors import ConfigError
from atoll.ids import SYNCER, OuterStep
from atoll.protocol.checkpoint import thaw
from atoll.protocol.syncer import SyncerMachine
from atoll.runtime.doctor.health import HealthReport, Remedy
from atoll.store.version_folder import missing_files
from atoll.tape.cut import TapeCondition, examine_tape
from atoll.tape.format import Header, Record
from atoll.tape.segments import machine_state

OLDER = "a syncer goes on from the newest segment; replay begins after this one (atoll replay --since STEP)"
CUT = "--cut-tape cuts it there and keeps the rest in a file beside it"


class SyncerTape:
    """The syncer's tape, and the state that its good records lead to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._machine: SyncerMachine | None = None
        self._error = ""
        self.condition = examine_tape(path, self._feed)

    def _feed(self, header: Header, record: Record) -> None:
        if record.worker != SYNCER or self._error or not header.derivable:
            return
        try:
            if self._machine is None:
                self._machine = SyncerMachine(from_builtins(header.config))
                if header.segment is not None:
                    thaw(machine_state(self._path, header.segment), self._machine)
            self._machine.on(record.event, record.now)
        except ConfigError as error:
            self._error = f"the config in its header is refused: {error}"
        except Exception as error:  # whatever a machine raises for events that no run has
            self._error = f"no syncer could have had record {record.number} ({error!r})"[:300]

    def report_to(self, report: HealthReport, home: Path, *, live: bool) -> None:
        report.count("tapes")
        condition = self.condition
        if condition.header is not None and self._error:
            report.problem("tape", condition.path, self._error, "resume from a snapshot, or cut the tape before it by hand")
        if condition.damage is not None:
            report.damaged("tape", condition.path, _words(condition), self._advice(home, live), _remedy(condition))
        elif live and (lost := self._lost(home)):
            wanted = ", ".join(path.name for path in lost[:3]) + (", ..." if len(lost) > 3 else "")
            report.problem(
                "versions", home / "versions", f"{len(lost)} versions that the tape keeps are missing: {wanted}",
                "resume from a snapshot (atoll train --resume)",
            )  # fmt: skip
        _notes(condition, report)

    def _advice(self, home: Path, live: bool) -> str:
        if self.condition.header is None:
            return "put a copy of the tape back, or resume from a snapshot"
        if self.condition.past is not None:
            return OLDER
        if not live:
            return CUT
        if self._error or self._machine is None or self._lost(home):
            return f"{CUT}, but the versions of that time are gone: resume from a snapshot (atoll train --resume)"
        return f"{CUT}, and a syncer can go on from outer step {self._machine.outer_step}; what came later is trained again"

    def _lost(self, home: Path) -> list[Path]:
        """Files of versions that a syncer would need to go on. Before a custom model is uploaded there are none."""
        if self._machine is None or self._error or not (home / "versions").is_dir():
            return []
        kept: Sequence[Sequence[OuterStep]] = self._machine.stored_versions()
        return missing_files(home, kept)


def report_learner_tape(path: Path, learner: int, run: str, report: HealthReport) -> None:
    report.count("tapes")
    condition = examine_tape(path)
    if condition.header is None and path.stat().st_size == 0:
        report.note(path, "is empty: its learner was killed at the start, or its disk was full")
        return
    if condition.damage is not None:
        advice = "only this learner's decisions cannot be replayed" if condition.header is None else CUT
        advice = OLDER if condition.past is not None else advice
        report.damaged("tape", path, _words(condition), advice, _remedy(condition))
    header = condition.header
    if header is not None and ((run and header.run != run) or header.worker != learner):
        report.problem("tape", path, f"is of learner {header.worker} in run {header.run}", "move it where it belongs")
    _notes(condition, report)


def _words(condition: TapeCondition) -> str:
    return f"{condition.damage} (record {condition.records} is the last good one, {condition.rest_bytes:,} bytes follow)"


def _remedy(condition: TapeCondition) -> Remedy:
    return Remedy.CUT_TAPE if condition.header is not None and condition.past is None else Remedy.NONE


def _notes(condition: TapeCondition, report: HealthReport) -> None:
    for missing in condition.missing:
        report.notes.append(str(missing))
    if condition.damage is None and not condition.ended:
        unfinished = f"; an unfinished line of {condition.rest_bytes} bytes follows" if condition.rest_bytes else ""
        report.note(condition.path, f"ends after record {condition.records}: its worker runs, was stopped or killed{unfinished}")
