"""The parts of the reference that are generated from the code: config keys, presets and commands, as Markdown.

A page asks for a part by a line `<!-- generated: NAME -->`; `hooks.py` fills it in while the site is built, so it is
never stale. Nothing here needs mkdocs: the tests of the reference read the same functions.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import msgspec
import typer
from msgspec import inspect as kinds
from typer.models import ArgumentInfo, OptionInfo, ParamMeta
from typer.utils import get_params_from_function

from atoll.cli.app import app
from atoll.config import PRESETS, ClusterPlacement, Config, Group
from atoll.config.codecs import CODECS, wire_bits
from atoll.config.merges import MERGES
from atoll.views.metrics import LABEL_VALUES, METRICS

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def expand(markdown: str) -> str:
    """The page with every marker replaced by the part that it names."""
    return MARKER.sub(lambda found: PARTS[found[1]](), markdown)


# ---------------------------------------------------------------- config keys


class Key(NamedTuple):
    path: str
    """As `--set` takes it: with its section."""
    kind: str
    default: str
    doc: str


def config_keys(struct: type = Config, prefix: str = "") -> Iterator[Key]:
    """Every key of a config, sections after the keys that have none."""
    docs = field_docs(struct)
    fields = msgspec.structs.fields(struct)
    for field in sorted(fields, key=lambda f: _is_section(f.default)):
        if _is_section(field.default):
            yield from config_keys(type(field.default), f"{prefix}{field.name}.")
        else:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            yield Key(prefix + field.name, _kind(kinds.type_info(field.type)), toml(default), docs.get(field.name, ""))


def _is_section(default: Any) -> bool:
    return isinstance(default, msgspec.Struct)


@cache
def field_docs(struct: type) -> dict[str, str]:
    """Field name to the string that follows it in the class body, which Python itself throws away."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, doc in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return docs


def _kind(info: kinds.Type) -> str:
    """A type and its bounds in words."""
    match info:
        case kinds.LiteralType(values=values):
            return " or ".join(f"`{toml(value)}`" for value in sorted(values, key=str))
        case kinds.IntType() | kinds.FloatType():
            return ("whole number" if isinstance(info, kinds.IntType) else "number") + _bounds(info)
        case kinds.BoolType():
            return "`true` or `false`"
        case kinds.StrType():
            return "text"
        case kinds.UnionType(types=members):
            return " or ".join(_kind(member) for member in members)
        case kinds.TupleType(item_types=items):
            return f"list of {len(items)}: {_kind(items[0])}"
        case kinds.VarTupleType(item_type=item):
            return f"list, each {_kind(item)}"
        case kinds.DictType(value_type=value):
            return f"table, each {_kind(value)}"
        case kinds.StructType():
            return "table"
        case kinds.Metadata(type=inner):
            return _kind(inner)
    raise AssertionError(f"no words for {info}")


def _bounds(info: kinds.IntType | kinds.FloatType) -> str:
    low = f"from {_number(info.ge)}" if info.ge is not None else f"above {_number(info.gt)}" if info.gt is not None else ""
    high = f"to {_number(info.le)}" if info.le is not None else f"below {_number(info.lt)}" if info.lt is not None else ""
    return f" {low} {high}".rstrip() if low or high else ""


def _number(value: float | None) -> str:
    assert value is not None
    if abs(value) < 10_000:
        return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
    power = len(str(int(value))) - 1
    return f"10^{power}" if int(value) == 10**power else f"{int(value):,}"


