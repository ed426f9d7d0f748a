"""Faults as data, and seeded generators of chaos plans.

The simulator and the live driver inject the faults of the same plans. Randomness is an argument: every generator takes the
random stream it draws from.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from atoll.errors import UNDECODABLE, PlanError
from atoll.ids import SYNCER, LearnerId, WorkerId, worker_name


class _Fault(msgspec.Struct, frozen=True, tag_field="fault", tag=str.lower, forbid_unknown_fields=True):
    """`at` and `lasts` are seconds of the run's clock."""

    at: float


class Kill(_Fault, frozen=True):
    """The learner's process dies and comes back, empty, after `lasts`."""

    learner: LearnerId
    lasts: float = 20.0
    in_round: bool = False
    """It waits until the learner takes part in a round that is not stored yet."""


class Pause(_Fault, frozen=True):
    """The process is stopped (SIGSTOP): its connections stay open, and it does nothing."""

    learner: LearnerId
    lasts: float = 10.0


class Slow(_Fault, frozen=True):
    learner: LearnerId
    factor: float = 2.0
    lasts: float = 30.0


class Partition(_Fault, frozen=True):
    """The link between two workers carries nothing; `one_way` cuts only a to b."""

    a: WorkerId
    b: WorkerId = SYNCER
    lasts: float = 10.0
    one_way: bool = False


class Clog(_Fault, frozen=True):
    """The link holds all messages back and delivers them late, in order."""

    a: WorkerId
    b: WorkerId = SYNCER
    lasts: float = 5.0


class Corrupt(_Fault, frozen=True):
    """The next frame from a to b is damaged in transit."""

    a: WorkerId
    b: WorkerId = SYNCER


class KillSyncer(_Fault, frozen=True, tag="kill_syncer"):
    lasts: float = 5.0


class Scavenge(_Fault, frozen=True):
    """The opposite of a fault: a learner beyond the declared ones joins, and is asked to leave after `lasts`."""

    learner: LearnerId
    lasts: float = 60.0


class Rollback(_Fault, frozen=True):
    """The operator rolls the run back to the newest rollback point, or to the `points`-th newest."""

    points: int = 1
    reset_optimizer: bool = False


Attack: TypeAlias = Literal[
    "steps", "tokens", "times", "clock", "dawdle", "sign_flip", "scale", "noise", "drift", "free_ride"
]  # fmt: skip
ATTACKS: tuple[Attack, ...] = get_args(Attack)


class Hostile(_Fault, frozen=True):
    """The learner attacks: it lies about its steps, tokens or times, sends huge clocks, answers later and later, or changes its
    contributions. `size` multiplies the norm of a contribution; for "dawdle" it is the seconds by which each answer is later."""

    learner: LearnerId
    attack: Attack
    size: float = 1.0
    lasts: float = 1e9


Fault: TypeAlias = Kill | Pause | Slow | Partition | Clog | Corrupt | KillSyncer | Scavenge | Hostile | Rollback
FaultKind: TypeAlias = Literal["kill", "pause", "slow", "partition", "clog", "corrupt", "kill_syncer"]
KINDS: tuple[FaultKind, ...] = ("kill", "pause", "slow", "partition", "clog", "corrupt", "kill_syncer")
"""Faults of a random plan."""


FAR = 1e9
"""Seconds: no run lasts longer."""
FAULTS_MAX = 100_000
"""Limit of a random plan."""
SCAVENGED_MAX = 1024


class ChaosPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    faults: tuple[Fault, ...] = ()

    def healed_at(self) -> float:
        """When the last fault is over."""
        return max((f.at + getattr(f, "lasts", 0.0) for f in self.faults), default=0.0)

    def to_toml(self) -> str:
        """The file that `--chaos` reads."""
        return msgspec.toml.encode(self).decode()

    def __str__(self) -> str:
        return "\n".join(describe_fault(fault) for fault in self.faults) or "no faults"


