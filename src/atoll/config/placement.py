"""Where a run's processes go: `[placement]` of a recipe, read by `atoll up`, `atoll train` and the planner.

It is no part of `Config`: where a learner runs changes nothing that is trained, so neither tapes nor learners carry it, and a run
may go on under another placement. What a learner's environment holds stays with its launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from atoll.config.sections import Seconds
from atoll.errors import ConfigError
from atoll.toml import parse_assignment, read_toml

Name = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?$")]
"""Engines make names of jobs from it: lower case, digits and inner dashes."""
GroupCount = Annotated[int, Meta(ge=0, le=4096)]
SECTION = "placement"


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Resources(_Part, frozen=True):
    """What one process is given."""

    cpus: Annotated[int, Meta(ge=1, le=4096)] = 1
    """CPU cores."""
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0
    """GPUs. A learner with any trains on `cuda`."""
    memory_gb: Annotated[float, Meta(gt=0.0, le=1e6)] = 4.0
    """Main memory, in units of 2^30 bytes."""


class Group(_Part, frozen=True):
    """Learners that are alike: a row of `[[placement.learners]]`."""

    group: Name = "learners"
    """Its name."""
    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Learners to start."""
    least: GroupCount = 0
    """The fewest that are worth running: Kubernetes drains no node below it, Ray starts none before so many have room. 0: one."""
    most: GroupCount = 0
    """The most, where the engine can follow a cluster that grows (Ray). 0: `count`."""
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Processes of one learner, all on its machine: each trains a part of every batch. `resources` are the learner's."""
    parallel: Literal["", "ddp", "fsdp2", "hsdp"] = ""
    """What ranks hold: all of the model each (`ddp`), a part of every tensor each (`fsdp2`), or such parts in several groups of
    ranks (`hsdp`). Empty: `ddp`."""
    resources: Resources = Resources()
    site: Annotated[str, Meta(max_length=60)] = ""
    """Where these learners run: a Slurm constraint, a Kubernetes zone, a Ray resource `site:NAME`. Empty: anywhere."""
    environment: dict[str, str] = {}
    """Environment variables of these learners."""

    @property
    def device(self) -> str:
        return "cuda" if self.resources.gpus else "cpu"


class SyncerPlace(_Part, frozen=True):
    """Where the syncer runs."""

    resources: Resources = Resources(cpus=2, memory_gb=8.0)
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9.\-]*$", max_length=253)] = ""
    """The name or address by which learners reach it. Empty: the engine finds out."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port it listens on; 0: a free one, or Kubernetes' 7077."""
    shards: Annotated[int, Meta(ge=1, le=256)] = 1
    """Processes beside it that merge and store, each a stripe of every fragment; 1: it does so itself. A run keeps its number."""
    site: Annotated[str, Meta(max_length=60)] = ""
    """As a learner's."""
    environment: dict[str, str] = {}
    """Its environment variables."""


class SlurmPlace(_Part, frozen=True):
    """Of Slurm: what every job is submitted with."""

    partition: str = ""
    """`--partition`; empty: the cluster's default."""
    account: str = ""
    """`--account`; empty: the user's default."""
    time: Annotated[str, Meta(pattern=r"^[0-9:\-]*$")] = ""
    """`--time` of a learner's job, as Slurm writes it (D-HH:MM:SS). When it is nearly over, the job leaves and is requeued."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as "--qos=low"."""
    setup: tuple[str, ...] = ()
    """Shell lines before Atoll is started, such as "module load cuda"."""


class KubernetesPlace(_Part, frozen=True):
    """Of Kubernetes."""

    namespace: Name = "default"
    """The namespace of everything."""
    image: str = "atoll:latest"
    """The image of all containers: see docs/operations/engines.md."""
    storage_gb: Annotated[int, Meta(ge=1, le=10**6)] = 50
    """Size of the syncer's volume. A learner's folder lives as long as its pod."""
    storage_class: str = ""
    """The class of the syncer's volume; empty: the cluster's default."""


