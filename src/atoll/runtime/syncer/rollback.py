"""Requests to roll a run back, as files in its syncer's directory: a running syncer looks for one every second, and one that is
started later finds it.

    rollback.json            what `atoll rollback` wants; removed once it is answered
    rollback.answer.json     what became of the last request

The machine remembers the last request on its tape, so a request that a killed syncer had read already is carried out once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from atoll.config import from_builtins
from atoll.errors import UNDECODABLE, DataError, UserError
from atoll.ids import OuterStep
from atoll.protocol.checkpoint import thaw
from atoll.protocol.rollback import Rollbacks
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import RollbackAsked
from atoll.store.tensor_files import discard, write_file
from atoll.tape.format import Tape

REQUEST_FILE, ANSWER_FILE = "rollback.json", "rollback.answer.json"
REQUEST_BYTES_MAX = 10_000
REASON_MAX = 300
"""Characters of the operator's reason, which goes on the tape and to every learner."""


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    to: Annotated[int, msgspec.Meta(ge=-(10**6), le=10**15)]
    """Below zero: counted from the newest point, which is -1."""
    reset_optimizer: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=REASON_MAX)] = ""


class RollbackAnswer(msgspec.Struct, frozen=True):
    request: str
    to: OuterStep
    outer_step: OuterStep
    """The outer step that has the weights of `to`; 0: it was refused."""
    sentence: str


class RollbackRequests:
    """The syncer's side."""

    def __init__(self, directory: Path, rollback: Rollbacks, dispatch: Callable[[RollbackAsked], None]) -> None:
        self._directory = directory
        self._rollback = rollback
        self._dispatch = dispatch
        self._path = directory / REQUEST_FILE

    def look(self) -> None:
        """Raises DataError on a file that is not a request, after removing it, and OSError on one that cannot be read now."""
        if not self._path.exists():
            return
        try:
            request = read_request(self._path)
        except DataError:
            discard(self._path)
            raise
        if request.request != self._rollback.last_request:
            self._dispatch(RollbackAsked(request.to, request.reset_optimizer, request.request, request.reason))
        answer = self._rollback.last_answer
        if request.request == self._rollback.last_request and not self._rollback.pending and answer is not None:
            told = RollbackAnswer(request.request, answer.to, answer.outer_step, str(answer.reason))
            write_file(self._directory / ANSWER_FILE, [msgspec.json.encode(told)])
            discard(self._path)


def read_request(path: Path) -> RollbackRequest:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(REQUEST_BYTES_MAX), type=RollbackRequest)
    except UNDECODABLE as error:
        raise DataError(f"{path} is no request of `atoll rollback` ({error}); it is ignored") from None


# ---------------------------------------------------------------- the operator's side


def points_of(home: Path) -> tuple[OuterStep, ...]:
    """The outer steps that a run can be rolled back to, by its syncer's tape. Refuses a run that is over or has no syncer."""
    tape = Tape(home / "run.tape").newest_segment()
    if not (home / "versions").is_dir():
        raise UserError(f"run {home}: is a virtual run; only a run with a syncer of its own can be rolled back")
    machine = SyncerMachine(from_builtins(tape.header.config))
    begins = tape.begins_with()
    if begins is not None:
        thaw(begins[0], machine)
    for record in tape.records():
        machine.on(record.event, record.now)
    if machine.finished:
        raise UserError(f"run {home}: is over; train on from one of its snapshots (atoll train --resume)")
    return machine.rollback.steps()


def ask(home: Path, to: OuterStep, *, reset_optimizer: bool, reason: str) -> RollbackRequest:
    """Leaves a request for the syncer of this directory. One that waits for its answer is not replaced."""
    if (home / REQUEST_FILE).exists():
        raise UserError(f"run {home}: another rollback waits for its syncer; remove {home / REQUEST_FILE} to withdraw it")
    request = RollbackRequest(secrets.token_hex(8), to, reset_optimizer, reason[:REASON_MAX])
    write_file(home / REQUEST_FILE, [msgspec.json.encode(request)])
    return request


def answer_to(home: Path, request: RollbackRequest) -> RollbackAnswer | None:
    try:
        answer = msgspec.json.decode((home / ANSWER_FILE).read_bytes(), type=RollbackAnswer)
    except (*UNDECODABLE, OSError):
        return None
    return answer if answer.request == request.request else None
