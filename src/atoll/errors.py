"""The exception tree. The branch says whose fault it is, and decides the exit code.

AtollError
├── UserError             the user's input: one sentence with the key, the value and the remedy     (exit 2)
│   ├── NotAdmitted       the syncer refuses this learner for good: revoked, expelled, wrong token
│   ├── ConfigError       a key of a recipe or of --set
│   ├── PlanError         a chaos plan
│   ├── DataError         a corpus or a tokenizer
│   └── TapeError         a tape that cannot be read (names the record)
├── RunFailed             the run itself failed                                                     (exit 1)
│   ├── PlaceLost         another process has this learner's place; it may ask for a new one
│   ├── ReplayDiverged    the machine decided otherwise than on the tape; has the events before it
│   └── InvariantViolated a checker found that the protocol broke its own rules
├── NotFinite             a tensor holds NaN or Inf: names the tensor
└── PeerViolation         a peer broke the protocol (a duplicate, a gap, an unknown version): a bug or an attack
"""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for bytes that are not what they should be: another type, text that is no UTF-8, nested too deeply."""


class AtollError(Exception):
    """Every exception that Atoll raises on purpose."""


class UserError(AtollError):
    """The user's input is wrong; the message names the remedy."""


class NotAdmitted(UserError):
    pass


class ConfigError(UserError):
    pass


class PlanError(UserError):
    pass


class DataError(UserError):
    pass


class TapeError(UserError):
    pass


class RunFailed(AtollError):
    pass


class PlaceLost(RunFailed):
    pass


class ReplayDiverged(RunFailed):
    pass


class InvariantViolated(RunFailed):
    pass


class NotFinite(AtollError):
    """A tensor holds NaN or Inf. Such a tensor must never be sent."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} holds NaN or Inf")
        self.where = where


class PeerViolation(AtollError):
    pass
