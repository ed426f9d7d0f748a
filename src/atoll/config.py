"""A run as one frozen value, checked once, here. Below this file code trusts its types.

A preset is a function that returns a complete `Config`; a recipe (TOML) and `--set key=value` lay keys over it.
Every algorithm of the family is a choice of numbers and policies in `Protocol` and `Outer`: see docs/presets.md.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from atoll.errors import ConfigError
from atoll.toml import parse_assignment
from atoll.toml import read_toml as read_toml
from atoll.toml import to_toml as to_toml

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Natural = Annotated[int, Meta(ge=0, le=10**9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e9)]
Above0 = Annotated[float, Meta(gt=0.0, le=1e9)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e9)]
Below1 = Annotated[float, Meta(ge=0.0, lt=1.0)]
ALL: Literal["all"] = "all"
CUSTOM = "custom"
"""A model the syncer has no code of: the first learner to join brings its shapes and initial weights."""
CODEC = r"^(fp32|bf16|int8|int4|int2|int1|e3m0|(top_k|random_drop):(0?\.\d*[1-9]\d*|1(\.0*)?))$"
CodecName = Annotated[str, Meta(pattern=CODEC, description="fp32 bf16 int8 int4 int2 int1 e3m0 top_k:SHARE random_drop:SHARE")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sections are values: equal means equal, and nothing can be changed after the border."""


