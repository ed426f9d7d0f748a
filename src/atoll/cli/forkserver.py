"""`python -m atoll.cli.forkserver`: a local cluster's processes are forked from this one."""

from __future__ import annotations

from atoll.cli.app import main
from atoll.runtime.local.forked import serve

if __name__ == "__main__":
    serve(main)
