"""From recipes, presets and `--set` to a checked `Config`. Every error names the key, the value and the remedy."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from atoll.config.checks import contradictions
from atoll.config.codecs import is_codec, known_codecs
from atoll.config.merges import MERGES, known_merges
from atoll.config.models import check_model, resolved_model, with_size
from atoll.config.placement import SECTION, of_placement, placement_of
from atoll.config.presets import PRESETS, preset
from atoll.config.renamed import GONE, RENAMED
from atoll.config.sections import Config, Inner
from atoll.errors import ConfigError
from atoll.toml import parse_assignment, read_toml


def load(
    recipe: Path | None = None,
    *,
    preset_name: str | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Preset, then the recipe's keys, then its [for.PRESET] keys, then overrides and --set: the later wins. Some settings of a
    preset depend on the inner optimiser that these layers choose."""
    tables, special = _recipe_tables(recipe) if recipe is not None else ({}, {})
    _take_placement(tables)
    assignments = [text for text in assignments if not of_placement(text)]
    own = tables.get("preset")
    chosen = preset_name or tables.get("preset", "decoupled")
    if not isinstance(chosen, str):
        raise ConfigError(f"preset = {chosen!r}: must be one of {', '.join(PRESETS)}")
    tables["preset"] = chosen
    layers = [tables, special.get(chosen, {}), overrides or {}, *_sizes_first(assignments)]
    optimizer = _chosen_optimizer(layers)
    raw = msgspec.to_builtins(preset(chosen, optimizer))
    if isinstance(own, str) and own in PRESETS and own != chosen:
        _refuse_new_name(recipe, (own, chosen), tables, special, optimizer)
    for layer in layers:
        _lay(raw, layer)
    if raw["preset"] != chosen:
        raise ConfigError(f"key preset = {raw['preset']!r}: a preset is chosen by --preset or at the top of a recipe")
    return from_builtins(raw)


def _take_placement(tables: dict[str, Any]) -> None:
    """A recipe that says where its learners go has said how many there are."""
    placed = sum(group.count for group in placement_of(tables.pop(SECTION, {})).learners)
    if placed and tables.setdefault("learners", placed) != placed:
        raise ConfigError(f"key learners = {tables['learners']}: the groups of [{SECTION}] have {placed}; leave one of them out")


def _refuse_new_name(
    recipe: Path | None, names: tuple[str, str], tables: Mapping[str, Any], special: Mapping[str, Any], optimizer: str
) -> None:
    """A recipe's keys override a preset's. So if a recipe sets every key in which two presets differ, as a run's own config.toml
    does, another preset would train the same under another name."""
    trained = []
    for name in names:
        raw = msgspec.to_builtins(preset(name, optimizer))
        for layer in (tables, special.get(name, {})):
            _lay(raw, layer)
        trained.append(raw | {"preset": names[1]})
    if trained[0] == trained[1]:
        raise ConfigError(
            f"preset = {names[1]!r}: {recipe} is for preset {names[0]!r} and sets every key in which they differ, as the config "
            f"that a run writes does, so only the name would change; give the recipe that the run was started with"
        )


def _chosen_optimizer(layers: Sequence[Mapping[str, Any]]) -> str:
    """Runs before any check: values of a wrong type are refused later, in `_lay_over`."""
    inner = [layer["inner"] for layer in layers if isinstance(layer.get("inner"), Mapping)]
    return str(next((section["optimizer"] for section in reversed(inner) if "optimizer" in section), Inner().optimizer))