class Protocol(_Section, frozen=True):
    """Who is merged with whom, when, and what travels."""

    local_steps_per_round: Annotated[int, Meta(ge=1, le=10**6)] = 24
    """H: completed inner optimiser steps between two synchronisations of the same fragment."""
    fragmentation: Literal["whole", "layer", "tensor", "balanced", "sub_tensor"] = "balanced"
    fragments: Annotated[int, Meta(ge=0, le=10**5)] = 24
    """P. 0 lets `layer` derive it from the number of blocks."""
    layers_per_fragment: Positive = 3
    layer_order: Literal["strided", "sequential"] = "strided"
    overlap: Natural = 2
    """tau: inner steps between the pull of a fragment and its adoption; rounds that may be in flight."""
    overlap_by_learner: tuple[Natural, ...] = ()
    """tau per learner, for exact adoption only; empty means `overlap` for all."""
    quorum: Positive | Literal["all"] = 1
    """K: the least number of learners whose reports count towards one outer step. "all": every member in sync."""
    grace: Literal["none", "adaptive"] = "adaptive"
    grace_gamma: Share = 0.8
    ema_weight: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    pace: NonNegative = 1.0
    """Least time between outer steps, in median step times (so between two rounds of P <= H: pace * H*step/P)."""
    contribution: Literal["weights", "gradient"] = "weights"
    aggregation_weighting: Literal["uniform", "num_samples", "tokens"] = "tokens"
    merge: Literal["mean", "rda"] = "rda"
    embedding_merge: Literal["mean", "rda"] = "mean"
    merge_norm: Literal["tensor", "row", "fragment"] = "tensor"
    embedding_glob: str = ""
    alpha: Share = 0.0
    """Mixing on adoption: alpha * own + (1 - alpha) * Theta."""
    anchor: Literal["adopted", "present", "round_start"] = "present"
    adopt: Literal["exact", "arrival"] = "arrival"
    lead: Annotated[int, Meta(ge=-1)] = -1
    """Local steps a learner may run past its last due adoption. -1: tau where K = M, unlimited elsewhere."""
    codec_up: CodecName = "int4"
    codec_down: CodecName = "bf16"
    error_feedback: bool = False
    stochastic_rounding: bool = False
    freeze_not_due: bool = False
    """FedPart: freeze what is not due next. An ablation, known to be far worse."""
    ramp: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of the outer steps over which the interval grows 1, 2, 4, ... up to H."""
    snapshot_interval: Natural = 0
    elastic: bool = True
    """False: a lost member still counts towards "all", so everybody waits for its return (plain data-parallel)."""


class Outer(_Section, frozen=True):
    outer_optimizer: Literal["sgd", "momentum", "nesterov", "delayed_nesterov", "inner"] = "nesterov"
    """`inner` runs the inner optimiser on Theta with the merged gradient: data-parallel training."""
    outer_learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    delay: Positive = 1
    """N of delayed Nesterov."""
    apply_outer_optimizer_to: Literal["parameters", "all_floating"] = "parameters"


class Inner(_Section, frozen=True):
    optimizer: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
    """Muon: hidden matrices by the orthogonal factor of their momentum, the rest by AdamW; learners then differ less."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 3e-3
    weight_decay: NonNegative = 0.01
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    momentum: Share = 0.0
    """SGD's."""
    muon_momentum: Share = 0.95
    muon_except: str = "*head*"
    """Globs, separated by commas: matrices that Muon leaves to AdamW besides the embeddings."""
    clip_norm: NonNegative = 1.0
    """0 switches clipping off."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_share: Share = 0.05
    final_share: Share = 0.1
    accumulate: Annotated[int, Meta(ge=1, le=10**5)] = 1
    """Micro-batches per optimiser step. H counts optimiser steps, never these."""
    preserve_optimizer_state: bool = True


class Model(_Section, frozen=True):
    name: str = "decoder"
    """`decoder`; `lenet5`, `resnet18`, `vlm` on pictures (docs/vision.md); `custom`: whatever the first learner brings
    (atoll.join); or package.module:function, which each learner and the syncer must allow by --allow-model."""
    numbers: dict[str, int | float | bool] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"


class Data(_Section, frozen=True):
    corpus: str = "stdlib"
    """`stdlib`: the running interpreter's standard-library sources; or text: a file (plain, JSON lines, Parquet; .xz, .gz,
    .zst), a folder, a glob, or several separated by commas. See docs/data.md."""
    field: str = "text"
    """Of JSON lines and Parquet: where the text is."""
    heldout: str = ""
    """Text to evaluate on, named as in `corpus`; empty: every twentieth document of `corpus`, by its hash."""
    max_bytes: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Of text, unpacked. The standard library is cut there, files that hold more are refused. 0: 4 MB of the standard
    library, 20 GB of files."""
    tokenizer: str = "bytes"
    """`bytes`; `bpe`: trained on the corpus; or a Hugging Face tokenizer's JSON file (.xz, .gz, .zst)."""
    end_of_document: str = ""
    """The entry of a Hugging Face tokenizer that ends a document; empty: <|endoftext|>, </s> or the like."""
    cache: str = ""
    """Folder for encoded text; empty: atoll in $XDG_CACHE_HOME or ~/.cache; `off`: encode in every process."""
    vocab: Positive = 512
    """Entries of the trained BPE; byte-level has 257."""
    seq_len: Positive = 64
    batch_size: Annotated[int, Meta(ge=1, le=10**6)] = 8
    heldout_batches: Positive = 16
    samples_by_learner: tuple[Positive, ...] = ()
    """Batch size per learner where they differ (empty: `batch_size` for all)."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """Pictures only: moved by up to an eighth of their side, and mirrored."""


class Cluster(_Section, frozen=True):
    """Virtual hardware and network: what the simulator stands on."""

    step_seconds: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    step_noise: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Standard deviation of a step's duration, as a share of its mean."""
    step_distribution: Literal["normal", "lognormal"] = "normal"
    """`lognormal` has a long tail of slow steps."""
    slow_share: Share = 0.0
    slow_factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.18
    latency_seconds: NonNegative = 0.02
    up_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    down_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    mtbf_seconds: NonNegative = 0.0
    """Mean time between failures of one learner, exponential; 0: none fail but by a chaos plan."""
    repair_seconds: Above0 = 20.0
    """Mean time until a failed learner is back, exponential."""
    detect_seconds: Above0 = 3.0
    """How long a dead connection takes to be noticed."""
    parameters: Annotated[int, Meta(ge=1, le=10**14)] = 1_000_000
    """Model size where no tensor says it (atoll sim)."""


