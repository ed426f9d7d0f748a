"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KeysOption = Annotated[Path | None, typer.Option("--keys", help="Folder with certificates, made by `atoll keys`: mutual TLS.")]


AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow-model", help="package.module:function that a recipe may name as its model. Repeatable."),
]



def _load_plugins(names: list[str] | None) -> list[str] | None:
    if names:
        from atoll.extend import load_plugins  # imports torch, which takes seconds

        load_plugins(names)
    return names


PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-plugin", callback=_load_plugins,
        help="A Python file or module of your own that registers codecs or merges. Repeatable; every process of a run needs it.",
    ),
]  # fmt: skip
ObeyOption = Annotated[bool, typer.Option("--obey-stdin", hidden=True, help="Of a launcher: end when it does.")]


InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Talk in the clear on an address others can reach. Tokens are still asked for.")
]


DeviceOption = Annotated[
    str, typer.Option("--device", help="Where learners train: cpu, cuda, ...; with --virtual they share it.")
]
