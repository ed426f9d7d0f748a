"""What `atoll up` keeps in a run's folder, so that `status`, `logs` and `down` find the run again: engine/up.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.engines.deployment import Deployment
from atoll.errors import UNDECODABLE, DataError, UserError
from atoll.tape.folder import refuse_used
from atoll.toml import to_toml

ENGINE_FOLDER: Final = "engine"
RECORD_FILE: Final = "up.json"


class UpRecord(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    name: str
    run: str
    learners: int
    leave_seconds: float
    python: str
    jobs: dict[str, str] = {}
    """Worker to the engine's id of it."""
    details: dict[str, Any] = {}
    """What one engine alone needs: a namespace, an address."""

    @property
    def folder(self) -> Path:
        return Path(self.run)

    @property
    def engine_folder(self) -> Path:
        return self.folder / ENGINE_FOLDER

    @property
    def workers(self) -> list[str]:
        return ["syncer", *(f"learner-{n}" for n in range(self.learners))]

    def log(self, worker: str) -> Path:
        return self.folder / "logs" / f"{worker}.log"


def record_of(deployment: Deployment, engine: str, jobs: dict[str, str] | None = None, **details: Any) -> UpRecord:
    return UpRecord(
        engine=engine, name=deployment.name, run=str(deployment.run), learners=len(deployment.learners),
        leave_seconds=deployment.placement.leave_seconds, python=deployment.python, jobs=jobs or {}, details=details,
    )  # fmt: skip


def write_record(record: UpRecord) -> None:
    write_whole(record.engine_folder / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """All or nothing: another command may read it at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
    os.replace(partial, path)


def read_record(run: Path) -> UpRecord:
    path = run.absolute() / ENGINE_FOLDER / RECORD_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=UpRecord)
    except FileNotFoundError:
        raise UserError(f"run {run}: was not brought up by `atoll up` ({path} is missing); name a run's folder") from None
    except UNDECODABLE as error:
        raise DataError(f"{path}: is damaged ({error}); bring the run up again, or end its processes by hand") from None


def find_record(run: Path | None, below: Path) -> UpRecord:
    """The run that is named, or the only one below `below` that was brought up."""
    if run is not None:
        return read_record(run)
    found = sorted(path.parents[1] for path in below.glob(f"*/{ENGINE_FOLDER}/{RECORD_FILE}"))
    if len(found) == 1:
        return read_record(found[0])
    which = f"there are {len(found)}: {', '.join(map(str, found[:5]))}" if found else "none was brought up here"
    raise UserError(f"RUN: name the run's folder; below {below} {which}")


def prepare_folder(deployment: Deployment) -> None:
    """Makes the run's folder, or finds that it holds this same run."""
    run, recipe = deployment.run, to_toml(deployment.settings)
    if not (run / ENGINE_FOLDER / RECORD_FILE).exists():
        refuse_used(run)
    elif deployment.recipe.read_text(encoding="utf8") != recipe:
        raise UserError(f"--out {run}: holds a run with another config; give its recipe and --set again, or another folder")
    if (run / "syncer" / "theta.safetensors").exists():
        raise UserError(f"--out {run}: the run there is over; choose another folder")
    for folder in (run / "logs", run / "learners", run / ENGINE_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(deployment.recipe, recipe.encode())