class Limits(_Section, frozen=True):
    """Everything has a limit, and the limits are tests."""

    versions_max: Annotated[int, Meta(ge=2)] = 8
    """Announced versions of one fragment that the syncer keeps for laggards."""
    silence_steps: Above0 = 8.0
    """A member unheard of for so many of its own steps is silent."""
    patience_seconds: NonNegative = 0.5
    """No deadline derived from measured times is shorter: a busy machine may stall for as long, and nobody is gone."""
    muster_seconds: Above0 = 60.0
    """How long the first round waits for the declared number of learners."""
    first_pull_seconds: Above0 = 60.0
    """Deadline of a pull before any was measured."""
    recovery_intervals: Above0 = 8.0
    """Patience with a peer's state transfer, in intervals of H rounds."""
    suspicions_max: Positive = 3
    """Updates in a row with a norm far beyond the usual that send a learner into recovery; each of them is refused."""
    outlier_factor: Annotated[float, Meta(gt=1.0, le=1e9)] = 100.0
    """A contribution whose norm exceeds the running median of its fragment by this factor is refused."""
    tokens_per_step_max: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """0: as the data section says."""
    leave_seconds: Above0 = 20.0
    """How long a learner that was asked to stop goes on, to deliver the fragments due soonest."""
    snapshots_kept: Positive = 3
    """Newest snapshots that stay on disk."""
    serves_max: Positive = 4
    """Peers' recoveries one learner serves at a time."""
    members_max: Annotated[int, Meta(ge=1, le=4096)] = 1024
    """Every message carries a clock with an entry a member: cost grows with the square of their number."""


class Config(_Section, frozen=True):
    preset: str = "decoupled"
    seed: Natural = 0
    learners: Positive = 4
    outer_steps: Positive = 240
    """T: training ends by the global outer step."""
    protocol: Protocol = Protocol()
    outer: Outer = Outer()
    inner: Inner = Inner()
    model: Model = Model()
    data: Data = Data()
    cluster: Cluster = Cluster()
    limits: Limits = Limits()


# ---------------------------------------------------------------- presets