def describe_fault(fault: Fault) -> str:
    start = f"{fault.at:10.3f} s  "
    match fault:
        case Kill(learner=m, lasts=d, in_round=in_round):
            return f"{start}kill       {worker_name(m)}{' in a round' * in_round}, back after {d:.3f} s"
        case Pause(learner=m, lasts=d):
            return f"{start}pause      {worker_name(m)} for {d:.3f} s"
        case Slow(learner=m, factor=f, lasts=d):
            return f"{start}slow       {worker_name(m)} by {f:.2f} for {d:.3f} s"
        case Partition(a=a, b=b, lasts=d, one_way=one_way):
            arrow = "->" if one_way else "<->"
            return f"{start}partition  {worker_name(a)} {arrow} {worker_name(b)} for {d:.3f} s"
        case Clog(a=a, b=b, lasts=d):
            return f"{start}clog       {worker_name(a)} <-> {worker_name(b)} for {d:.3f} s"
        case Corrupt(a=a, b=b):
            return f"{start}corrupt    next frame {worker_name(a)} -> {worker_name(b)}"
        case KillSyncer(lasts=d):
            return f"{start}kill       syncer, back after {d:.3f} s"
        case Hostile(learner=m, attack=attack, size=size):
            return f"{start}hostile    {worker_name(m)}: {attack}, size {size:g}"
        case Rollback(points=n, reset_optimizer=reset):
            return f"{start}rollback   to point {-n}{' with empty moments' if reset else ''}"
        case Scavenge(learner=m, lasts=d):
            return f"{start}scavenge   {worker_name(m)} for {d:.3f} s"


# ---------------------------------------------------------------- files


def load_plan(text: str, learners: int) -> ChaosPlan:
    """A plan from a TOML file ([[faults]] tables) or from a seeded generator, written as random:SEED:COUNT:SECONDS."""
    if not text.strip():
        raise PlanError(f"--chaos {text!r}: names no plan; give a TOML file or random:SEED:COUNT:SECONDS, or leave it out")
    if text.startswith("random:"):
        return _parse_random(text, learners)
    path = Path(text)
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=ChaosPlan)
    except FileNotFoundError:
        raise PlanError(f"chaos plan {text}: no such file; give a TOML file or random:SEED:COUNT:SECONDS") from None
    except (*UNDECODABLE, ValueError, OSError) as error:
        kinds = ", ".join((*KINDS, "scavenge", "hostile", "rollback"))
        raise PlanError(f"chaos plan {text}: {error}; each [[faults]] needs fault, one of {kinds}, and at") from None
    check_plan(plan, learners)
    return plan


def _parse_random(text: str, learners: int) -> ChaosPlan:
    parts = text.split(":")
    try:
        seed, count, span = int(parts[1]), int(parts[2]), float(parts[3])
    except (IndexError, ValueError):
        raise PlanError(f"chaos plan {text!r}: must be random:SEED:COUNT:SECONDS, such as random:7:10:200") from None
    if len(parts) != 4:
        raise PlanError(f"chaos plan {text!r}: must be random:SEED:COUNT:SECONDS, such as random:7:10:200")
    if not 0 <= count <= FAULTS_MAX:
        raise PlanError(f"chaos plan {text!r}: COUNT must be 0 to {FAULTS_MAX:,}")
    if not 0 < span <= FAR:
        raise PlanError(f"chaos plan {text!r}: SECONDS must be above 0 and at most {FAR:g}")
    return random_plan(random.Random(seed), learners, count=count, span=span)


