"""A listening syncer with live learners, and somebody with a token who throws everything at it: it neither crashes nor
loses a round nor grows without bound."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.config import Config
from atoll.ids import SYNCER
from atoll.protocol.vocabulary import FixParticipants, Merge, Received, Refuse, Report, Started, Stored
from atoll.runtime.cluster import LocalCluster
from atoll.tape.format import Record, Tape
from atoll.tape.weave import live_tapes
from tests.live.harness import judge, run, small
from tests.live.hostile import Siege, Vitals, now

pytestmark = pytest.mark.live

HONEST = 2


@dataclass
class Aftermath:
    siege: Siege
    vitals: Vitals
    seconds: float
    pids: tuple[int, int]
    files_after: int
    log: str


def besiege(directory: Path, config: Config, goal: int, workers: int, seed: int) -> Aftermath:
    """Starts with the first round; the run goes on to its end afterwards."""
    begun = threading.Event()
    clusters: list[LocalCluster] = []

    def watch(cluster: LocalCluster, record: Record) -> None:
        if not begun.is_set() and any(isinstance(e, FixParticipants) and e.outer_step > 20 for e in record.effects):
            clusters.append(cluster)
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, directory, config, watch=watch)
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
        asyncio.run(siege.run(workers))
        seconds = now() - started
        asyncio.run(asyncio.sleep(1.5))  # the last links' farewells
        vitals.look()
        files_after = vitals.files[-1]
        pid_after = cluster.syncer_child().pid
        try:
            running.result()
        finally:
            vitals.stop()
    return Aftermath(siege, vitals, seconds, (pid, pid_after), files_after, log.read_text(errors="replace"))


def refusals(directory: Path) -> tuple[Counter[str], dict[str, Any]]:
    """By kind; and what honest learners went through."""
    kinds: Counter[str] = Counter()
    rounds = honest_rounds = starts = 0
    stored: list[int] = []
    for record in Tape(live_tapes(directory)[0]).records():
        starts += isinstance(record.event, Started)
        if isinstance(record.event, Stored):
            stored.append(record.event.outer_step)
        for effect in record.effects:
            if isinstance(effect, Refuse):
                kinds[" ".join(w for w in effect.reason.split()[:5] if w.isalpha())] += 1
                assert effect.peer >= HONEST, f"an honest learner was refused: {effect}"
            if isinstance(effect, Merge):
                rounds += 1
                honest_rounds += {0, 1} & {share.learner for share in effect.shares} == {0, 1}
    waited = [
        record.event.envelope.body.waited_nanos
        for record in Tape(live_tapes(directory)[0]).records()
        if isinstance(record.event, Received) and record.event.envelope.sender < HONEST
        and isinstance(record.event.envelope.body, Report)
    ]  # fmt: skip
    return kinds, {"starts": starts, "stored": stored, "merges": rounds, "honest": honest_rounds, "waited": max(waited)}


def withstands(directory: Path, *, goal: int, outer_steps: int, workers: int, seed: int, unhurried: float = 8.0) -> None:
    config = small(HONEST, outer_steps=outer_steps, limits={"members_max": 24})
    after = besiege(directory, config, goal, workers, seed)
    siege, vitals = after.siege, after.vitals
    kinds, honest = refusals(directory)
    rss = vitals.rss
    figures = (
        f"{siege.count} messages over {siege.links} links in {after.seconds:.0f} s: {dict(siege.thrown)}\n"
        f"outcomes {dict(siege.outcomes)}; entered {siege.entered}, pulled from {siege.pulled}\n"
        f"rss {rss[0]:.0f} -> peak {max(rss):.0f} -> {rss[-1]:.0f} MB; fds {vitals.files[0]} -> {max(vitals.files)} -> "
        f"{after.files_after}; log {vitals.log_bytes} bytes; tape {live_tapes(directory)[0].stat().st_size} bytes\n"
        f"merges {honest['merges']}, of both honest {honest['honest']}; refused by the machine: {dict(kinds.most_common(30))}\n"
        + "\n".join(line for line in after.log.splitlines()[-8:])
    )
    print(figures)
    (directory / "figures").write_text(figures)
    assert not siege.bugs, Counter(siege.bugs)
    assert siege.count >= goal, f"the run was over after {siege.count} messages"
    assert siege.entered and siege.pulled, "nobody got in who then lied"
    assert after.pids[0] == after.pids[1] and honest["starts"] == 1, "the syncer was started again"
    assert "Traceback" not in after.log
    judge(directory, config)
    assert honest["waited"] == 0
    assert len(live_tapes(directory)) == 1 + HONEST, "an honest learner had to come back as another incarnation"
    assert honest["stored"] == sorted(set(honest["stored"])) and honest["honest"] > 0.5 * honest["merges"]
    assert max(rss) < rss[0] + 150
    late = rss[len(rss) // 2 :]
    half = len(late) // 2
    assert statistics.median(late[half:]) < statistics.median(late[:half]) + 25, "it grows on and on"
    assert max(vitals.files) < 600 and after.files_after < vitals.files[0] + 20
    assert sum(kinds.values()) > 10 and "refused" in after.log
    assert vitals.log_bytes < 100_000 + 20_000 * (after.seconds + 60), "the log grows with every refusal"


def test_syncer_withstands_thousands_of_hostile_messages(tmp_path: Path) -> None:
    withstands(tmp_path, goal=3000, outer_steps=900, workers=6, seed=1)


@pytest.mark.soak
def test_syncer_withstands_a_hundred_thousand_hostile_messages(tmp_path: Path) -> None:
    withstands(tmp_path, goal=100_000, outer_steps=15_000, workers=12, seed=2)


assert SYNCER == -1