def _whole(**changes: Any) -> Protocol:
    """What the synchronous whole-model algorithms share."""
    base = Protocol(
        fragmentation="whole", fragments=1, overlap=0, quorum=ALL, grace="none", pace=0.0,
        aggregation_weighting="uniform", merge="mean", embedding_merge="mean", alpha=0.0,
        anchor="adopted", adopt="exact", codec_up="fp32", codec_down="fp32",
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def ddp() -> Config:
    """Gradients averaged in rank order each step; the inner optimiser steps on Theta. A dead rank stops all."""
    protocol = _whole(local_steps_per_round=1, contribution="gradient", elastic=False)
    return Config(preset="ddp", protocol=protocol, outer=Outer(outer_optimizer="inner", outer_learning_rate=1.0))


def fedavg() -> Config:
    protocol = _whole(local_steps_per_round=30, aggregation_weighting="num_samples")
    return Config(preset="fedavg", protocol=protocol, outer=Outer(outer_optimizer="sgd", outer_learning_rate=1.0))


def diloco() -> Config:
    return Config(preset="diloco", outer_steps=1000, protocol=_whole(local_steps_per_round=500))


def async_diloco() -> Config:
    """The merge of round r runs while round r+1 trains and is applied at its end: tau = H."""
    protocol = _whole(local_steps_per_round=100, overlap=100, anchor="round_start")
    return Config(preset="async_diloco", protocol=protocol)


def streaming() -> Config:
    protocol = _whole(
        local_steps_per_round=30, fragmentation="layer", fragments=0, overlap=1, alpha=0.5, codec_up="e3m0"
    )  # fmt: skip
    return Config(preset="streaming", protocol=protocol, outer=Outer(outer_learning_rate=0.4))


COOLER = Outer(outer_learning_rate=0.4, outer_momentum=0.7)
"""The best of the sweeps with RDA and AdamW (docs/results.md). RDA restores the norm that a mean of M learners loses, so that the
published 0.7 / 0.9 steps further than with a mean: too far in runs of some thousand steps."""


def decoupled() -> Config:
    return Config(preset="decoupled", outer=COOLER)


def decoupled_ramp() -> Config:
    return Config(preset="decoupled_ramp", protocol=Protocol(ramp=0.1), outer=COOLER)


PRESETS: dict[str, Callable[[], Config]] = {
    f.__name__: f for f in (ddp, fedavg, diloco, async_diloco, streaming, decoupled, decoupled_ramp)
}

# ---------------------------------------------------------------- the border


def preset(name: str) -> Config:
    if name not in PRESETS:
        raise ConfigError(f"preset = {name!r}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]()


def load(
    recipe: Path | None = None,
    *,
    preset_name: str | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Preset, then the recipe's keys, then its [for.PRESET] keys, then overrides and --set: the later wins."""
    tables, special = _recipe_tables(recipe) if recipe is not None else ({}, {})
    chosen = preset_name or tables.get("preset", "decoupled")
    if not isinstance(chosen, str):
        raise ConfigError(f"preset = {chosen!r}: must be one of {', '.join(PRESETS)}")
    raw = msgspec.to_builtins(preset(chosen))
    tables["preset"] = chosen
    for layer in (tables, special.get(chosen, {}), overrides or {}):
        _lay_over(raw, layer, "")
    for assignment in assignments:
        _lay_over(raw, parse_assignment(assignment), "")
    if raw["preset"] != chosen:
        raise ConfigError(f"key preset = {raw['preset']!r}: a preset is chosen by --preset or at the top of a recipe")
    return from_builtins(raw)


def _recipe_tables(recipe: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all presets share, and the [for.PRESET] tables."""
    tables = read_toml(recipe)
    special = tables.pop("for", {})
    if not isinstance(special, dict) or not all(isinstance(v, dict) for v in special.values()):
        raise ConfigError(f"key for in {recipe}: holds one table per preset, such as [for.diloco.protocol]")
    for name in special:
        preset(name)
    return tables, special


def recipe_for(recipe: Path, preset_name: str) -> dict[str, Any]:
    """A recipe's own keys, those of [for.PRESET] laid over."""
    tables, special = _recipe_tables(recipe)
    for key, value in special.get(preset_name, {}).items():
        tables[key] = tables.get(key, {}) | value if isinstance(value, dict) else value
    return tables


def changed(config: Config, assignments: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> Config:
    """A complete config with some of its keys laid over."""
    raw = msgspec.to_builtins(config)
    for layer in (overrides or {}, *map(parse_assignment, assignments)):
        _lay_over(raw, layer, "")
    return from_builtins(raw)


def from_builtins(raw: Any) -> Config:
    """Build and check a Config from plain values; every refusal names the key, the value and what would be right."""
    for key, value in _numbers(raw, ""):
        if not math.isfinite(value):
            raise ConfigError(f"key {key} = {value}: must be a finite number")
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    return _resolved(config)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, float):
        yield path, value


def _lay_over(base: dict[str, Any], layer: Mapping[str, Any], path: str) -> None:
    for key, value in layer.items():
        where = f"{path}{key}"
        free = path == "model.numbers."
        if key not in base and not free:
            close = difflib.get_close_matches(key, list(base), n=1)
            hint = f"did you mean {path}{close[0]}?" if close else f"here there are {', '.join(base)}"
            raise ConfigError(f"key {where} = {value!r}: no such key; {hint}")
        if isinstance(base.get(key), dict) != isinstance(value, Mapping):
            raise ConfigError(f"key {where} = {value!r}: " + (
                "is a section, give its keys" if isinstance(base.get(key), dict) else "is a single value, not a section"
            ))  # fmt: skip
        if isinstance(value, Mapping):
            _lay_over(base[key], value, f"{where}.")
        else:
            base[key] = value


def _explain(error: str, raw: Any) -> str:
    """msgspec says what would be right and where; the user also wants to see the value."""
    what, _, where = error.partition(" - at ")
    path = where.strip("`").removeprefix("$.").replace("[...]", "")
    value, kind = raw, Config
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(part)
            kind = get_type_hints(kind).get(part, kind) if isinstance(kind, type) else kind
        elif isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
    if "matching regex" in what:
        what = "must be fp32, bf16, int8, int4, int2, int1, e3m0, top_k:SHARE or random_drop:SHARE with a share up to 1"
    if what.startswith("Invalid enum value"):
        what = "must be one of " + ", ".join(_choices(kind))
    return f"key {path or '(top)'} = {value!r}: {what[0].lower()}{what[1:]}"


def _choices(kind: Any) -> list[str]:
    """What a type admits, in words: literals by value, unions flattened."""
    if get_origin(kind) is Literal:
        return [repr(choice) for choice in get_args(kind)]
    if get_args(kind):
        return [word for part in get_args(kind) for word in _choices(part)]
    return ["a whole number"] if kind is int else []


def _resolved(config: Config) -> Config:
    protocol = config.protocol
    if protocol.fragmentation == "whole" and protocol.fragments != 1:
        protocol = msgspec.structs.replace(protocol, fragments=1)
    if protocol.fragments == 0:
        protocol = msgspec.structs.replace(protocol, fragments=_layer_fragments(config))
    config = msgspec.structs.replace(config, protocol=protocol)
    for wrong, sentence in _cross_checks(config):
        if wrong:
            raise ConfigError(sentence)
    return config


def _layer_fragments(config: Config) -> int:
    layers = config.model.numbers.get("layers", 4 if config.model.name in ("decoder", "vlm") else None)
    if config.protocol.fragmentation != "layer" or layers is None:
        raise ConfigError(
            "key protocol.fragments = 0: can be derived only with fragmentation = 'layer' and model.numbers.layers; give a number"
        )
    return math.ceil(int(layers) / config.protocol.layers_per_fragment) + 1


def _cross_checks(c: Config) -> list[tuple[bool, str]]:
    p, o = c.protocol, c.outer
    exact_all = p.quorum == ALL and p.adopt == "exact"
    return [
        (p.overlap >= p.local_steps_per_round and p.anchor != "round_start" and p.overlap > 0,
         f"key protocol.overlap = {p.overlap}: must be below protocol.local_steps_per_round = {p.local_steps_per_round}"),
        (p.anchor == "round_start" and p.overlap != p.local_steps_per_round,
         f"key protocol.anchor = 'round_start': is the one-round delay and needs protocol.overlap = "
         f"protocol.local_steps_per_round = {p.local_steps_per_round}, not {p.overlap}"),
        (p.anchor == "round_start" and not (exact_all and p.fragmentation == "whole"),
         "key protocol.anchor = 'round_start': needs quorum = 'all', adopt = 'exact' and fragmentation = 'whole'"),
        (p.adopt == "exact" and p.quorum != ALL and int(p.quorum) < c.learners,
         f"key protocol.adopt = 'exact': makes learners wait, which only quorum = 'all' (or {c.learners}) may; got {p.quorum}"),
        (p.adopt == "arrival" and p.overlap == 0,
         "key protocol.overlap = 0: adoption on arrival needs at least 1 (a result takes time to come back)"),
        (p.quorum != ALL and int(p.quorum) > c.learners,
         f"key protocol.quorum = {p.quorum}: must be 'all' or at most learners = {c.learners}"),
        (bool(p.overlap_by_learner) and (p.adopt != "exact" or len(p.overlap_by_learner) != c.learners),
         f"key protocol.overlap_by_learner = {p.overlap_by_learner}: needs adopt = 'exact' and {c.learners} numbers"),
        (any(t >= p.local_steps_per_round for t in p.overlap_by_learner),
         f"key protocol.overlap_by_learner = {p.overlap_by_learner}: each must be below H = {p.local_steps_per_round}"),
        (bool(c.data.end_of_document) and c.data.tokenizer in ("bytes", "bpe"),
         f"key data.end_of_document = {c.data.end_of_document!r}: is of a Hugging Face tokenizer; leave it empty here"),
        (bool(c.data.samples_by_learner) and len(c.data.samples_by_learner) != c.learners,
         f"key data.samples_by_learner = {c.data.samples_by_learner}: must be empty or hold {c.learners} numbers"),
        (p.contribution == "gradient" and not (p.local_steps_per_round == 1 and p.overlap == 0 and exact_all),
         "key protocol.contribution = 'gradient': needs local_steps_per_round = 1, overlap = 0, quorum = 'all', adopt = 'exact'"),
        ((p.contribution == "gradient") != (o.outer_optimizer == "inner"),
         f"key outer.outer_optimizer = {o.outer_optimizer!r}: 'inner' and protocol.contribution = 'gradient' go together"),
        (p.ramp > 0 and p.adopt != "arrival",
         f"key protocol.ramp = {p.ramp}: shortens the intervals of adopt = 'arrival' runs; this preset is synchronous already"),
        (p.fragments > 1 and p.fragmentation == "whole", "key protocol.fragments: fragmentation = 'whole' has one fragment"),
        (p.lead == 0 and p.adopt == "arrival",
         "key protocol.lead = 0: would make adoption on arrival wait at every step; use -1, or at least 1"),
        (p.lead >= 0 and p.adopt == "exact" and p.lead != p.overlap,
         f"key protocol.lead = {p.lead}: exact adoption leads by overlap = {p.overlap}; leave it at -1"),
        (p.error_feedback and p.codec_up == "fp32", "key protocol.error_feedback = true: fp32 leaves no error to feed back"),
        (p.stochastic_rounding and p.codec_up not in ("int8", "int4", "int2", "e3m0"),
         f"key protocol.stochastic_rounding = true: needs int8, int4, int2 or e3m0 as codec_up, not {p.codec_up!r}"),
        (c.learners > c.limits.members_max, f"key learners = {c.learners}: above limits.members_max = {c.limits.members_max}"),
    ]  # fmt: skip


def warnings(c: Config) -> list[str]:
    """Allowed, but not what the papers do: each a sentence for the user."""
    p, found = c.protocol, []
    h = p.local_steps_per_round
    first = next((k * h // p.fragments for k in range(1, p.fragments) if k * h // p.fragments), h)
    if first > c.outer_steps and p.ramp == 0:
        found.append(f"outer_steps = {c.outer_steps}: ends before anything is due (first at {first}), so nothing will be merged")
    if c.outer.apply_outer_optimizer_to == "all_floating":
        found.append("outer.apply_outer_optimizer_to = 'all_floating' gives buffers outer momentum: an experiment, not DiLoCo")
    if not c.inner.preserve_optimizer_state:
        found.append("inner.preserve_optimizer_state = false restarts the inner optimiser on adoption: not faithful DiLoCo")
    if p.quorum == 1 and c.learners > 1 and p.grace == "none" and p.pace == 0:
        found.append("quorum = 1 without grace and with pace 0 merges about one learner a round: quality suffers")
    if p.overlap > 5 and p.anchor != "round_start":
        found.append(f"protocol.overlap = {p.overlap}: above 5 brings no utilisation and costs quality")
    if p.freeze_not_due:
        found.append("protocol.freeze_not_due = true trains only what is due next (FedPart): known to be far worse")
    if p.codec_up.partition(":")[0] in ("top_k", "random_drop"):
        found.append(f"protocol.codec_up = {p.codec_up!r} drops values: an ablation, known to be worse than int4")
    if p.contribution == "weights" and c.inner.optimizer == "SGD" and p.local_steps_per_round > 1:
        found.append("inner.optimizer = 'SGD': DiLoCo is defined with AdamW inside")
    return found
