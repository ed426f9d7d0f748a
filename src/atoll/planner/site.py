"""The description of a cluster: a short TOML file, checked here once. All other files trust its types.

    [model]     parameters, layers
    [[sites]]   chips at one place; `count` is the number of identical sites
    [link]      between any two sites without a row in [[links]]
    [syncer]    where it runs and what it may use
    [failures]  what an interruption costs
    [quality]   the constants of quality.py
    [fixed]     knobs that the search leaves alone

Every error names the key, the value and the remedy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from atoll.config import CodecName
from atoll.config.codecs import codec_spec
from atoll.errors import ConfigError
from atoll.toml import read_toml

WholeNumber = Annotated[int, Meta(ge=1, le=10**7)]
Above0 = Annotated[float, Meta(gt=0.0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e15)]
Below1 = Annotated[float, Meta(ge=0.0, lt=1.0)]
EVEN = 1.02
"""Step times within this factor count as equal."""
FREE = 1e6
"""Gbit/s of an exchange that costs no time: the one inside a site whose step time includes it."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelDescription(_Section, frozen=True):
    parameters: Annotated[float, Meta(ge=1000, le=1e14)]
    layers: Annotated[int, Meta(ge=1, le=10_000)] = 24
    gradient_bits: Annotated[float, Meta(ge=1.0, le=64.0)] = 16.0
    """Bits per parameter that data-parallel training exchanges: bf16 gradients, as practitioners run it; 32 for fp32."""


class Site(_Section, frozen=True):
    """Chips at one place. Split into k learners, each has a k-th of the chips and of the batch, so a step takes equally long."""

    name: Annotated[str, Meta(min_length=1, max_length=60)]
    chips: WholeNumber
    step_seconds: Annotated[float, Meta(ge=1e-4, le=1e6)]
    """One inner step of all its chips together."""
    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    inside_gbit: Above0 | None = None
    """Between its chips. None: `step_seconds` includes the exchange of gradients."""
    chip_memory_gb: Above0 | None = None
    host_memory_gb: Above0 | None = None
    """One chip's share of its host's memory."""
    mtbi_hours: Above0 = 8760.0
    """Mean time between interruptions of one chip."""
    slice_chips: WholeNumber = 8
    """Chips that one failure takes out."""
    preemptions_per_day: NonNegative = 0.0
    """Of the whole site."""
    away_minutes: Above0 = 30.0
    """How long a preempted site stays away."""
    speed_spread: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """Half of the learners of this kind of site take 1 + speed_spread times as long for a step."""
    price_per_chip_hour: NonNegative = 0.0
    price_per_gb: NonNegative = 0.0
    """Of bytes that leave the site, in the unit of `price_per_chip_hour`."""
    gb_per_day_max: Above0 | None = None
    """The most bytes that may leave the site."""


class LinkDescription(_Section, frozen=True):
    gbit: Above0
    """Each way."""
    latency_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """One way."""
    variation: Annotated[float, Meta(ge=0.0, le=0.99)] = 0.0
    """The rate is uniform between (1 - variation) * gbit and gbit."""
    usable: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.8
    """The share of the rate that a plan may use. The rest is slack, for others on the line and for a bad day."""
    between: tuple[str, ...] = ()


class Syncer(_Section, frozen=True):
    site: str = ""
    """By default the site with the best links to the others."""
    cores: Above0 | None = None
    """Of one shard. None, here and below: the plan asks for what it needs."""
    memory_gb: Above0 | None = None
    disk_mb_per_s: Above0 | None = None
    gbit: Above0 | None = None
    """Its own link, shared by all learners."""
    shards: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Processes, each with its share of every fragment, as of `atoll syncer --shards`."""


class Failures(_Section, frozen=True):
    """The defaults reproduce the published goodput table (sim/estimates/failures.py)."""

    resize_seconds: NonNegative = 12.0
    restart_seconds: NonNegative = 85.0
    """Without elasticity: from a failure to the next step."""
    repair_minutes: Above0 = 60.0


class Quality(_Section, frozen=True):
    """Constants of the quality model; docs/planning/planner.md has their sources. Losses are in per cent above data-parallel."""

    base_percent: NonNegative = 0.615
    """Two synchronous learners, H = 30, 35M parameters."""
    size_exponent: NonNegative = 0.34
    interval_exponent: NonNegative = 0.56
    learners_doubling: NonNegative = 2.7
    """The loss that each doubling of the learners beyond two adds, as a multiple of that of two."""
    asynchrony: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.33
    """The loss of decoupled rounds as a multiple of that of synchronous ones."""
    staleness_step: NonNegative = 0.03
    """The loss that each inner step between pull and adoption adds, as a share of the total."""
    four_bit_percent: NonNegative = 0.09
    """Of int4. int8 costs half of it, and streaming's e3m0 nothing: the rows that were fitted had been run with it."""
    kept_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.9
    """If the links keep a smaller share of a decoupled schedule, the score falls in proportion."""
    loss_slope: Annotated[float, Meta(gt=0.0, le=10.0)] = 0.047
    """Loss is proportional to compute to the power of minus this."""


