"""A listening syncer with live learners, and somebody with a token who throws everything at it: it neither crashes nor
loses a round nor grows without bound."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import judge, run, small

from atoll.config import Config
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import (
    Effect,
    FixParticipants,
    Membership,
    Merge,
    Received,
    Refuse,
    Report,
    Started,
    Stored,
)  # fmt: skip
from atoll.runtime.local.cluster import LocalCluster
from atoll.sim.checkers import Safety
from atoll.tape.format import Record, Tape
from atoll.tape.weave import live_tapes
from hostile import Siege, Vitals, now

HONEST = 2


class Unfooled(Safety):
    """Ignores messages that the machine drops as duplicates: only a lying peer's differs from the first."""

    _duplicates = 0

    def received(self, event: Received, effects: Sequence[Effect]) -> None:
        assert self.cluster is not None
        before, self._duplicates = self._duplicates, self.cluster.syncer._effects.mailbox.duplicates
        if self._duplicates == before:
            super().received(event, effects)


@pytest.fixture(autouse=True)
def unfooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "Safety", Unfooled)


@dataclass
class Aftermath:
    siege: Siege
    vitals: Vitals
    seconds: float
    samples: int
    """Of its vitals, while it was under attack."""
    pids: tuple[int, int]
    files_after: int
    log: str


def besiege(directory: Path, config: Config, goal: int, workers: int, seed: int) -> Aftermath:
    """Starts with the first rounds. The run lasts until the siege is over and what it held is let go of; `config.total_steps`
    bounds how long that may take."""
    begun, ended = threading.Event(), threading.Event()
    clusters: list[LocalCluster] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        if not begun.is_set() and any(isinstance(e, FixParticipants) and e.outer_step > 20 for e in record.effects):
            clusters.append(cluster)
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, directory, config, watch=watch, until=ended.is_set)
        running.add_done_callback(lambda _: begun.set())
        assert begun.wait(120)
        assert clusters, f"it did not begin: {running.exception()}"
        (cluster,) = clusters
        log = directory / "syncer.log"
        pid = cluster.syncer_child().pid
        token = (directory / "syncer" / "token").read_text().strip()
        siege = Siege(cluster.address, token, seed, goal, HONEST, members_max=config.limits.members_max)
        running.add_done_callback(lambda _: siege.stopped.set())
        vitals, started = Vitals(pid, log), now()
        try:
            asyncio.run(siege.run(workers))
            seconds, samples = now() - started, len(vitals.rss)
            files_after = settled(vitals)
            pid_after = cluster.syncer_child().pid
        finally:
            ended.set()
            vitals.stop()
        running.result()
    return Aftermath(siege, vitals, seconds, samples, (pid, pid_after), files_after, log.read_text(errors="replace"))


def settled(vitals: Vitals) -> int:
    """Open files once the last links are let go of: a farewell takes seconds."""
    until = now() + 60
    while now() < until and vitals.files[-1] > vitals.files[0] + 10:
        time.sleep(0.3)
    return vitals.files[-1]


def refusals(directory: Path) -> tuple[Counter[str], dict[str, Any]]:
    """By kind; and what honest learners went through."""
    kinds: Counter[str] = Counter()
    rounds = starts = 0
    honest_rounds: Counter[int] = Counter()
    possible: Counter[int] = Counter()
    in_sync: set[int] = set()
    stored: list[int] = []
    for record in Tape(live_tapes(directory)[0]).records():
        starts += isinstance(record.event, Started)
        if isinstance(record.event, Stored):
            stored.append(record.event.outer_step)
        for effect in record.effects:
            if isinstance(effect, Refuse):
                kinds[effect.reason.why] += 1
                late = effect.reason.why is Why.LATE
                assert effect.peer >= HONEST or late, f"an honest learner was refused: {effect}"
            if isinstance(effect, Membership) and effect.learner < HONEST:
                (in_sync.add if effect.standing == "in_sync" else in_sync.discard)(effect.learner)
            if isinstance(effect, Merge):
                rounds += 1
                possible.update(in_sync)
                honest_rounds.update(share.learner for share in effect.shares)
    waited = [
        record.event.envelope.body.waited_nanos
        for record in Tape(live_tapes(directory)[0]).records()
        if isinstance(record.event, Received) and record.event.envelope.sender < HONEST
        and isinstance(record.event.envelope.body, Report)
    ]  # fmt: skip
    counted = {"merges": rounds, "honest": honest_rounds, "possible": possible}
    return kinds, {"starts": starts, "stored": stored, "waited": max(waited), **counted}


