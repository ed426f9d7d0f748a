"""The held-out loss of Theta while a live run trains: by an evaluator of its own, whose death costs nothing but points."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from command import atoll
from harness import LONG, STEADY, judge, run, small

from atoll.protocol.vocabulary import Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.summary import verdict
from atoll.tape.format import Record
from atoll.tape.heldout import points_in

EVERY = 20


def evaluators_of(directory: Path) -> list[int]:
    """Of the processes that a fork server starts: by the log that their output goes to."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            if os.readlink(path) == str(directory / "heldout.log"):
                found.append(int(path.parts[2]))
        except OSError:  # it has ended since, or is not ours
            continue
    return found


def test_losses_on_the_way_are_reported_and_kept(tmp_path: Path) -> None:
    config = small(2, total_steps=LONG, data={"heldout_every": EVERY}, inner=STEADY)
    run(tmp_path, config, until=lambda: len(points_in(tmp_path)) > 1 and points_in(tmp_path)[-1].outer_step > 60)
    judge(tmp_path, config, whole=False)
    points = points_in(tmp_path)
    steps = [point.outer_step for point in points]
    assert steps, (tmp_path / "heldout.log").read_text()
    assert len({step // EVERY for step in steps}) == len(steps), "at most one for each multiple"
    summary = verdict(config, tmp_path)
    assert summary.heldout == points and summary.loss_first is not None and summary.loss_final is not None
    losses = [summary.loss_first, *(point.loss or 0.0 for point in points), summary.loss_final]
    assert all(0 < loss <= 1.05 * summary.loss_first for loss in losses) and losses[-1] < 0.9 * losses[0]


def test_run_ends_as_usual_when_its_evaluator_is_killed(tmp_path: Path) -> None:
    config = small(2, total_steps=60, data={"heldout_every": EVERY})
    killed: list[int] = []

    def inject(cluster: LocalCluster, record: Record) -> None:
        if not killed and isinstance(record.event, Stored):  # as soon as it is there: it must not live to see the end
            killed.extend(evaluators_of(tmp_path))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    run(tmp_path, config, watch=inject)
    judge(tmp_path, config)
    assert len(killed) == 1 and all(point.outer_step < 60 for point in points_in(tmp_path))


def test_following_by_hand_ends_with_the_run_and_refuses_what_it_cannot_follow(tmp_path: Path) -> None:
    config = small(2, total_steps=40)
    run(tmp_path / "run", config)
    done = atoll("eval", str(tmp_path / "run"), "--follow", "--every", "10", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["outer_step"] == 40
    assert json.loads(line)["loss"] == verdict(config, tmp_path / "run").loss_final
    for words, sentence in (
        ([], "has data.heldout_every = 0; give --every STEPS"),
        (["--every", "10", "--tasks", "piqa"], "--follow: prints the held-out loss"),
    ):
        refused = atoll("eval", str(tmp_path / "run"), "--follow", *words, cwd=tmp_path)
        assert refused.returncode == 2 and sentence in refused.stderr, refused.stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_bytes((tmp_path / "run" / "config.toml").read_bytes())
    refused = atoll("eval", str(tmp_path / "empty"), "--follow", "--every", "5", cwd=tmp_path)
    assert refused.returncode == 2 and "--follow takes a live run" in refused.stderr, refused.stderr
