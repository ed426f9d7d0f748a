"""`atoll export`: a run's outer parameters as a folder that Hugging Face's transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import PluginOption
from atoll.cli.shared import err, out


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of `atoll train`.")],
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="A new folder: config, weights and tokenizer.")],
    allow_plugin: PluginOption = None,
) -> None:
    """Write a run's model as Hugging Face's Qwen3 (with experts Qwen3-MoE), which needs no code of ours to load."""
    from atoll.tasks.trained import export_hf, open_to_export

    trained = open_to_export(run)
    if trained.early:
        err.print(f"warning: {trained.early}", style="yellow", soft_wrap=True)
    for path in export_hf(trained, hf):
        out.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)