def withstands(
    directory: Path, *, goal: int, total_steps: int, workers: int, seed: int, offences: int
) -> dict[str, float]:
    """What was measured. `offences`: so many cost a place; an attacker without one is refused sooner and tries less."""
    limits = {"members_max": 24, "places_per_token": 24, "offences_max": offences}
    config = small(HONEST, total_steps=total_steps, limits=limits)
    after = besiege(directory, config, goal, workers, seed)
    siege, vitals = after.siege, after.vitals
    kinds, honest = refusals(directory)
    rss, shares = vitals.rss, [honest["honest"][m] for m in range(HONEST)]
    figures = (
        f"{siege.count} messages over {siege.links} links in {after.seconds:.0f} s: {dict(siege.thrown)}\n"
        f"outcomes {dict(siege.outcomes)}; entered {siege.entered}, pulled from {siege.pulled}\n"
        f"rss {rss[0]:.0f} -> peak {max(rss):.0f} -> {rss[-1]:.0f} MB; fds {vitals.files[0]} -> {max(vitals.files)} -> "
        f"{after.files_after}; log {vitals.log_bytes} bytes; tape {live_tapes(directory)[0].stat().st_size} bytes\n"
        f"merges {honest['merges']}, of honest ones {shares}; refused by the machine: {dict(kinds.most_common(30))}\n"
        + "\n".join(line for line in after.log.splitlines()[-8:])
    )
    print(figures)
    (directory / "figures").write_text(figures)
    assert not siege.bugs, Counter(siege.bugs)
    assert siege.count >= goal, f"the run was over after {siege.count} messages"
    assert siege.entered and siege.pulled, "nobody got in who then lied"
    assert after.pids[0] == after.pids[1] and honest["starts"] == 1, "the syncer was started again"
    assert "Traceback" not in after.log
    judge(directory, config, whole=False)
    assert honest["waited"] == 0
    assert len(live_tapes(directory)) == 1 + HONEST, "an honest learner had to come back as another incarnation"
    assert honest["stored"] == sorted(set(honest["stored"])) and all(
        honest["honest"][m] > 0.5 * honest["possible"][m] > 0 for m in range(HONEST)
    ), "of the merges while it was in sync: one that stalls is not, and has no part in them"
    assert max(rss) < rss[0] + 150
    during = rss[: after.samples]
    late = during[len(during) // 2 :]
    half = len(late) // 2
    assert statistics.median(late[half:]) < statistics.median(late[:half]) + 25, "it grows on and on"
    assert max(vitals.files) < 600 and after.files_after < vitals.files[0] + 20
    assert sum(kinds.values()) > 10 and "refused" in after.log
    assert vitals.log_bytes < 100_000 + 20_000 * (after.seconds + 60), "the log grows with every refusal"
    return {
        "messages": siege.count, "links": siege.links, "seconds": round(after.seconds, 1), "merges": honest["merges"],
        "honest_merges": min(shares), "rss_mb_first": round(rss[0]), "rss_mb_peak": round(max(rss)),
        "rss_mb_last": round(during[-1]), "files_first": vitals.files[0], "files_peak": max(vitals.files),
        "files_after": after.files_after, "log_bytes": vitals.log_bytes,
    }  # fmt: skip


def test_syncer_withstands_hundreds_of_hostile_messages(tmp_path: Path) -> None:
    """`bench/hostile_messages.py` sends a million."""
    withstands(tmp_path, goal=800, total_steps=harness.LONG, workers=6, seed=1, offences=20)
