"""`atoll export`: a run's outer parameters for other programs: Hugging Face's transformers, or torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import PluginOption
from atoll.cli.shared import RunArgument, err, out
from atoll.errors import UserError
from atoll.tape.folder import find_run


def export(
    run: RunArgument,
    hf: Annotated[
        Path | None, typer.Option("--hf", metavar="DIR", help="A new folder for config, weights and tokenizer, for transformers.")
    ] = None,
    dcp: Annotated[
        Path | None,
        typer.Option("--dcp", metavar="DIR", help="A new folder for the weights, in torch.distributed.checkpoint's format."),
    ] = None,
    allow_plugin: PluginOption = None,
) -> None:
    """Write a run's model for other programs.

    --hf: a Hugging Face folder, Qwen3, or Qwen3-MoE with experts. transformers loads it without Atoll.
    --dcp: the tensors by their names, of any model. torch.distributed.checkpoint loads it at any layout, as torchtitan does."""
    from atoll.executor.merging import remerge_for
    from atoll.tasks.trained import export_dcp, export_hf, open_to_export

    folder = find_run(run).folder
    if hf is not None and dcp is None:
        trained = open_to_export(folder, remerge_for)
        early, written = trained.early, export_hf(trained, hf)
    elif dcp is not None and hf is None:
        early, written = export_dcp(folder, dcp, remerge_for)
    else:
        raise UserError("export: give --hf DIR or --dcp DIR, one of the two")
    if early:
        err.print(f"warning: {early}", style="yellow", soft_wrap=True)
    for path in written:
        out.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)
