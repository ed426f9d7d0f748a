"""`atoll watch`: see what happens in a run, on a page of this machine or in the terminal."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.bars import Bars
from atoll.cli.progress import Paced
from atoll.cli.shared import err, out
from atoll.errors import UserError
from atoll.tape.folder import find_run

if TYPE_CHECKING:
    from atoll.runtime.watch.source import WatchedRun

INDEX = "building the run's index"
InsecurePage = Annotated[
    bool, typer.Option("--insecure", help="Serve the page beyond this machine, without TLS; its token travels in the clear.")
]
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where the page is served. Port 0: any that is free.")
]


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN|URL", help="A run: its folder or its tape. Or the address of a page.")],
    text: Annotated[bool, typer.Option("--text", help="In this terminal, without a page; plain lines in a pipe.")] = False,
    listen: ListenOption = "127.0.0.1:0",
    insecure: InsecurePage = False,
) -> None:
    """Show a run, live or finished: rounds and why each closed, learners, links, tokens, faults and losses.

    It serves a page on this machine and prints its address, whose token nobody else has. Ctrl-C ends it; the run goes on. The
    address of a page in place of a run is shown as text."""
    from atoll.runtime.watch.server import PageThread
    from atoll.runtime.watch.source import WatchedRun
    from atoll.runtime.watch.text import RemoteRun, show_text

    if run.startswith(("http://", "https://")):
        with suppress(KeyboardInterrupt):
            show_text(RemoteRun(run), out)
        return
    host, port = listen_address(listen, insecure)
    watched = WatchedRun(find_run(Path(run)))
    try:
        with suppress(KeyboardInterrupt):
            _prepare(watched)
            if text:
                show_text(watched, out)
                return
            page = PageThread(watched, host=host, port=port)
            out.print(f"watch this run at {page.url}", soft_wrap=True)
            err.print("Ctrl-C ends the page; the run does not depend on it", soft_wrap=True)
            try:
                threading.Event().wait()
            finally:
                page.close()
    finally:
        watched.close()


def listen_address(listen: str, insecure: bool) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {listen}: must be HOST:PORT, such as 127.0.0.1:8080; port 0 is any that is free")
    host = host.strip("[]")
    if host not in ("127.0.0.1", "localhost", "::1") and not insecure:
        tunnel = "ssh -L 8080:127.0.0.1:8080 MACHINE reaches a page on 127.0.0.1 safely"
        raise UserError(f"--listen {listen}: the page has no TLS, so others could read its token; {tunnel}, or give --insecure")
    return host, int(port)


def _prepare(watched: WatchedRun) -> None:
    """Builds the index where it is missing: with a bar on a terminal, and lines at a bounded rate elsewhere."""
    if not err.is_terminal:
        paced = Paced(lambda line: err.print(line, soft_wrap=True))
        watched.prepare(lambda records, step, total: paced(lambda: f"index: step {step} of {total}, {records:,} records"))
        return
    with Bars(err) as bars:
        watched.prepare(lambda records, step, total: bars.update(INDEX, step, total, "steps"))
        bars.end(INDEX)
