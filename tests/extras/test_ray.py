"""`atoll up --on ray` on a cluster of four local nodes: nodes are killed, drained and added, the syncer's too; and what Ray's own
views show of a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import free_port
from upped import processes_of, wait_until, write_recipe

from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing, Started, Stored
from atoll.tape.format import Record, Tape
from atoll.tape.replay import replay
from atoll.tape.weave import open_run

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]
PATIENT = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_raylet_start_wait_time_s": "300", "RAY_worker_niceness": "5"}
"""Ray reads them when it is imported. A busy machine takes minutes to bring a node up, and leaves workers of niceness 15, Ray's
default, no time at all."""
os.environ.update(PATIENT)
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

PLACEMENT = """
[placement]
leave_seconds = 15.0
[placement.syncer]
resources = {{ cpus = 1, memory_gb = 0.25 }}
[[placement.learners]]
count = 4
least = 2
most = 5
resources = {{ cpus = 1, memory_gb = 0.25 }}
[placement.ray]
address = "{address}"
"""
COUNTED = {0, 1, 2, 3}
SPARE = "learner-4"
SMALL: dict[str, Any] = {"object_store_memory": 80 * 1024 * 1024, "memory": 4 << 30}
SECONDS = 400.0
"""Of patience with a learner that starts anew, on a machine that has other work."""


class FourNodes:
    """Room for seven processes: for the syncer and five learners, and without a node of two for four learners only."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._dashboard = 0
        self.add(0)
        self.small = self.add(1).node_id
        self._nodes = [self.add() for _ in range(3)]

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self._dashboard}"

    def add(self, cpus: int = 2) -> Any:
        """The first is the head. Ray gives a node 30 s to come up, which a machine with other work exceeds now and then; what is
        left of such a node keeps its port."""
        for _ in range(3):
            port = free_port()
            head = {} if self._dashboard else {"include_dashboard": True, "dashboard_port": port}
            try:
                node = self.cluster.add_node(num_cpus=cpus, **SMALL, **head)
            except Exception as error:  # it has no class of its own
                late = error
                continue
            self._dashboard = self._dashboard or port
            return node
        raise late

    def node(self, shown: str) -> Any:
        """By the first letters of its id, as `atoll status` shows it."""
        return next(node for node in self.cluster.list_all_nodes() if node.node_id.startswith(shown))

    def kill(self, shown: str) -> None:
        self.cluster.remove_node(self.node(shown), allow_graceful=False)

    def drain(self, shown: str) -> None:
        words = [
            "drain-node", "--address", self.cluster.address, "--node-id", self.node(shown).node_id, "--reason",
            "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", "60",
        ]  # fmt: skip
        ray_command(*words)

    def keeper(self) -> int:
        """The process of the run's keeper; 0 while there is none."""
        from ray.util.state import list_actors

        found = list_actors(address=self.dashboard, filters=[("name", "=", "run-keeper"), ("state", "=", "ALIVE")])
        return int(found[0].pid) if found else 0

    def log_of(self, actor: str) -> str:
        """As Ray's dashboard shows it."""
        from ray.util.state import get_log, list_actors

        (found,) = list_actors(address=self.dashboard, filters=[("name", "=", actor), ("state", "=", "ALIVE")])
        return "".join(get_log(address=self.cluster.address, actor_id=found.actor_id, tail=1000))

    def metrics(self) -> str:
        """What Prometheus scrapes by the file that Ray writes for it: the agent of every node."""
        (folder,) = {node.get_session_dir_path() for node in self.cluster.list_all_nodes()}
        targets = json.loads((Path(folder) / "prom_metrics_service_discovery.json").read_text())
        pages = []
        for target in {target for group in targets for target in group["targets"]}:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                pages.append(answer.read().decode())
        return "\n".join(pages)

    def arguments(self) -> str:
        """All that Ray knows of the actors."""
        from ray.util.state import list_actors, list_tasks

        return repr(list_actors(address=self.dashboard, detail=True)) + repr(list_tasks(address=self.dashboard, detail=True))

    def one_with_learners(self, where: dict[str, str]) -> str:
        """A node of two, neither the syncer's nor the spare's."""
        others = {where["syncer"], where.get(SPARE, "")}
        return next(node for node in where.values() if node not in others and not self.small.startswith(node))