def toml(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{}" if not value else repr(value)
    return f"{value:g}" if isinstance(value, float) and not float(value).is_integer() else str(value)


def config_reference() -> str:
    differing = preset_values()
    parts, section = [], None
    for key in config_keys():
        here = key.path.rpartition(".")[0]
        if here != section:
            section = here
            parts.append(f"## [{here}]\n\n{_section_doc(here)}\n" if here else "## Keys without a section\n")
        parts.append(f"### `{key.path}` {{ #{key.path} }}\n")
        parts.append(f"*{key.kind}; default* `{key.default}`{_in_presets(key, differing.get(key.path, {}))}\n")
        parts.append(f"{key.doc}\n")
    return "\n".join(parts)


def placement_reference() -> str:
    """[placement], whose groups of learners are a list of tables."""
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for struct, prefix in ((ClusterPlacement, "placement."), (Group, "placement.learners.")):
        for key in config_keys(struct, prefix):
            if key.path != "placement.learners":
                doc = key.doc.replace("|", "\\|").replace("\n", " ")
                rows.append(f"| `{key.path}` | {key.kind} | `{key.default}` | {doc} |")
    return "\n".join(rows)


def _section_doc(section: str) -> str:
    return inspect.cleandoc(type(getattr(Config(), section)).__doc__ or "")


def _in_presets(key: Key, by_preset: dict[str, str]) -> str:
    others = [f"{name} `{value}`" for name, value in by_preset.items() if value != key.default]
    return f"<br>presets: {', '.join(others)}" if others else ""


# ---------------------------------------------------------------- presets


@cache
def preset_values() -> dict[str, dict[str, str]]:
    """Key to its value by preset, for the keys in which presets differ."""
    flat = {name: dict(_flat(msgspec.to_builtins(make()), "")) for name, make in PRESETS.items()}
    keys = [key.path for key in config_keys() if key.path != "preset"]
    table = {key: {name: toml(values.get(key, {})) for name, values in flat.items()} for key in keys}
    return {key: values for key, values in table.items() if len(set(values.values())) > 1}


def _flat(value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{path}{name}.")
        else:
            yield path + name, inner


def preset_table() -> str:
    """Keys as rows, presets as columns; only keys in which presets differ."""
    names = list(PRESETS)
    lines = ["| key | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for key, values in preset_values().items():
        section, _, name = key.rpartition(".")
        page = "config.md"
        lines.append(f"| [`{name}`]({page}#{key}) | " + " | ".join(values[preset].strip('"') for preset in names) + " |")
        assert section in ("", "protocol", "outer", "inner"), f"presets differ in {key}: the table's text names other sections"
    return "\n".join(lines)


# ---------------------------------------------------------------- codecs and merges


def codec_table() -> str:
    """The rows of config/codecs.py."""
    lines = ["| codec | bits an element, with scales | block | lossless | stochastic rounding |", "|---|---|---|---|---|"]
    for spec in CODECS.values():
        part = spec.selects
        name, bits = (f"{spec.name}:SHARE", f"{spec.bits:g} x SHARE") if part else (spec.name, f"{wire_bits(spec.name):g}")
        lines.append(f"| `{name}` | {bits} | {spec.block or ''} | {_yes(spec.lossless)} | {_yes(spec.stochastic)} |")
    return "\n".join(lines)


def merge_table() -> str:
    """The rows of config/merges.py."""
    rows = [f"| `{spec.name}` | {spec.summary} |" for spec in MERGES.values()]
    return "\n".join(["| merge | what it is |", "|---|---|", *rows])


def _yes(value: bool) -> str:
    return "yes" if value else ""


# ---------------------------------------------------------------- commands


class Command(NamedTuple):
    name: str
    """With `atoll` and the names of its groups."""
    help: str
    parameters: tuple[ParamMeta, ...]


def commands(group: typer.Typer = app, prefix: str = "atoll") -> Iterator[Command]:
    """Every command that `--help` shows, read from the functions themselves: the classes between them and the shell are typer's
    own, and differ from version to version."""
    for info in group.registered_commands:
        assert info.callback is not None
        if not info.hidden:
            name = info.name or info.callback.__name__.replace("_", "-")
            text = inspect.cleandoc(info.help or info.callback.__doc__ or "")
            options = (p for p in get_params_from_function(info.callback).values() if p.annotation is not typer.Context)
            yield Command(f"{prefix} {name}", text, tuple(options))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{prefix} {inner.name}")


def command_reference() -> str:
    parts = []
    for command in commands():
        rows, positions = [], []
        for parameter in command.parameters:
            info = parameter.default
            assert isinstance(info, OptionInfo | ArgumentInfo), f"{command.name}: {parameter.name} has no help"
            if info.hidden:
                continue
            named = isinstance(info, OptionInfo)
            required = info.default is ...
            if named:
                shown = ", ".join(f"`{option}{_takes(parameter)}`" for option in _spellings(parameter, info))
            else:
                place = info.metavar or parameter.name.upper()
                positions.append(place if required else f"[{place}]")
                shown = f"`{place}`"
            rows.append(f"| {_cell(shown)} | {'required' if required else _default(info.default)} | {_cell(info.help or '')} |")
        usage = " ".join([command.name, *positions, "[OPTIONS]"])
        parts.append(f"## {command.name}\n\n{command.help}\n\n```\n{usage}\n```\n")
        if rows:
            parts.append("| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _spellings(parameter: ParamMeta, info: OptionInfo) -> list[str]:
    given = [name for name in info.param_decls or () if name.startswith("-")]
    return given or ["--" + parameter.name.replace("_", "-")]


def _takes(parameter: ParamMeta) -> str:
    """What follows the option; nothing where it is a switch."""
    kind = parameter.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    again = " ..." if get_origin(kind) is list else ""
    if again:
        kind = get_args(kind)[0]
    if kind is bool:
        return ""
    return f" {parameter.default.metavar or WORDS[kind]}{again}"


WORDS: dict[Any, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def _default(default: Any) -> str:
    return "" if default is None or default is False or default == "" else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


# ---------------------------------------------------------------- metrics


def metric_table() -> str:
    where = {"both": "syncer, learner"}
    rows = [
        f"| `{m.name}` | {m.kind.value} | {', '.join(f'`{label}`' for label in m.labels)} | {where.get(m.on, m.on)} | {m.help} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | type | labels | endpoint | what it is |", "|---|---|---|---|---|", *rows])


def label_table() -> str:
    return "\n".join(["| label | values |", "|---|---|", *(f"| `{name}` | {values} |" for name, values in LABEL_VALUES.items())])


PARTS: dict[str, Callable[[], str]] = {
    "config": config_reference,
    "placement": placement_reference,
    "presets": preset_table,
    "codecs": codec_table,
    "merges": merge_table,
    "commands": command_reference,
    "metrics": metric_table,
    "labels": label_table,
}
