"""The other files of a run's folder: versions, weights, snapshots, places, config, and who may read the secrets."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from atoll.config import Config, from_builtins, load
from atoll.errors import UNDECODABLE, AtollError, DataError, UserError
from atoll.runtime.doctor.health import HealthReport, Remedy
from atoll.store.model_upload import unpack_model
from atoll.store.snapshots import list_snapshots, syncer_root, verify
from atoll.store.tensor_files import read_header, read_with
from atoll.store.version_file import check_version
from atoll.store.version_folder import version_files
from atoll.store.weights import THETA_FILE
from atoll.tape.folder import RunFolder
from atoll.tape.format import Header

SECRETS: Final = ("run.secret", "token.key", "token")
PLACES: Final = "places.jsonl"
PLACE_LINE_MAX: Final = 1 << 16
RESUME: Final = "resume from a snapshot (atoll train --resume)"


def check_versions(home: Path, report: HealthReport) -> None:
    """Every byte against the checksums in the files."""
    whole, unfinished = version_files(home)
    for path in whole:
        report.count("versions")
        try:
            check_version(path)
        except DataError as error:
            report.damaged("versions", path, error, f"put a copy of the file back, or {RESUME}")
    for path in unfinished:
        report.note(path, "was left by a killed syncer; the next one deletes it")
    weights = home / THETA_FILE
    if weights.exists():
        report.count("weights")
        try:
            read_with(weights, lambda stream, size: _whole_weights(stream, size, weights))
        except DataError as error:
            report.damaged("weights", weights, error, "write it again from the versions (atoll export)")


def _whole_weights(stream: io.RawIOBase, size: int, path: Path) -> None:
    read_header(stream, size, str(path))


def check_snapshots(run: RunFolder, report: HealthReport) -> None:
    """Every byte of every part. A learner on another machine has its part there: none is expected where there are no learners."""
    learners = (run.folder / "learners").is_dir()
    infos = list_snapshots(run.folder)
    sound = 0
    for info in infos:
        report.count("snapshots")
        where = syncer_root(run.folder) / "snapshots" / str(info.outer_step)
        if not where.is_dir():
            report.note(where, "is open: it is being taken, or its syncer was killed; the next one removes it")
            continue
        problems = [p for p in verify(run.folder, info.outer_step) if learners or not p.missing]
        for problem in problems:
            newcomer = "" if problem.part == where else "; without it the learner joins a resumed run as a newcomer"
            advice = f"resume from another snapshot (--snapshot){newcomer}"
            report.damaged("snapshots", problem.part, problem, advice)
        sound += not problems
        if info.left_out:
            report.note(where, f"is without learners {', '.join(map(str, info.left_out))}, whose part was not written")
    if infos and not sound:
        report.note(syncer_root(run.folder) / "snapshots", "holds no sound snapshot to resume from")


def check_places(home: Path, report: HealthReport) -> None:
    """A line that cannot be read stops the syncer's start: to skip it could give its incarnation out twice."""
    path = home / PLACES
    if not path.is_file():
        return
    last: dict[int, int] = {}
    for number, line in _lines(path, report):
        report.count("places")
        place = _place(line)
        if place is None:
            right = 'it must be such as {"learner":0,"incarnation":0}'
            report.problem("places", path, f"line {number} is not a place", f"{right}; the learner's tapes have its incarnations")
            continue
        learner, incarnation = place
        if incarnation <= last.get(learner, -1):
            report.problem(
                "places", path, f"line {number} gives learner {learner} incarnation {incarnation} after {last[learner]}",
                "delete the line if the file was copied together",
            )  # fmt: skip
        last[learner] = max(incarnation, last.get(learner, -1))


def _lines(path: Path, report: HealthReport) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(PLACE_LINE_MAX + 1):
            number += 1
            if len(line) > PLACE_LINE_MAX:
                report.problem("places", path, f"line {number} is longer than {PLACE_LINE_MAX} bytes", "it is damaged")
                return
            if not line.endswith(b"\n"):
                report.note(path, "ends in an unfinished line of a killed syncer; the next one removes it")
                return
            yield number, line


def _place(line: bytes) -> tuple[int, int] | None:
    try:
        place = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        learner, incarnation = (msgspec.json.decode(place[name], type=int) for name in ("learner", "incarnation"))
    except (*UNDECODABLE, KeyError):
        return None
    return (learner, incarnation) if min(learner, incarnation) >= 0 else None


def check_config(run: RunFolder, header: Header | None, report: HealthReport) -> None:
    path = run.home / "config.toml"
    taped = _taped_config(header)
    if path.is_file():
        try:
            written: Config | None = load(path)
        except UserError as error:
            report.problem("config", path, str(error), "print it from the recipe again (atoll config)")
            written = None
        if written is not None and taped is not None and written != taped:
            report.problem("config", path, "differs from the config on the tape", "the tape's is the run's; put this one back")
    uploaded = run.home / "model.upload"
    if uploaded.is_file() and taped is not None:
        report.count("uploads")
        try:
            unpack_model(taped, memoryview(uploaded.read_bytes()))
        except (AtollError, OSError) as error:
            report.problem("weights", uploaded, str(error), "put a copy of the file back")


def _taped_config(header: Header | None) -> Config | None:
    try:
        return from_builtins(header.config) if header is not None else None
    except UserError:
        return None  # the tape's own finding


def check_permissions(home: Path, keys: Path | None, report: HealthReport) -> None:
    secrets = [home / name for name in SECRETS]
    if keys is not None:
        if not keys.is_dir():
            raise UserError(f"--keys {keys}: is not a folder; give one that `atoll keys` made")
        secrets += sorted({*keys.glob("*.key"), keys / "token"})
    for path in (path for path in secrets if path.is_file()):
        report.count("secrets")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            report.problem(
                "permissions", path, f"is a secret that others may read or change (mode {mode:o})",
                "--repair runs chmod 600; if others use this machine, make it anew", Remedy.REPAIR,
            )  # fmt: skip
        if path.stat().st_size == 0:
            report.problem("permissions", path, "is empty", "delete it, and the next start makes a new one")
    for path in (home, home / "versions", home / "snapshots", home / "run.tape", *((keys,) if keys else ())):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o002:
            report.problem("permissions", path, "may be changed by every user", "--repair runs chmod o-w", Remedy.REPAIR)


def close_to_others(path: Path) -> str:
    """Repairs what `check_permissions` found."""
    mode = stat.S_IMODE(path.stat().st_mode)
    closed = mode & ~0o002 if path.is_dir() or path.suffix == ".tape" else 0o600
    os.chmod(path, closed)
    return f"{path}: mode {mode:o} is now {closed:o}"
