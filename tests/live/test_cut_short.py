"""A live run that is cut by Ctrl-C: what it had stored is a model, and the commands that take it say how far it got."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run, small
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import UserError
from atoll.protocol.vocabulary import Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import ForkServer
from atoll.store.durable import DurableVersions
from atoll.tape.format import Record

NEVER_DUE = {"fragments": 1, "local_steps_per_round": 150}
"""Merges at the last step alone: however late the interrupt comes, it is before."""


def test_interrupted_run_is_evaluated_and_its_outer_step_told(tmp_path: Path) -> None:
    def interrupt(cluster: LocalCluster, record: Record) -> None:
        if isinstance(record.event, Stored) and record.event.outer_step >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, small(2, total_steps=5000), watch=interrupt, fork_server=ForkServer)
    reached = max(max(kept) for kept in DurableVersions.open(tmp_path / "syncer", read_only=True).kept())
    assert 12 <= reached < 5000
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "--json"])
    assert f"outer step {reached} of 5000" in done.stderr
    said = json.loads(done.stdout)
    assert (said["outer_step"], said["total_steps"]) == (reached, 5000)


@pytest.mark.soak
def test_run_interrupted_before_its_first_round_is_refused(tmp_path: Path) -> None:
    def interrupt(cluster: LocalCluster, record: Record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, small(1, protocol=NEVER_DUE), watch=interrupt)
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--hf", str(tmp_path / "hf")])
    assert isinstance(done.exception, UserError) and "(outer step 0 of 150)" in str(done.exception)
    assert not (tmp_path / "hf").exists()