class RayPlace(_Part, frozen=True):
    """Of Ray."""

    address: str = "auto"
    """The cluster's address, as `ray.init` takes it."""


class ClusterPlacement(_Part, frozen=True):
    """Where a run's processes go."""

    learners: tuple[Group, ...] = ()
    """Groups of learners; empty: one group with as many as `learners` says."""
    syncer: SyncerPlace = SyncerPlace()
    leave_seconds: Seconds = 30.0
    """Seconds between a preemption notice and the end, which learners are given to deliver what they trained."""
    keys: str = ""
    """A folder that `atoll keys` made. Empty: engines that leave this machine make one in the run's folder."""
    slurm: SlurmPlace = SlurmPlace()
    kubernetes: KubernetesPlace = KubernetesPlace()
    ray: RayPlace = RayPlace()

    def groups(self, learners: int) -> tuple[Group, ...]:
        return self.learners or (Group(count=learners),)

    def by_learner(self, learners: int) -> list[Group]:
        """The group of learner 0, 1, ..."""
        return [group for group in self.groups(learners) for _ in range(group.count)]


def load_placement(recipe: Path | None, assignments: Sequence[str] = ()) -> ClusterPlacement:
    """From a recipe's [placement], changed by `--set placement.KEY=VALUE`."""
    tables = read_toml(recipe) if recipe is not None else {}
    raw = tables.get(SECTION, {})
    if not isinstance(raw, dict):
        raise ConfigError(f"key {SECTION} = {raw!r}: is a section, give its keys")
    for text in assignments:
        if of_placement(text):
            _lay(raw, parse_assignment(text)[SECTION])
    return placement_of(raw)


def of_placement(assignment: str) -> bool:
    return assignment.partition("=")[0].strip().startswith(f"{SECTION}.")


def _lay(raw: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(raw.get(key), dict):
            _lay(raw[key], value)
        else:
            raw[key] = value


def placement_of(raw: Mapping[str, Any]) -> ClusterPlacement:
    try:
        placement = msgspec.convert(raw, ClusterPlacement)
    except msgspec.ValidationError as error:
        said = str(error)
        what, _, where = said.partition(" - at ")
        path = where.strip("`").removeprefix("$")
        raise ConfigError(f"key {SECTION}{path}: {what[0].lower()}{what[1:]}") from None
    for wrong, sentence in _contradictions(placement):
        if wrong:
            raise ConfigError(sentence)
    return placement


def _contradictions(placement: ClusterPlacement) -> list[tuple[bool, str]]:
    names = [group.group for group in placement.learners]
    twice = f"key {SECTION}.learners: two groups have the name {_twice(names)!r}; give each its own"
    found = [(len(set(names)) < len(names), twice)]
    for group in placement.learners:
        where = f"key {SECTION}.learners, group {group.group!r}"
        most = group.most or group.count
        found += [
            (bool(group.parallel) and group.ranks == 1,
             f"{where}: parallel = {group.parallel!r}: says how several ranks share the work; set ranks, or leave it out"),
            (group.least > group.count, f"{where}: least = {group.least}: must be at most count = {group.count}"),
            (most < group.count, f"{where}: most = {group.most}: must be at least count = {group.count}"),
        ]  # fmt: skip
    for where, environment in _environments(placement):
        wrong = next((name for name in environment if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)), None)
        found.append((wrong is not None, f"{where}: {wrong!r} is no name of an environment variable"))
    return found


def _environments(placement: ClusterPlacement) -> list[tuple[str, Mapping[str, str]]]:
    groups = [(f"key {SECTION}.learners, group {group.group!r}, environment", group.environment) for group in placement.learners]
    return [(f"key {SECTION}.syncer.environment", placement.syncer.environment), *groups]


def _twice(names: Sequence[str]) -> str:
    return next((name for i, name in enumerate(names) if name in names[:i]), "")
