"""The table of merges: how the outer gradients of several learners become one. It imports no torch; `tensors/merge.py` has the
code."""

from __future__ import annotations

import re

import msgspec

from atoll.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


class MergeSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    summary: str
    """One sentence for people."""
    robust: bool = False
    """It bounds what one learner of three or more can do."""
    by_momentum: bool = False
    """It compares contributions with the outer momentum, so there must be one."""


MERGES: dict[str, MergeSpec] = {spec.name: spec for spec in (
    MergeSpec(name="mean", summary="the weighted mean"),
    MergeSpec(name="rda", summary="radial-directional averaging: the mean direction with the mean norm"),
    MergeSpec(name="clipped_mean", robust=True, summary="the mean of contributions, each tensor clipped to its median norm"),
    MergeSpec(name="trimmed_mean", robust=True, summary="the mean of each coordinate without its extreme values"),
    MergeSpec(name="geometric_median", robust=True, summary="the point closest to all contributions, tensor by tensor"),
    MergeSpec(name="aligned", by_momentum=True,
              summary="the mean of contributions, each turned towards the outer momentum (HeLoCo)"),
)}  # fmt: skip


def merge_spec(name: str) -> MergeSpec:
    if name not in MERGES:
        raise ConfigError(f"merge {name!r} is unknown: must be {known_merges()}")
    return MERGES[name]


def known_merges() -> str:
    return f"one of {', '.join(MERGES)}"


def add_merge(spec: MergeSpec) -> None:
    if not NAME.fullmatch(spec.name):
        raise ConfigError(f"merge {spec.name!r}: the name must be lower-case letters, digits and _")
    if spec.name in MERGES and MERGES[spec.name] != spec:
        raise ConfigError(f"merge {spec.name!r} exists already: choose another name")
    MERGES[spec.name] = spec
