"""What the manifests tell Kubernetes to run is run here, word by word, against a live run: entry points, probes and preStop."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import free_port
from upped import wait_until, write_recipe

from atoll.config import load, load_placement
from atoll.engines.deployment import LEFT_CODE, Deployment
from atoll.engines.kubernetes import manifests
from atoll.engines.trust import ensure_keys
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import FixParticipants, Membership, Standing
from atoll.tape.format import Tape

pytestmark = pytest.mark.extras


class Pod:
    """A container's commands, with its mounts as folders of this machine."""

    def __init__(self, root: Path, manifest: dict[str, Any], everything: list[dict[str, Any]], ports: dict[str, str]) -> None:
        spec = manifest["spec"]
        template = (spec["replicatedJobs"][0]["template"]["spec"] if manifest["kind"] == "JobSet" else spec)["template"]
        (self.container,) = template["spec"]["containers"]
        self.name, self._root, self._ports = manifest["metadata"]["name"], root / manifest["metadata"]["name"], ports
        self._mounts = {mount["mountPath"]: str(self._root / mount["name"]) for mount in self.container["volumeMounts"]}
        for volume in template["spec"]["volumes"]:
            self._fill(volume, everything)
        (self._root / "run").mkdir(parents=True, exist_ok=True)

    def _fill(self, volume: dict[str, Any], everything: list[dict[str, Any]]) -> None:
        folder = self._root / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        wanted = volume.get("secret", {}).get("secretName"), volume.get("configMap", {}).get("name")
        for manifest in everything:
            named = manifest["metadata"]["name"]
            for key, value in manifest.get("data", {}).items():
                if manifest["kind"] == "Secret" and named == wanted[0]:
                    (folder / key).write_bytes(base64.b64decode(value))
                    (folder / key).chmod(0o600)
                elif manifest["kind"] == "ConfigMap" and named == wanted[1]:
                    (folder / key).write_text(value)

    def words(self, command: list[str]) -> list[str]:
        """As kubelet and the pod's network would have them."""
        found = [sys.executable if word == "python3" else word.replace("$(POD_IP)", "127.0.0.1") for word in command]
        for inside, here in (*self._mounts.items(), *self._ports.items()):
            found = [word.replace(inside, here) for word in found]
        return found

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with (self._root / "log").open("ab") as log:
            child = subprocess.Popen(self.words(self.container["command"]), stdout=log, stderr=log)
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()

    def is_ready(self) -> bool:
        probe = self.container["readinessProbe"]
        if "exec" in probe:
            ended = subprocess.run(self.words(probe["exec"]["command"]), capture_output=True, check=False)
            return ended.returncode == 0
        assert probe["tcpSocket"]["port"] == self.container["ports"][0]["name"]
        port = self.words([f"0.0.0.0:{self.container['ports'][0]['containerPort']}"])[0].rpartition(":")[2]
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", int(port))) == 0

    def pre_stop(self) -> int:
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        return subprocess.run(self.words(command), check=False, timeout=90.0).returncode


def together(tape: Path, since: int) -> int:
    found = list(Tape(tape).records()) if tape.exists() else []
    both = any(isinstance(e, FixParticipants) and e.participants == (0, 1) for r in found[since:] for e in r.effects)
    return len(found) if both else 0


def test_entry_points_probes_and_pre_stop_work_as_the_manifests_have_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    deployment = Deployment("local", tmp_path / "made", load(recipe), load_placement(recipe))
    ensure_keys(deployment)
    found = manifests(deployment, Path.read_bytes)
    port = free_port()
    ports = dict.fromkeys(("local-syncer.default.svc:7077", "0.0.0.0:7077"), f"127.0.0.1:{port}")
    ports["127.0.0.1:7078"] = "127.0.0.1:0"
    pods = [Pod(tmp_path, m, found, ports) for m in found if m["kind"] in ("StatefulSet", "JobSet")]
    syncer, first, second = pods
    tape = tmp_path / "local-syncer" / "run" / "syncer" / "run.tape"
    with syncer.running() as merges, first.running() as stays:
        assert not syncer.is_ready() and not first.is_ready()
        with second.running() as goes:
            wait_until(lambda: together(tape, 0), "rounds of both pods")
            assert all(pod.is_ready() for pod in pods)
            assert second.pre_stop() == 0, "it returns when the learner has left"
            assert goes.wait(10.0) == LEFT_CODE
        seen = len(list(Tape(tape).records()))
        with second.running() as back:
            wait_until(lambda: together(tape, seen), "the pod that replaced it, in its place")
            back.send_signal(signal.SIGTERM)
            assert back.wait(60.0) == LEFT_CODE
        stays.send_signal(signal.SIGTERM)
        assert stays.wait(60.0) == LEFT_CODE
        merges.send_signal(signal.SIGTERM)
        assert merges.wait(60.0) == 0
    left = [
        (e.learner, e.reason.why) for r in Tape(tape).records() for e in r.effects
        if isinstance(e, Membership) and e.standing == Standing.LEFT
    ]  # fmt: skip
    assert left == [(1, Why.LEAVES_FOR_A_WHILE), (1, Why.LEAVES_FOR_A_WHILE), (0, Why.LEAVES_FOR_A_WHILE)]


def test_syncer_of_a_run_that_is_over_waits_to_be_deleted(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    deployment = Deployment("local", tmp_path / "made", load(recipe), load_placement(recipe))
    ensure_keys(deployment)
    found = manifests(deployment, Path.read_bytes)
    pod = Pod(tmp_path, next(m for m in found if m["kind"] == "StatefulSet"), found, {})
    over = tmp_path / "local-syncer" / "run" / "syncer" / "theta.safetensors"
    over.parent.mkdir()
    over.touch()
    with pod.running() as waits:
        wait_until(lambda: Path(f"/proc/{waits.pid}/comm").read_text() == "sleep\n", "it sleeps", 20.0)


def test_install_script_of_the_container_works_in_an_empty_environment(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "deploy" / "install.sh"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = ["sh", str(script), str(tmp_path / "venv")]
    clean["PYTHON"] = sys.executable
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=clean)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].startswith("atoll ")
    recipe = write_recipe(tmp_path, steps=8)
    command = [str(tmp_path / "venv" / "bin" / "atoll"), "up", str(recipe), "--on", "kubernetes", "--out", "run", "--dry-run"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=clean)
    assert rendered.returncode == 0 and "kind" in rendered.stdout, rendered.stderr
