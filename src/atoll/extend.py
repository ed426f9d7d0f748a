"""Plugins: a user's own codecs and merges. A plugin file calls `atoll.register_codec` or `atoll.register_merge` when it is
imported; every process of a run that needs it is started with `--allow-plugin FILE`.

No code comes from the network: a process imports only the plugins that its own command line names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.codecs import register_codec
from atoll.config.codecs import CodecSpec
from atoll.config.merges import MergeSpec
from atoll.errors import ConfigError
from atoll.tensors.merge import register_merge

__all__ = ["CodecSpec", "MergeSpec", "load_plugins", "loaded_plugins", "register_codec", "register_merge"]


_loaded: list[str] = []


def loaded_plugins() -> tuple[str, ...]:
    """The plugins of this process, which it passes to the processes that it starts."""
    return tuple(_loaded)


def load_plugins(names: Sequence[str]) -> None:
    """Imports each name: a Python file, or a module."""
    for name in names:
        try:
            if name.endswith(".py"):
                _load_file(Path(name))
            else:
                importlib.import_module(name)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"--allow-plugin {name}: cannot be imported ({type(error).__name__}: {error})") from error
        absolute = str(Path(name).resolve()) if name.endswith(".py") else name
        if absolute not in _loaded:
            _loaded.append(absolute)


def _load_file(path: Path) -> None:
    module_name = f"atoll_plugin_{path.stem}"
    if getattr(sys.modules.get(module_name), "__file__", None) == str(path.resolve()):
        return
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--allow-plugin {path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