def _recipe_tables(recipe: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys for all presets, and the [for.PRESET] tables."""
    tables = read_toml(recipe)
    special = tables.pop("for", {})
    if not isinstance(special, dict) or not all(isinstance(v, dict) for v in special.values()):
        raise ConfigError(f"key for in {recipe}: must have one table per preset, such as [for.diloco.protocol]")
    for name in special:
        preset(name)
    return tables, special


def recipe_for(recipe: Path, preset_name: str) -> dict[str, Any]:
    """A recipe's own keys, overridden by those of [for.PRESET]."""
    tables, special = _recipe_tables(recipe)
    _take_placement(tables)
    for key, value in special.get(preset_name, {}).items():
        tables[key] = tables.get(key, {}) | value if isinstance(value, dict) else value
    return tables


def changed(config: Config, assignments: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> Config:
    """A complete config with some keys changed."""
    raw = msgspec.to_builtins(config)
    for layer in (overrides or {}, *_sizes_first(assignments)):
        _lay(raw, layer)
    return from_builtins(raw)


def from_builtins(raw: Any) -> Config:
    """Builds and checks a Config from plain values. Every error names the key, the value and the remedy."""
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


def _sizes_first(assignments: Sequence[str]) -> list[dict[str, Any]]:
    """A number in one --set overrides a size in another, in either order, because the number is more specific."""
    return sorted(map(parse_assignment, assignments), key=lambda layer: not _size_in(layer))


def _size_in(layer: Mapping[str, Any]) -> object:
    model = layer.get("model")
    return model.get("size") if isinstance(model, Mapping) else None


def _lay(raw: dict[str, Any], layer: Mapping[str, Any]) -> None:
    if size := _size_in(layer):
        raw["model"]["numbers"] = with_size(raw["model"]["numbers"], size)
    _lay_over(raw, layer, "")


def _lay_over(base: dict[str, Any], layer: Mapping[str, Any], path: str) -> None:
    for key, value in layer.items():
        where = f"{path}{key}"
        free = path == "model.numbers."
        if where in RENAMED:
            raise ConfigError(f"key {where} = {value!r}: was renamed to {RENAMED[where]}; write {RENAMED[where]} = {value!r}")
        if where in GONE:
            raise ConfigError(f"key {where} = {value!r}: was removed; {GONE[where]}")
        if key not in base and not free:
            close = difflib.get_close_matches(key, list(base), n=1)
            hint = f"did you mean {path}{close[0]}?" if close else f"use one of {', '.join(base)}"
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
    """msgspec names the place and the expected type; this adds the value."""
    what, _, where = error.partition(" - at ")
    path = where.strip("`").removeprefix("$.").replace("[...]", "")
    value, kind = raw, Config
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(part)
            kind = get_type_hints(kind).get(part, kind) if isinstance(kind, type) else kind
        elif isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
    if what.startswith("Invalid enum value"):
        what = "must be one of " + ", ".join(_choices(kind))
    return f"key {path or '(top)'} = {value!r}: {what[0].lower()}{what[1:]}"


def _choices(kind: Any) -> list[str]:
    """The values of a type, in words: literals by value, unions flattened."""
    if get_origin(kind) is Literal:
        return [repr(choice) for choice in get_args(kind)]
    if get_args(kind):
        return [word for part in get_args(kind) for word in _choices(part)]
    return ["a whole number"] if kind is int else []


def _resolved(config: Config) -> Config:
    size, numbers = resolved_model(config.model)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, size=size, numbers=numbers))
    protocol = config.protocol
    if protocol.fragmentation == "whole" and protocol.fragments != 1:
        protocol = msgspec.structs.replace(protocol, fragments=1)
    if protocol.fragments == 0:
        protocol = msgspec.structs.replace(protocol, fragments=_layer_fragments(config))
    outer = msgspec.structs.replace(config.outer, delay=config.outer.delay or config.learners)
    config = msgspec.structs.replace(config, protocol=protocol, outer=outer)
    _check_tables(config)
    for wrong, sentence in contradictions(config):
        if wrong:
            raise ConfigError(sentence)
    check_model(config)
    return config


def _check_tables(config: Config) -> None:
    """Users may add rows to the tables of codecs and merges, so no type can list their names."""
    p = config.protocol
    for key, value, known, choices in (
        ("codec_up", p.codec_up, is_codec, known_codecs()), ("codec_down", p.codec_down, is_codec, known_codecs()),
        ("merge", p.merge, MERGES.__contains__, known_merges()),
        ("embedding_merge", p.embedding_merge, MERGES.__contains__, known_merges()),
    ):  # fmt: skip
        if not known(value):
            raise ConfigError(f"key protocol.{key} = {value!r}: must be {choices}, or one that --allow-plugin FILE registers")


def _layer_fragments(config: Config) -> int:
    layers = config.model.numbers.get("layers", 4 if config.model.name in ("decoder", "vlm") else None)
    if config.protocol.fragmentation != "layer" or layers is None:
        raise ConfigError(
            "key protocol.fragments = 0: can be derived only with fragmentation = 'layer' and model.numbers.layers; give a number"
        )
    return math.ceil(int(layers) / config.protocol.layers_per_fragment) + 1
