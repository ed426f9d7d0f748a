"""Where `python -m atoll` and the command `atoll` begin."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Ctrl-C while modules are still being imported ends it at once: there is nothing yet to put away, and whoever is being
    imported might take an exception for one of its own. Shells have it ignored by what they run in the background."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from atoll.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