class Fixed(_Section, frozen=True):
    preset: Literal["ddp", "diloco", "async_diloco", "streaming", "decoupled"] | None = None
    learners: WholeNumber | None = None
    interval: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    fragments: Annotated[int, Meta(ge=1, le=10**5)] | None = None
    overlap: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    quorum: WholeNumber | None = None
    codec_up: CodecName | None = None
    codec_down: CodecName | None = None


class ClusterDescription(_Section, frozen=True):
    model: ModelDescription
    sites: tuple[Site, ...]
    link: LinkDescription | None = None
    links: tuple[LinkDescription, ...] = ()
    syncer: Syncer = Syncer()
    failures: Failures = Failures()
    quality: Quality = Quality()
    fixed: Fixed = Fixed()

    @property
    def chips(self) -> int:
        return sum(s.chips * s.count for s in self.sites)

    @property
    def preemptible(self) -> bool:
        return any(s.preemptions_per_day > 0 for s in self.sites)

    @property
    def uneven(self) -> bool:
        """Learners differ in speed."""
        steps = [s.step_seconds for s in self.sites]
        return max(steps) > EVEN * min(steps) or any(s.speed_spread > EVEN - 1 and s.chips * s.count > 1 for s in self.sites)

    def link_between(self, a: str, b: str) -> LinkDescription:
        for link in self.links:
            if set(link.between) == {a, b}:
                return link
        assert self.link is not None, "checked at the border"
        return self.link

    def changed(
        self, *, rate: float = 1.0, inside: float = 1.0, latency: float = 1.0, interruptions: float = 1.0,
        spread: float | None = None,
    ) -> ClusterDescription:  # fmt: skip
        """A copy with every link `rate` times as fast and with `latency` times the latency, links inside a site `inside` times
        as fast, and `interruptions` times as many interruptions. With `spread`, half of the identical sites are slower by it;
        if no sites are identical, the first one is."""
        alike = any(s.count > 1 for s in self.sites)

        def slower(number: int, s: Site) -> Site:
            if spread is None or (not alike and number > 0):
                return s
            if alike:
                return msgspec.structs.replace(s, speed_spread=spread)
            return msgspec.structs.replace(s, step_seconds=s.step_seconds * (1 + spread))

        def stretch(link: LinkDescription) -> LinkDescription:
            return msgspec.structs.replace(link, gbit=link.gbit * rate, latency_seconds=link.latency_seconds * latency)

        sites = tuple(
            msgspec.structs.replace(
                slower(number, s), mtbi_hours=s.mtbi_hours / interruptions,
                preemptions_per_day=s.preemptions_per_day * interruptions,
                inside_gbit=s.inside_gbit * inside if s.inside_gbit else None,
            )
            for number, s in enumerate(self.sites)
        )
        link = stretch(self.link) if self.link else None
        return msgspec.structs.replace(self, sites=sites, link=link, links=tuple(map(stretch, self.links)))


# ---------------------------------------------------------------- the border


def load_cluster(path: Path) -> ClusterDescription:
    return cluster_from_builtins(read_toml(path, "cluster"))


