"""`python -m atoll.cli.forkserver`: a local cluster's processes are forked from this one."""

from __future__ import annotations

from atoll.cli.app import main
from atoll.runtime.local.forked import serve


def import_workers() -> None:
    """Everything that a worker needs; torch's optimisers import more when the first one is built."""
    import torch

    import atoll.executor.learner
    import atoll.runtime.learner.process
    import atoll.runtime.syncer.process  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


if __name__ == "__main__":
    import_workers()
    serve(main)
