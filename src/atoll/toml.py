"""TOML in and out: recipes, configs, and the key=value of --set."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import ConfigError


def read_toml(path: Path, what: str = "recipe") -> dict[str, Any]:
    """`what` it is to whoever wrote it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path}: cannot be read as UTF-8 text ({error})") from None
    except (ValueError, RecursionError) as error:  # the parser lets through what Python says of endless numbers and lists
        raise ConfigError(f"{what} {path}: not valid TOML: {error}") from None


def to_toml(config: msgspec.Struct) -> str:
    """The complete config as TOML that `atoll train` accepts. msgspec writes it with the package tomli-w."""
    return msgspec.toml.encode(config).decode()


def parse_assignment(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: must be key=value, such as protocol.overlap=2")
    try:
        found = tomllib.loads(f"v = {value}")
    except (ValueError, RecursionError):
        found = {"v": value.strip()}  # a bare word is a string: --set protocol.merge=mean
    if len(found) > 1:  # more lines, with more keys or sections in them
        raise ConfigError(f"--set {text!r}: sets more than {key}; give one --set for each key")
    parsed: Any = found["v"]
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return {str(k): v for k, v in parsed.items()}
