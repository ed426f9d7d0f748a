"""What a run's processes are, before any engine: the folder, the commands and what each process needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from atoll.config import ClusterPlacement, Config, Group
from atoll.config.placement import Resources, SyncerPlace

SYNCER: Final = "syncer"
LEFT_CODE: Final = 75
"""A learner's exit code after it was asked to leave: the engine may start it again. (EX_TEMPFAIL of sysexits.h.)"""
DELIVERY_SHARE: Final = 0.7
"""Of the seconds between a notice and the end, how much a learner trains on to deliver; its last step and bytes get the rest."""
JOIN_SECONDS: Final = 3600.0
"""How long a learner waits for a syncer that the scheduler has not started yet."""


def learner_name(learner: int) -> str:
    return f"learner-{learner}"


@dataclass(frozen=True)
class Deployment:
    """One run on one engine."""

    name: str
    """Of jobs and objects: lower case, digits and dashes."""
    run: Path
    """The run's folder, absolute. Where machines share no folder, each sees its own files at these paths."""
    settings: Config
    placement: ClusterPlacement
    python: str = "python3"
    """The interpreter that has Atoll, on the machines of the run."""
    allowed: tuple[str, ...] = ()
    """Functions that may make the model (--allow-model)."""
    plugins: tuple[str, ...] = ()
    threads: int = 1
    spares: bool = False
    """With the learners beyond each group's `count`, up to its `most`: their ids follow the others'."""

    @cached_property
    def group_of(self) -> list[Group]:
        """The group of learner 0, 1, ..."""
        groups = self.placement.groups(self.settings.learners)
        more = [group for group in groups for _ in range(max(0, group.most - group.count))] if self.spares else []
        return self.placement.by_learner(self.settings.learners) + more

    @property
    def learners(self) -> range:
        return range(len(self.group_of))

    @property
    def workers(self) -> list[str]:
        return [SYNCER, *map(learner_name, self.learners)]

    @property
    def recipe(self) -> Path:
        """The complete config: what `up` resolved is what every restart of the syncer reads."""
        return self.run / "config.toml"

    @property
    def keys(self) -> Path:
        return Path(self.placement.keys).absolute() if self.placement.keys else self.run / "keys"

    @property
    def address_file(self) -> Path:
        return self.run / SYNCER / "address"

    @property
    def delivery_seconds(self) -> float:
        return round(DELIVERY_SHARE * self.placement.leave_seconds, 1)

    def out(self, learner: int) -> Path:
        return self.run / "learners" / str(learner)

    def log(self, worker: str) -> Path:
        return self.run / "logs" / f"{worker}.log"

    def needs(self, worker: str) -> tuple[Resources, str, Mapping[str, str]]:
        """Resources, site and environment."""
        if worker == SYNCER:
            place = self.placement.syncer
            return place.resources, place.site, place.environment
        group = self.group_of[int(worker.removeprefix("learner-"))]
        return group.resources, group.site, group.environment

    @property
    def _own_code(self) -> list[str]:
        models = [word for name in self.allowed for word in ("--allow-model", name)]
        return models + [word for name in self.plugins for word in ("--allow-plugin", name)]

    def syncer_words(self, listen: str, *, keys: Path | None, more: tuple[str, ...] = ()) -> list[str]:
        """What comes after `atoll`."""
        trust = ["--keys", str(keys)] if keys is not None else []
        return [
            "syncer", str(self.recipe), "--dir", str(self.run / SYNCER), "--listen", listen, *trust,
            "--threads", str(self.threads), *shard_words(self.placement.syncer), *self._own_code, *more,
        ]  # fmt: skip

    def learner_words(self, learner: int, *, reach: LearnerReach, more: tuple[str, ...] = ()) -> list[str]:
        group = self.group_of[learner]
        return [
            "learner", "--syncer", reach.syncer or f"file:{self.address_file}", "--id", str(learner), *reach.trust(learner),
            "--out", str(self.out(learner)), "--listen", reach.listen, "--device", group.device, "--threads", str(self.threads),
            "--allow-data", "/", "--join-seconds", f"{JOIN_SECONDS:g}", "--leave-seconds", f"{self.delivery_seconds:g}",
            "--left-code", str(LEFT_CODE), *rank_words(group), *self._own_code, *more,
        ]  # fmt: skip


def shard_words(place: SyncerPlace) -> list[str]:
    return ["--shards", str(place.shards)] if place.shards > 1 else []


def rank_words(group: Group) -> list[str]:
    return ["--ranks", str(group.ranks), "--parallel", group.parallel or "ddp"] if group.ranks > 1 else []


@dataclass(frozen=True)
class LearnerReach:
    """How a learner finds and convinces its syncer, and where it serves its peers."""

    keys: Path | None = None
    token: Path | None = None
    syncer: str = ""
    """Empty: by the file in the run's folder."""
    listen: str = "127.0.0.1:0"

    def trust(self, learner: int) -> list[str]:
        if self.keys is not None:
            return ["--keys", str(self.keys), "--name", learner_name(learner)]
        return ["--token", str(self.token)]


@dataclass(frozen=True)
class Rendered:
    """A file, or the commands, that an engine would use: what `--dry-run` prints."""

    title: str
    text: str
    private: bool = False
    """Holds secrets: never printed, never written readably."""


@dataclass(frozen=True)
class WorkerStatus:
    worker: str
    state: str
    where: str = ""
    """The engine's own name of it: a process, a job, a pod."""
    note: str = ""
    """The last line of its log, or why it is not running."""


@dataclass
class EngineState:
    """How the engine sees a run."""

    workers: list[WorkerStatus] = field(default_factory=list)
    is_up: bool = True
    """Something of it runs, or waits to."""
