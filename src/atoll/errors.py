"""The exception tree. Whose fault it is decides the branch; the branch decides the exit code.

AtollError
├── UserError             the user's input: one sentence with what, where and what would be right   (exit 2)
│   ├── ConfigError       a key of a recipe or of --set
│   ├── PlanError         a chaos plan
│   ├── DataError         a corpus or a tokenizer
│   └── TapeError         a tape that cannot be read (names the record)
├── RunFailed             the run itself went wrong                                                (exit 1)
│   ├── ReplayDiverged    the machine decided otherwise than the tape says, with the story
│   └── InvariantViolated a checker caught the protocol breaking its own rules
├── NotFinite             NaN or Inf where a number must be: names the tensor
└── PeerViolation         a peer broke the protocol (a duplicate, a gap, an unknown version): a bug or an attack
"""

from __future__ import annotations


class AtollError(Exception):
    """Everything Atoll raises on purpose."""


class UserError(AtollError):
    """The user's input is wrong; the message says what would be right."""


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


class ReplayDiverged(RunFailed):
    pass


class InvariantViolated(RunFailed):
    pass


class NotFinite(AtollError):
    """A tensor holds NaN or Inf. It must never reach the wire."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} holds NaN or Inf")
        self.where = where


class PeerViolation(AtollError):
    pass
