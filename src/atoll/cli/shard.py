"""`atoll shard`: one of the processes that merge for a syncer, on a machine of its own or started by the syncer."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.building import log_to_stderr
from atoll.cli.options import ObeyOption, QuietOption
from atoll.errors import UserError


def shard(
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for its stripes. Started again there, it goes on.")
    ],
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where the syncer dials it; port 0 takes a free one.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Folder with ca.pem and the certificate of this shard.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Which certificate of --keys to use, as in shard-0. Default: the only one.")
    ] = None,
    obey_stdin: ObeyOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run one shard of a syncer: it merges and stores its stripe of every fragment, on a machine of its own.

    `atoll syncer --shard-at HOST:PORT` dials it. Shards on the syncer's own machine need no command: `atoll syncer --shards N`
    starts them."""
    from atoll.cli.syncer import end_with_stdin
    from atoll.executor.environment import use_threads
    from atoll.runtime.shards.process import KEY_FILE, ShardServer
    from atoll.transport import raise_open_files_limit, server_credentials
    from atoll.transport.keys import load_shard, split_address

    log_to_stderr(verbose=not quiet and listen is not None)
    use_threads(1)
    raise_open_files_limit()  # a connection of every learner ends in a shard of the syncer's own machine
    if listen is None:
        path = directory / KEY_FILE
        if not path.is_file():
            raise UserError("--listen: is missing; give HOST:PORT, where `atoll syncer --shard-at` will dial this shard")
        server = ShardServer(directory, ("127.0.0.1", 0), path.read_text("utf8"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the syncer ends its shards when it has stored
    else:
        if keys is None:
            raise UserError(f"--listen {listen}: give --keys DIR with a certificate of `atoll keys --shards`")
        found = load_shard(keys, name)
        for warning in found.warnings:
            logging.getLogger("atoll.shard").warning(warning)
        tls = server_credentials(found.certificate, found.key, found.ca).bulk
        server = ShardServer(directory, split_address(listen), tls=tls)
        logging.getLogger("atoll.shard").info("this shard listens on %s; its stripes are in %s", server.address, directory)
    if obey_stdin:
        end_with_stdin(lambda: os.kill(os.getpid(), signal.SIGTERM))
    server.serve()
