"""What parts of a live run cost, as measured: a syncer's rounds with and without shards, its messages, the payloads on its
links, and the steps of a learner of several ranks.

A row is a line under bench/results/; a test compares every number. The planner takes the syncer's cores from here.
docs/planning/simulators.md says what each constant rests on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class MeasuredRound:
    """Of bench/results/syncer_round.jsonl: rounds of one fragment of FRAGMENT parameters, int4 up, int8 down, over TLS."""

    commit: str
    cores: int
    learners: int
    cpu_seconds: float
    """Of the syncer a round, shards and all threads included."""
    commit_seconds: float
    """Between two commits, while the scripted learners load the same cores."""
    shards: int = 1
    threads: int = 0
    """Of the kernels, in each shard; 0: as many as it takes by itself."""
    shards_seconds: float | None = None
    """Of the CPU, what the shards took together; the rest is the coordinator's."""


FRAGMENT: Final = 46_662_656
UP_BITS, DOWN_BITS = 4.125, 8.125
"""Of a parameter in those rounds."""
ROUNDS: Final = (
    MeasuredRound("d93833d", 2, 1, 0.536, 0.449),
    MeasuredRound("b2cc29c", 2, 8, 1.758, 1.471),
    MeasuredRound("f6531d4", 16, 8, 1.606, 0.324, shards=1, threads=4),
    MeasuredRound("f6531d4", 16, 8, 1.669, 0.206, shards=4, threads=4, shards_seconds=1.586),
)
"""All on x86 cores; the last two in turn on one machine."""


@dataclass(frozen=True)
class MeasuredPayloads:
    """Of bench/results/wire.jsonl: CPU of the syncer's process for one payload, with eight peers, over TLS."""

    commit: str
    up_seconds: float
    down_seconds: float


UP_BYTES, DOWN_BYTES = 26_000_000, 47_000_000
PAYLOADS: Final = MeasuredPayloads("f9352b0", 32.2e-3, 37.7e-3)


@dataclass(frozen=True)
class MeasuredLoad:
    """Of bench/results/syncer_load.jsonl: small fragments, so that messages are what costs."""

    commit: str
    learners: int
    step_seconds: float
    """A round, and a report of each learner, in each."""
    cores: float


LOAD: Final = MeasuredLoad("11c4798", 512, 2.0, 0.6984415513765673)


@dataclass(frozen=True)
class MeasuredRanks:
    """Of bench/results/ranks.jsonl: a learner of several ranks on one machine; an eighth of the model travels in every step."""

    commit: str
    ranks: int
    cores: int
    parameters: int
    alone_seconds: float
    joined_seconds: float
    shares: tuple[float, ...]
    """Of the bytes that the learner sends to the syncer, what each rank encoded."""


RANKS: Final = (
    MeasuredRanks("5a226ea", 2, 2, 1_182_720, 0.13413, 0.13076, (0.5, 0.5)),
    MeasuredRanks("5a226ea", 2, 2, 1_182_720, 0.15698, 0.18002, (0.5, 0.5)),
)
"""On two x86 cores that others used too, at load averages of 8.7 and 8.3."""


# ---------------------------------------------------------------- constants

ONE, EIGHT, UNSHARDED, SHARDED = ROUNDS
BYTE_SECONDS: Final = (PAYLOADS.up_seconds + PAYLOADS.down_seconds) / (UP_BYTES + DOWN_BYTES)
"""Core seconds of the syncer for a byte of a payload, up or down."""
CONTRIBUTION_SECONDS: Final = (
    (EIGHT.cpu_seconds - ONE.cpu_seconds) / (EIGHT.learners - ONE.learners) / FRAGMENT
    - BYTE_SECONDS * (UP_BITS + DOWN_BITS) / 8
)  # fmt: skip
"""Core seconds for a parameter of a contribution beside its bytes: inspection, the log of inputs, merging."""
ROUND_SECONDS: Final = (
    ONE.cpu_seconds / FRAGMENT - CONTRIBUTION_SECONDS - BYTE_SECONDS * (UP_BITS + DOWN_BITS) / 8
)  # fmt: skip
"""Core seconds for a parameter of a round beside its contributions: outer step, announcement, digests, the disk."""
MESSAGES_SECONDS: Final = LOAD.cores * LOAD.step_seconds / LOAD.learners
"""Core seconds for the messages of a learner in a round: its report, pull, contribution and announcement."""
SHARDED_CPU: Final = SHARDED.cpu_seconds / UNSHARDED.cpu_seconds
SHARDED_COMMIT: Final = SHARDED.commit_seconds / UNSHARDED.commit_seconds
"""Four shards of four threads as a share of one process of four, on the same 16 cores."""
RANK_STEP: Final = sum(row.joined_seconds / row.alone_seconds for row in RANKS) / len(RANKS)
"""A step of a learner of two ranks while it synchronises, as a multiple of one alone; the mean of the lines."""


@dataclass(frozen=True)
class RoundCost:
    """Core seconds of one round of one fragment, of the process that learners talk to and of all shards together."""

    coordinator: float
    shards: float

    @property
    def total(self) -> float:
        return self.coordinator + self.shards


def round_cost(parameters: float, learners: int, up_bits: float, down_bits: float) -> RoundCost:
    """Messages go through the coordinator. The rest is divided among the shards: learners exchange payloads with them directly.
    Without shards one process pays for both."""
    contribution = CONTRIBUTION_SECONDS + BYTE_SECONDS * (up_bits + down_bits) / 8
    return RoundCost(learners * MESSAGES_SECONDS, parameters * (ROUND_SECONDS + learners * contribution))
