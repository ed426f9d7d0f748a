"""Learners whose machines are taken away: each is told in another way, delivers what it trained, and comes back to its place."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import LONG, PATIENT, SharedForkServer, effects_of, judge, learner_argv, run, small
from thread_syncer import PATIENCE_SECONDS, UNHURRIED, Syncer, custom, model_of, train

from atoll.ids import SYNCER
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import Announce, FixParticipants, Goodbye, LeaveAsked, Membership, Received, Standing
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.local.forkserver import Child
from atoll.tape.format import Record, Tape

LEFT_CODE = 75


class Preempted:
    """A learner beyond the two that stay. In a round, it is told to leave; gone, it is started again without a word of its id."""

    def __init__(self, directory: Path, learner: int) -> None:
        self._directory, self.learner = directory, learner
        self.out = directory / "learners" / str(learner)
        self._child: Child | None = None
        self._told = False
        self.code: int | None = None
        self.is_back = False
        self._notice = directory / f"notice-{learner}"

    def look(self, cluster: LocalCluster, record: Record) -> None:
        if self._child is None:
            self._child = self._spawn(cluster, self._directory, "--id", str(self.learner))
        for effect in record.effects:
            if isinstance(effect, FixParticipants) and self.learner in effect.participants:
                if self.code is not None:
                    self.is_back = True
                elif not self._told:
                    self._told = True
                    self._tell(self._child)
        if self.code is None and (code := self._child.poll()) is not None:
            self.code = code
            self._notice.unlink(missing_ok=True)  # else the next incarnation is told to leave too
            self._child = self._spawn(cluster, self._directory)

    def _spawn(self, cluster: LocalCluster, directory: Path, *more: str) -> Child:
        argv = learner_argv(directory, cluster.address, self.learner)
        del argv[argv.index("--id") : argv.index("--id") + 2]
        leave = ["--left-code", str(LEFT_CODE), "--leave-file", str(self._notice)]
        return cluster.fork_server.spawn([*argv, *leave, *more], self._directory / f"more-{self.learner}.log")

    def _tell(self, child: Child) -> None:
        match self.learner:
            case 2:
                child.signal(signal.SIGTERM)
            case 3:
                child.signal(signal.SIGUSR1)
            case 4:
                self._notice.write_text("12.5\n")


def test_preempted_learners_deliver_leave_and_return_to_their_places(tmp_path: Path) -> None:
    config = small(2, total_steps=LONG, limits=PATIENT)
    preempted = [Preempted(tmp_path, learner) for learner in (2, 3, 4)]

    def watch(cluster: LocalCluster, record: Record) -> None:
        for each in preempted:
            each.look(cluster, record)

    run(tmp_path, config, watch=watch, until=lambda: all(each.is_back for each in preempted))
    judge(tmp_path, config, whole=False)
    assert [each.code for each in preempted] == [LEFT_CODE] * 3
    left = {m.learner: m.reason for m in effects_of(tmp_path, Membership) if m.standing == Standing.LEFT}
    assert {learner: reason.why for learner, reason in left.items()} == dict.fromkeys((2, 3, 4), Why.LEAVES_FOR_A_WHILE)
    assert [left[2].detail, left[3].detail] == ["asked to stop by SIGTERM", "asked to stop by SIGUSR1"]
    for each in preempted:
        records = list(Tape(each.out / "0.tape").records())
        asked = next(i for i, r in enumerate(records) if isinstance(r.event, LeaveAsked))
        assert records[asked].event.within == {4: 12_500_000_000}.get(each.learner)
        merged = [
            r.event.envelope.body.fragment for r in records[asked:]
            if isinstance(r.event, Received) and isinstance(r.event.envelope.body, Announce)
            and each.learner in r.event.envelope.body.merged
        ]  # fmt: skip
        assert merged, "what it had trained when it was told was merged"
        assert (each.out / "1.tape").exists(), "the same place, the next incarnation"


def test_place_of_a_preempted_learner_is_kept_over_a_restart_of_the_syncer(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path / "syncer", config := custom(learners=1, total_steps=10_000, limits=UNHURRIED))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with syncer.join(model, optimizer, out=tmp_path / "one") as learner:
        train(learner, model, optimizer)
        learner.leave("preempted", 5.0)
        while not learner.over:
            train(learner, model, optimizer)
    syncer.hear_goodbyes()
    syncer.stop()
    syncer = Syncer(tmp_path / "syncer", config)
    other = model_of(seed=1)
    with syncer.join(other, torch.optim.AdamW(other.parameters()), out=tmp_path / "two") as newcomer:
        assert newcomer.id == 1
    with syncer.join(model, optimizer, out=tmp_path / "one") as learner:
        assert learner.id == 0
    syncer.stop()


@pytest.mark.parametrize("how", ["function", "file", "broken function"])
def test_own_loop_leaves_when_its_function_or_file_says_so(tmp_path: Path, how: str) -> None:
    syncer = Syncer(tmp_path / "syncer", custom(learners=1, total_steps=10_000, limits=UNHURRIED))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    told, file = threading.Event(), tmp_path / "notice"

    def notice() -> float | None:
        if how == "broken function":
            raise ConnectionError("no metadata server")
        return 4.0 if told.is_set() else None

    asks = {"leave_file": file} if how == "file" else {"leave_when": notice}
    until = time.monotonic() + (2.0 if how == "broken function" else PATIENCE_SECONDS)
    with syncer.join(model, optimizer, **asks) as learner:
        steps = 0
        while not learner.over and time.monotonic() < until:
            train(learner, model, optimizer)
            steps += 1
            if steps == 5:
                told.set()
                file.touch()
        assert learner.over == (how != "broken function"), "a function that fails asks nobody to leave"
    syncer.hear_goodbyes()
    syncer.stop()
    words = [r.event.envelope.body for r in syncer.tape() if isinstance(r.event, Received) and r.worker == SYNCER]
    said = [w.reason.why for w in words if isinstance(w, Goodbye)]
    assert said == [Why.LEAVES if how == "broken function" else Why.LEAVES_FOR_A_WHILE]


def test_signal_before_a_learner_is_in_the_run_ends_it_in_order(tmp_path: Path) -> None:
    token, log, server = tmp_path / "token", tmp_path / "log", SharedForkServer()
    token.write_text("none")
    child = server.spawn(["learner", "--syncer", "127.0.0.1:9", "--token", str(token)], log)
    until = time.monotonic() + PATIENCE_SECONDS
    while not (log.exists() and "waiting for a place" in log.read_text()) and time.monotonic() < until:
        threading.Event().wait(0.05)
    child.signal(signal.SIGUSR1)
    child.wait(PATIENCE_SECONDS)
    assert child.poll() == 0
    assert "before it was in the run" in log.read_text()
    server.close()
