"""The entry point of `python -m atoll` and of the command `atoll`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Ctrl-C ends the process at once while modules are being imported: there is nothing to clean up yet, and an import may catch
    the exception as one of its own. Background jobs of a shell ignore SIGINT, and go on doing so."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from atoll.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