def ray_command(*words: str) -> None:
    program = Path(sys.executable).with_name("ray")
    ended = subprocess.run([str(program), *words], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def command(*words: object) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "atoll", *map(str, words)], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture
def four_nodes() -> Iterator[FourNodes]:
    nodes = FourNodes()
    yield nodes
    nodes.cluster.shutdown()


def records(run: Path) -> list[Record]:
    tape = run / "syncer" / "run.tape"
    return list(Tape(tape).records()) if tape.exists() else []


def together(run: Path, since: int, learners: set[int]) -> bool:
    """They all took part in one round after the first `since` records."""
    effects = (e for r in records(run)[since:] for e in r.effects)
    return any(isinstance(e, FixParticipants) and learners <= set(e.participants) for e in effects)


def returned(run: Path, since: int, learners: set[int]) -> bool:
    """Each was admitted after the first `since` records, and then took part in a round."""
    admitted: set[int] = set()
    merged: set[int] = set()
    for effect in (e for r in records(run)[since:] for e in r.effects):
        if isinstance(effect, Membership) and effect.standing == Standing.IN_SYNC:
            admitted.add(effect.learner)
        elif isinstance(effect, FixParticipants):
            merged |= admitted & set(effect.participants)
    return learners <= merged


def left_politely(run: Path, since: int) -> set[int]:
    gone = (e for r in records(run)[since:] for e in r.effects if isinstance(e, Membership) and e.standing == Standing.LEFT)
    return {e.learner for e in gone if e.reason.why is Why.LEAVES_FOR_A_WHILE}


def starts(run: Path) -> list[int]:
    """The records at which the syncer started."""
    return [i for i, record in enumerate(records(run)) if isinstance(record.event, Started)]


def workers_of(run: Path) -> dict[str, dict[str, str]]:
    workers: dict[str, dict[str, str]] = json.loads(command("status", run, "--json").stdout)["workers"]
    return workers


def nodes_of(run: Path) -> dict[str, str]:
    """Where each process runs. A keeper that began anew knows it only when the actors have answered."""

    def located() -> dict[str, str]:
        workers = workers_of(run)
        found = {name: each["where"].split()[1] for name, each in workers.items() if each["where"]}
        return found if len(found) == len(workers) else {}

    where: dict[str, str] = wait_until(located, "the nodes of the syncer and of the learners", SECONDS)
    return where


def learners_on(node: str, where: dict[str, str]) -> set[int]:
    return {int(name.removeprefix("learner-")) for name, each in where.items() if each == node and name != "syncer"}


def commands_of(run: Path) -> dict[int, str]:
    ours = (" -m atoll learner ", " -m atoll syncer ")
    return {pid: words for pid, words in processes_of(run).items() if any(each in words for each in ours)}


def kill_the_keeper(nodes: FourNodes, run: Path) -> None:
    before, where = commands_of(run), nodes_of(run)
    assert len(before) == 6, before
    keeper = nodes.keeper()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: nodes.keeper() not in (0, keeper), "another keeper", SECONDS)
    assert nodes_of(run) == where and commands_of(run) == before, "it finds what runs, and starts nothing"
    assert {each["state"] for each in workers_of(run).values()} == {"running"}, "and asks nobody to make room"


def kill_a_node(nodes: FourNodes, run: Path) -> None:
    since, where = len(records(run)), nodes_of(run)
    victim = nodes.one_with_learners(where)
    lost = learners_on(victim, where)
    nodes.kill(victim)
    wait_until(lambda: returned(run, since, lost), f"learners {lost} of the killed node on others", SECONDS)
    wait_until(lambda: SPARE not in nodes_of(run), "room for them, made by the spare", SECONDS)
    assert not lost & left_politely(run, since), "nobody there had a notice"


def add_a_node(nodes: FourNodes, run: Path) -> None:
    since = len(records(run))
    nodes.add()
    wait_until(lambda: returned(run, since, {4}) and together(run, since, COUNTED | {4}), "the spare on an added node", SECONDS)


