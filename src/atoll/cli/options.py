"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="Folder with certificates that `atoll keys` made: mutual TLS. Default: no TLS."),
]

AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model", metavar="NAME", help="A function of yours, package.module:function, that may make the model. Repeatable."
    ),
]



def _load_plugins(names: list[str] | None) -> list[str] | None:
    if names:
        from atoll.extend import load_plugins  # imports torch, which takes seconds

        load_plugins(names)
    return names


PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-plugin", metavar="NAME", callback=_load_plugins,
        help="A Python file or module of yours that registers codecs or merges. Repeatable; every process of a run needs it.",
    ),
]  # fmt: skip
RanksOption = Annotated[
    int,
    typer.Option("--ranks", min=1, max=1024, help="Processes of one learner on its machine, each with its part of every batch."),
]
ParallelOption = Annotated[
    Literal["ddp", "fsdp2", "hsdp"],
    typer.Option(
        "--parallel", metavar="ddp|fsdp2|hsdp",
        help="What ranks hold: the whole model each, a part of every tensor each, or such parts in several groups of ranks.",
    ),
]
ObeyOption = Annotated[bool, typer.Option("--obey-stdin", hidden=True, help="For launchers: end when standard input ends.")]


ShardsOption = Annotated[
    int | None,
    typer.Option(
        "--shards", min=1, max=256,
        help="Processes that merge and store, each a stripe of every fragment. Default: the syncer itself, or as --dir has.",
    ),
]  # fmt: skip


InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Allow connections without TLS beyond this machine. Join tokens are still required.")
]

DeviceOption = Annotated[
    str, typer.Option("--device", help="Where learners train: cpu, cuda, cuda:1, ...; with --virtual all of them on one.")
]

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics-at", metavar="HOST:PORT",
        help="Serve Prometheus metrics at http://HOST:PORT/metrics; port 0: any. Beyond this machine it needs --keys or "
        "--metrics-token. Default: none.",
    ),
]  # fmt: skip
MetricsTokenOption = Annotated[
    Path | None,
    typer.Option("--metrics-token", metavar="FILE", help="A file with the bearer token that --metrics-at then asks for."),
]

QuietOption = Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only, no progress.")]