def check_plan(plan: ChaosPlan, learners: int) -> None:
    for number, fault in enumerate(plan.faults, 1):
        workers = [getattr(fault, name) for name in ("learner", "a", "b") if hasattr(fault, name)]
        if isinstance(fault, Scavenge):
            if not learners <= fault.learner < learners + SCAVENGED_MAX:
                raise PlanError(
                    f"chaos plan, fault {number}: scavenges learner {fault.learner}; learners beyond the declared ones are "
                    f"{learners} to {learners + SCAVENGED_MAX - 1}"
                )
        elif any(not SYNCER <= w < learners for w in workers) or getattr(fault, "learner", 0) == SYNCER:
            raise PlanError(
                f"chaos plan, fault {number}: names worker {workers}; learners are 0 to {learners - 1}, the syncer is -1"
            )
        lasts, factor = getattr(fault, "lasts", 1.0), getattr(fault, "factor", 1.0)
        if not (0 <= fault.at <= FAR and 0 < lasts <= FAR and 1 <= factor <= FAR):
            bounds = f"at must be 0 or more, lasts above 0, factor at least 1, and none of them above {FAR:g}"
            raise PlanError(f"chaos plan, fault {number}: {bounds}")
        if len(workers) == 2 and workers[0] == workers[1]:
            raise PlanError(f"chaos plan, fault {number}: a link needs two ends, a and b are both {workers[0]}")


# ---------------------------------------------------------------- generators


def random_plan(
    rng: random.Random,
    learners: int,
    *,
    count: int = 10,
    span: float = 200.0,
    start: float = 5.0,
    kinds: tuple[FaultKind, ...] = KINDS,
) -> ChaosPlan:
    """`count` faults over `span` seconds. A third of them come with a second fault close by: often to the same learner while it
    recovers, or to a peer that may be serving it."""
    faults: list[Fault] = []
    while len(faults) < count:
        at = start + rng.random() * span
        first = _draw(rng, rng.choice(kinds), at, learners)
        faults.append(first)
        if rng.random() < 0.33 and len(faults) < count:
            again = at + getattr(first, "lasts", 0.0) + rng.expovariate(1 / 2.0) if rng.random() < 0.5 else at + rng.random()
            victim = getattr(first, "learner", getattr(first, "a", None)) if rng.random() < 0.6 else None
            faults.append(_draw(rng, rng.choice(kinds), again, learners, victim))
    return ChaosPlan(tuple(sorted(faults, key=lambda f: f.at)))


def _draw(rng: random.Random, kind: FaultKind, at: float, learners: int, victim: WorkerId | None = None) -> Fault:
    learner = victim if victim is not None and victim >= 0 else rng.randrange(learners)
    other = rng.choice([SYNCER, SYNCER, SYNCER] + [m for m in range(learners) if m != learner])
    lasts = 0.2 + rng.expovariate(1 / 8.0)
    match kind:
        case "kill":
            return Kill(at, learner, lasts)
        case "pause":
            return Pause(at, learner, lasts)
        case "slow":
            return Slow(at, learner, 1.0 + rng.expovariate(1.0), lasts)
        case "partition":
            a, b = (learner, other) if rng.random() < 0.5 or other == SYNCER else (other, learner)
            a, b = (b, a) if other == SYNCER and rng.random() < 0.5 else (a, b)
            return Partition(at, a, b, lasts, rng.random() < 0.5)
        case "clog":
            return Clog(at, learner, other, lasts)
        case "corrupt":
            return Corrupt(at, *((learner, other) if rng.random() < 0.5 else (other, learner)))
        case "kill_syncer":
            return KillSyncer(at, 0.2 + rng.expovariate(1 / 3.0))


def swizzle_clog(rng: random.Random, learners: int, *, at: float = 5.0, step: float = 1.0) -> ChaosPlan:
    """Clog a random subset of links one after the other, then release them in another random order."""
    chosen = [m for m in range(learners) if rng.random() < 0.6] or [0]
    order_in, order_out = rng.sample(chosen, len(chosen)), rng.sample(chosen, len(chosen))
    ends = {m: at + step * (len(chosen) + i + 1) for i, m in enumerate(order_out)}
    starts = {m: at + step * i for i, m in enumerate(order_in)}
    return ChaosPlan(tuple(Clog(starts[m], m, SYNCER, ends[m] - starts[m]) for m in order_in))