def cluster_from_builtins(raw: Mapping[str, Any]) -> ClusterDescription:
    _known_keys(raw)
    try:
        cluster = msgspec.convert(raw, ClusterDescription, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    for key, name in (("codec_up", cluster.fixed.codec_up), ("codec_down", cluster.fixed.codec_down)):
        try:
            codec_spec(name or "fp32")
        except ConfigError as error:
            raise ConfigError(f"key fixed.{key} = {name!r}: {error}") from None
    for wrong, sentence in _cross_checks(cluster):
        if wrong:
            raise ConfigError(sentence)
    return cluster


_TABLES: dict[str, type[_Section]] = {
    "model": ModelDescription, "sites": Site, "link": LinkDescription, "links": LinkDescription, "syncer": Syncer,
    "failures": Failures, "quality": Quality, "fixed": Fixed,
}  # fmt: skip
_LISTS = ("sites", "links")


def _known_keys(raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        _known(key, list(_TABLES), "", value)
        rows = value if key in _LISTS else [value]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            right = f"is a list of tables: write [[{key}]]" if key in _LISTS else f"is a section: write [{key}]"
            raise ConfigError(f"key {key} = {value!r}: {right}")
        for number, row in enumerate(rows):
            where = f"{key}[{number}]." if key in _LISTS else f"{key}."
            if key == "sites" and "away_minutes" in row and "preemptions_per_day" not in row:
                raise ConfigError(f"key {where}away_minutes = {row['away_minutes']!r}: is how long a preempted site stays away; "
                                  f"give preemptions_per_day too, or leave it out")  # fmt: skip
            for name, inner in row.items():
                _known(name, [f for f in _TABLES[key].__struct_fields__ if f != "between" or key == "links"], where, inner)
                if isinstance(inner, float) and not math.isfinite(inner):
                    raise ConfigError(f"key {where}{name} = {inner}: must be a finite number")


def _known(key: str, allowed: list[str], where: str, value: Any) -> None:
    if key in allowed:
        return
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {where}{close[0]}?" if close else f"use one of {', '.join(allowed)}"
    shown = repr(value) if len(repr(value)) < 60 else "..."
    raise ConfigError(f"key {where}{key} = {shown}: no such key; {hint}")


def _explain(error: str, raw: Any) -> str:
    what, _, where = error.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    if missing := re.match(r"Object missing required field `(\w+)`", what):
        whole = f"{path}.{missing[1]}" if path else missing[1]
        return f"key {whole}: is missing; {_NEEDED.get(missing[1], 'it is required')}"
    value: Any = raw
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
    if what.startswith("Invalid enum value"):
        what = "must be ddp, diloco, async_diloco, streaming or decoupled"
    what = re.sub(r"Expected `(\w+)(?: \| null)?` ", lambda m: f"must be {_WORDS.get(m[1], m[1])} ", what)
    what = re.sub(r"Expected `([^`]+)`", r"must be of type \1", what)
    return f"key {path or '(top)'} = {value!r}: {what[0].lower()}{what[1:]}"


_WORDS = {"int": "a whole number", "float": "a number"}
_NEEDED = {
    "model": "write [model] with parameters", "sites": "write one [[sites]] per site, with name, chips and step_seconds",
    "parameters": "give the number of the model's parameters, such as 1e9", "chips": "give the number of the site's chips",
    "step_seconds": "give the time of one inner step of the whole site", "name": "name the site, for links and for the answer",
    "gbit": "give the rate of the link in each direction",
}  # fmt: skip


def _cross_checks(c: ClusterDescription) -> list[tuple[bool, str]]:
    names = [s.name for s in c.sites]
    twice = next((n for n in names if names.count(n) > 1), None)
    found: list[tuple[bool, str]] = [
        (not c.sites, "key sites = []: must have at least one site; write [[sites]]"),
        (twice is not None, f"key sites: two are named {twice!r}; give them different names, or write one with count = 2"),
        (sum(s.count for s in c.sites) > 4096, "key sites: more than 4,096 in all; one syncer has at most 4,096 members"),
        (bool(c.syncer.site) and c.syncer.site not in names, _unknown("syncer.site", c.syncer.site, names)),
        (any(s.price_per_gb for s in c.sites) and not any(s.price_per_chip_hour for s in c.sites),
         "key sites.price_per_gb: is weighed against the price of chips; give price_per_chip_hour too"),
    ]  # fmt: skip
    for number, link in enumerate(c.links):
        found += _link_checks(f"links[{number}].between", link, c.sites, names)
    pairs = [tuple(sorted(link.between)) for link in c.links]
    again = next((p for p in pairs if pairs.count(p) > 1), ("", ""))
    found.append((again != ("", ""), f"key links: two rows join {' and '.join(again)}; keep one"))
    gap = _missing_link(c, {frozenset(p) for p in pairs})
    found.append((gap is not None, f"key links: none between {gap}; add it to [[links]], or write a [link] for all other pairs"))
    return found + _fixed_checks(c)


def _unknown(key: str, value: str, names: list[str]) -> str:
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the sites are {', '.join(names)}"
    return f"key {key} = {value!r}: no such site; {hint}"


def _link_checks(key: str, link: LinkDescription, sites: tuple[Site, ...], names: list[str]) -> list[tuple[bool, str]]:
    found = [(len(link.between) != 2, f"key {key} = {list(link.between)}: must name two sites")]
    found += [(end not in names, _unknown(key, end, names)) for end in link.between]
    if len(set(link.between)) == 1:
        alone = any(s.name == link.between[0] and s.count == 1 for s in sites)
        found.append((alone, f"key {key} = {list(link.between)}: joins a site with itself, and its count is 1; "
                             f"use sites.inside_gbit for the links between its chips"))  # fmt: skip
    return found


def _missing_link(c: ClusterDescription, pairs: set[frozenset[str]]) -> str | None:
    if c.link is not None:
        return None
    for i, a in enumerate(c.sites):
        for b in c.sites[i:]:
            if (a.name != b.name or a.count > 1) and frozenset((a.name, b.name)) not in pairs:
                return f"{a.name!r} and {b.name!r}" if a.name != b.name else f"the {a.count} sites of {a.name!r}"
    return None


def _fixed_checks(c: ClusterDescription) -> list[tuple[bool, str]]:
    f = c.fixed
    tau, h = f.overlap, f.interval
    return [
        (tau is not None and h is not None and tau >= h and f.preset != "async_diloco",
         f"key fixed.overlap = {tau}: must be below fixed.interval = {h}"),
        (f.learners is not None and f.learners > c.chips,
         f"key fixed.learners = {f.learners}: more than the {c.chips} chips; a learner needs at least one chip"),
        (f.quorum is not None and f.learners is not None and f.quorum > f.learners,
         f"key fixed.quorum = {f.quorum}: must be at most fixed.learners = {f.learners}"),
    ]  # fmt: skip
