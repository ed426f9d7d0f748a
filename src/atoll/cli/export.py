"""`atoll export`: a run's outer parameters as a folder that Hugging Face's transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import PluginOption
from atoll.cli.shared import RunArgument, err, out
from atoll.tape.folder import find_run


def export(
    run: RunArgument,
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="A new folder for config, weights and tokenizer.")],
    allow_plugin: PluginOption = None,
) -> None:
    """Write a run's model as a Hugging Face folder: Qwen3, or Qwen3-MoE with experts. transformers loads it without Atoll."""
    from atoll.executor.merging import remerge_for
    from atoll.tasks.trained import export_hf, open_to_export

    trained = open_to_export(find_run(run).folder, remerge_for)
    if trained.early:
        err.print(f"warning: {trained.early}", style="yellow", soft_wrap=True)
    for path in export_hf(trained, hf):
        out.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)
