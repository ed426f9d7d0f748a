"""`atoll keys`: certificates and join tokens."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.shared import out
from atoll.errors import UserError


def make_keys_command(directory: Path, learners: int | None, days: int, add: bool, shards: int) -> list[Path]:
    from atoll.transport.keys import add_learner, add_shard, make_keys

    if not add:
        return make_keys(directory, learners=1 if learners is None else learners, days=days, shards=shards)
    more = learners if learners is not None else 0 if shards else 1
    added = [path for _ in range(more) for path in add_learner(directory, days=days)]
    return added + [path for _ in range(shards) for path in add_shard(directory, days=days)]


def make_token_command(directory: Path, run: str, hours: float) -> str:
    from atoll.transport.keys import JoinTokens

    return JoinTokens.load(directory).make(run=run, expires=datetime.now(UTC) + timedelta(hours=hours))


def revoke_command(directory: Path, names: list[str]) -> list[str]:
    from atoll.transport.revoked import revoke

    return [revoke(directory, name) for name in names]


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for certificates, keys and the join token.")],
    learners: Annotated[
        int | None, typer.Option("--learners", min=1, max=4096, help="Number of learner certificates to make. Default: 1.")
    ] = None,
    shards: Annotated[
        int, typer.Option("--shards", min=0, max=256, help="Number of certificates for shards on machines of their own.")
    ] = 0,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="Days that the certificates are valid.")] = 365,
    add: Annotated[bool, typer.Option("--add", help="Add certificates to the authority in DIR.")] = False,
    token: Annotated[bool, typer.Option("--token", help="Only print a new join token of the authority in DIR.")] = False,
    run: Annotated[str, typer.Option("--run", help="With --token: the run that it is for. Default: any run.")] = "*",
    hours: Annotated[float, typer.Option("--hours", min=0.01, max=87600, help="With --token: hours that it is valid.")] = 24.0,
    revoke: Annotated[
        list[str] | None,
        typer.Option("--revoke", metavar="NAME", help="Admit this certificate, or file with a token, no more. Repeatable."),
    ] = None,
) -> None:
    """Make a certificate authority, certificates for the syncer, the learners and shards, and a join token.

    Copy to each machine only its own files: the syncer's, or one learner's and the token, or one shard's. --revoke writes to the
    list `revoked` in DIR; a syncer that runs with this folder reads it within seconds."""
    if revoke:
        if not directory.is_dir():
            raise UserError(f"DIR {directory}: there is no such folder; name the one that the syncer has as --keys, or its --dir")
        for line in revoke_command(directory, revoke):
            out.print(f"revoked: {line}")
        return
    if token:
        typer.echo(make_token_command(directory, run, hours))
        return
    for path in make_keys_command(directory, learners, days, add, shards):
        out.print(path)
