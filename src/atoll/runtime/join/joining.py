"""`atoll.join` itself: refuses what cannot be a learner, and makes one of one rank or of several."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from atoll.runtime.join import checks
from atoll.runtime.join.learner import Learner
from atoll.runtime.join.ranked import RankedLearner
from atoll.runtime.learner.address import address_of
from atoll.runtime.learner.leaving import LeaveRequests, Notice
from atoll.runtime.metrics import metrics_at as served_at
from atoll.tensors.access import named_tensors
from atoll.transport.keys import load_learner


def join(
    syncer: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, token: str | Path | None = None,
    keys: str | Path | None = None, name: str | None = None, run: str = "", wants: int = -1, out: str | Path | None = None,
    listen: str = "127.0.0.1:0", advertise: str = "", insecure: bool = False, metrics_at: str | None = None,
    metrics_token: str | Path | None = None, leave_seconds: float | None = None,
    leave_file: str | Path | None = None, leave_when: Notice | None = None, rank_timeout_seconds: float = 300.0,
) -> Learner:  # fmt: skip
    """A learner of the run at `syncer`, to be used in a `with` statement. Raises UserError if this loop cannot be one.

    `syncer`: host:port, or file:PATH, a file that says so and is read anew for every connection.
    `token`: the join token, or the Path of a file with it; by default the one in `keys`, else ATOLL_TOKEN.
    `keys`: the folder with certificates that `atoll keys` made; by default ATOLL_KEYS. `name`: the certificate to use.
    `run`: join only this run. `wants`: the learner id to ask for. `out`: the folder for tape and snapshots.
    `listen`: where recovering peers are served, "" for nowhere; `advertise`: the address that they dial.
    `insecure`: allow an unencrypted connection to another machine.
    `metrics_at`: where to serve Prometheus metrics, with `metrics_token`, a file, to whoever shows the token in it.
    `leave_file`: leave when this file appears. `leave_when`: a function that returns None, and once this machine is to be taken
    away the seconds that are left; another thread calls it four times a second. `leave_seconds`: how long leaving may take where
    the request does not say; by default limits.leave_seconds of the run.

    Under torch.distributed all ranks of the process group are one learner, and every rank makes the same calls. The model is in
    DistributedDataParallel, or sharded by `fully_shard`. Rank 0 serves the metrics and heeds the requests to
    leave. `rank_timeout_seconds`: a rank that misses a call for so long takes the learner down.
    """
    plain = checks.unwrapped_model(model)
    inner = checks.unwrapped_optimizer(optimizer)
    several = checks.takes_several_ranks(model)
    checks.reshard(checks.sharded_modules(plain))
    tensors = named_tensors(plain)
    checks.device_of(tensors)
    checks.refuse_mismatched_optimizer(plain, tensors, inner)
    folder = Path(keys) if keys is not None else None
    address = address_of(syncer, token, folder, name, run, listen, advertise, insecure)
    at = served_at(
        metrics_at, Path(metrics_token) if metrics_token is not None else None,
        lambda: load_learner(folder, name) if folder is not None else None, dash="",
    )  # fmt: skip
    files = [Path(leave_file)] if leave_file is not None else []
    leaving = LeaveRequests(leave_seconds, files, leave_when, returns=out is not None)
    directory = Path(out) if out is not None else None
    if not several:
        return Learner(address, plain, inner, wants=wants, out=directory, metrics=at, leaving=leaving)
    return RankedLearner(
        address, plain, inner, wants=wants, out=directory, metrics=at, leaving=leaving, rank_timeout_seconds=rank_timeout_seconds
    )
