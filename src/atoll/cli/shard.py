"""`atoll shard`: one of the processes that merge for a syncer, which starts it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.building import log_to_stderr
from atoll.cli.options import ObeyOption
from atoll.errors import UserError


def shard(
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of its stripes; holds the file `key`.")],
    obey_stdin: ObeyOption = False,
) -> None:
    """Run one shard of a syncer. `atoll syncer --shards` starts as many as it needs, and again if they end."""
    from atoll.cli.syncer import end_with_stdin
    from atoll.executor.environment import use_threads
    from atoll.runtime.shards.process import KEY_FILE, ShardServer

    log_to_stderr(verbose=False)
    use_threads(1)
    path = directory / KEY_FILE
    if not path.is_file():
        raise UserError(f"--dir {directory}: has no file {KEY_FILE}; `atoll syncer --shards` writes it and starts its shards")
    server = ShardServer(directory, ("127.0.0.1", 0), path.read_text("utf8"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the syncer ends its shards when it has stored
    if obey_stdin:
        end_with_stdin(lambda: os.kill(os.getpid(), signal.SIGTERM))
    server.serve()