def drain_a_node(nodes: FourNodes, run: Path) -> None:
    since, where = len(records(run)), nodes_of(run)
    drained = nodes.one_with_learners(where)
    leaving = learners_on(drained, where)
    nodes.drain(drained)
    wait_until(lambda: leaving <= left_politely(run, since), f"a polite leave of {leaving}, whose node is drained", SECONDS)
    wait_until(lambda: returned(run, since, leaving), f"learners {leaving} of the drained node on others", SECONDS)
    assert drained not in nodes_of(run).values()
    nodes.kill(drained)


def kill_the_node_of_the_syncer(nodes: FourNodes, run: Path) -> None:
    nodes.add()
    where, before = nodes_of(run), starts(run)
    nodes.kill(where["syncer"])
    wait_until(lambda: len(starts(run)) == len(before) + 1, "another start of the syncer", SECONDS)
    again = starts(run)[-1]
    wait_until(lambda: together(run, again, COUNTED), "rounds of four learners with it", SECONDS)
    assert nodes_of(run)["syncer"] != where["syncer"]
    steps = [r.event.outer_step for r in records(run) if isinstance(r.event, Stored)]
    stride = steps[1] - steps[0]
    assert all(b - a == stride for a, b in pairwise(steps)), "it went on at the outer step that was stored, and repeated none"


def logs_and_metrics_are_rays_and_secrets_are_not(nodes: FourNodes, run: Path) -> None:
    assert "joining the run at" in nodes.log_of("run-learner-0")
    for worker, name in (("syncer", "ray_atoll_outer_step"), ("learner-0", "ray_atoll_learner_local_step")):
        shown = re.compile(rf'^{name}\{{[^}}]*worker="{worker}"[^}}]*\}} [1-9]', re.MULTILINE)
        wait_until(lambda shown=shown: shown.search(nodes.metrics()), f"{name} of {worker} among Ray's metrics", SECONDS)
    secrets = [path for path in (run / "keys").iterdir() if path.suffix == ".key" or path.name == "token"]
    assert secrets and all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    known = nodes.arguments() + (run / "engine" / "ray.json").read_text()
    for path in secrets:
        body = path.read_bytes().strip()
        assert body.hex() not in known and body[:40].decode("latin1") not in known.replace("\\n", "\n"), path.name


def test_run_on_ray_survives_killed_drained_and_added_nodes(four_nodes: FourNodes, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, placement=PLACEMENT.format(address=four_nodes.cluster.address))
    run = tmp_path / "run"
    up = ("up", str(recipe), "--on", "ray", "--out", str(run))
    ray_command("job", "submit", "--address", four_nodes.dashboard, "--", sys.executable, "-m", "atoll", *up)
    try:
        wait_until(lambda: together(run, 0, COUNTED | {4}), "four learners, and a fifth where there was room", SECONDS)
        assert "is up already" in command(*up).stderr
        logs_and_metrics_are_rays_and_secrets_are_not(four_nodes, run)
        kill_the_keeper(four_nodes, run)
        kill_a_node(four_nodes, run)
        add_a_node(four_nodes, run)
        drain_a_node(four_nodes, run)
        kill_the_node_of_the_syncer(four_nodes, run)
        assert "joining the run at" in command("logs", "0", "--run", run).stdout
    finally:
        command("down", run)
    wait_until(lambda: processes_of(run) == {}, "the end of all processes", 30.0)
    is_clean(run)
    runs_to_its_end(four_nodes, tmp_path)


def is_clean(run: Path) -> None:
    assert "healthy" in command("doctor", run).stdout
    outcome = replay(open_run(run))
    assert outcome.fates is not None and outcome.fates.add_up()


def runs_to_its_end(nodes: FourNodes, tmp_path: Path) -> None:
    """A short one: every process is done, the keeper too, and the weights are there."""
    (tmp_path / "short").mkdir()
    recipe = write_recipe(tmp_path / "short", steps=60, placement=PLACEMENT.format(address=nodes.cluster.address))
    run = tmp_path / "short" / "ended"
    command("up", recipe, "--on", "ray", "--out", run)

    def over() -> bool:
        return not json.loads(command("status", run, "--json").stdout)["is_up"]

    wait_until(over, "the end of a short run", SECONDS)
    states = {name: each["state"].partition(",")[0] for name, each in workers_of(run).items()}
    assert states["syncer"] == "done" and set(states.values()) <= {"done", "ended"}, states
    assert (run / "syncer" / "theta.safetensors").exists()
    command("down", run)
    is_clean(run)
