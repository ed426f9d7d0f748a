"""The reference is generated from the code: every config key and every command is in it, with words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from pages import DOCS, GENERATE, anchors_of, text_of
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.config import PRESETS, Config
from atoll.config.codecs import CODECS
from atoll.config.merges import MERGES
from atoll.views.metrics import METRICS


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Another walk than the generator's: over an instance, as a run's config.toml has it."""
    for name in value.__struct_fields__:
        inner = getattr(value, name)
        if isinstance(inner, msgspec.Struct):
            yield from keys_of(inner, f"{path}{name}.")
        else:
            yield path + name


KEYS = list(keys_of(Config()))


def test_every_config_key_is_in_the_reference() -> None:
    assert set(KEYS) <= anchors_of(text_of(DOCS / "reference" / "config.md"))


def test_every_config_key_has_a_type_a_default_and_a_docstring() -> None:
    keys = {key.path: key for key in GENERATE.config_keys()}
    assert sorted(keys) == sorted(KEYS)
    assert not [path for path, key in keys.items() if not (key.kind and key.default and key.doc.strip())]


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("protocol.overlap", "whole number from 0 to 10^9", "2"),
        ("protocol.quorum", 'whole number from 1 to 10^9 or `"all"`', "1"),
        ("outer.outer_momentum", "number from 0 below 1", "0.9"),
        ("protocol.adopt", '`"arrival"` or `"exact"`', '"arrival"'),
        ("inner.betas", "list of 2: number from 0 below 1", "[0.9, 0.95]"),
    ],
)
def test_bounds_and_defaults_are_those_of_the_code(path: str, kind: str, default: str) -> None:
    key = next(key for key in GENERATE.config_keys() if key.path == path)
    assert (key.kind, key.default) == (kind, default)


def test_every_preset_is_in_the_table_of_the_arithmetic() -> None:
    text = text_of(DOCS / "reference" / "arithmetic.md")
    header = next(line for line in text.splitlines() if line.startswith("| key |"))
    assert all(f"`{name}`" in header for name in PRESETS)
    assert set(PRESETS) <= anchors_of(text), "each preset has a section with its formulas"


def test_every_codec_and_merge_is_in_the_reference() -> None:
    text = text_of(DOCS / "reference" / "config.md")
    assert not [name for name in (*CODECS, *MERGES) if f"| `{name}` |" not in text and f"| `{name}:SHARE` |" not in text]


def test_every_metric_and_label_is_on_the_page_of_metrics() -> None:
    text = text_of(DOCS / "operations" / "metrics.md")
    assert not [metric.name for metric in METRICS if f"| `{metric.name}` | {metric.kind.value} |" not in text]
    assert not [label for metric in METRICS for label in metric.labels if f"| `{label}` |" not in text]


def shown_commands(path: tuple[str, ...] = ()) -> Iterator[str]:
    """As `--help` lists them: what a user sees, not what the generator walks."""
    text = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    _, found, listed = text.partition("Commands:\n")
    if not found:
        yield " ".join(("atoll", *path))
        return
    for line in listed.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            yield from shown_commands((*path, line.split()[0]))


def test_every_command_is_in_the_reference() -> None:
    commands = list(shown_commands())
    assert len(commands) >= 18
    assert sorted(commands) == sorted(command.name for command in GENERATE.commands())
    text = text_of(DOCS / "reference" / "commands.md")
    assert not [name for name in commands if f"## {name}\n" not in text]


def test_every_option_of_a_command_has_words() -> None:
    rows = [line for line in text_of(DOCS / "reference" / "commands.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if row.rstrip("| ").rsplit("|", 1)[-1].strip() in ("", "required")]
