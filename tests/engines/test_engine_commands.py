"""What engines say to their own commands, and what they make of the answers. The commands are scripts: no cluster answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from command import Ended, atoll

from atoll.config import load, load_placement
from atoll.engines.deployment import Deployment, LearnerReach

RECIPE = Path(__file__).parent / "recipe.toml"
KUBECTL = """#!/bin/sh
echo "$@" >> {folder}/said
case "$*" in
  *apply*) cat > {folder}/applied; cat {folder}/answer ;;
  *"get pods"*) cat {folder}/pods ;;
esac
exit $(cat {folder}/code)
"""
POD = {
    "metadata": {
        "name": "run-learner-1-learner-0-abc", "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"app.kubernetes.io/component": "learner-1"},
    },
    "status": {"phase": "Running", "containerStatuses": [{"restartCount": 2, "state": {"running": {}}}]},
}  # fmt: skip


class Kubectl:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "kubectl").write_text(KUBECTL.format(folder=folder))
        (folder / "kubectl").chmod(0o755)
        self.answers(0, "service/x created\n")

    def answers(self, code: int, applied: str = "", pods: tuple[object, ...] = ()) -> None:
        (self._folder / "code").write_text(str(code))
        (self._folder / "answer").write_text(applied)
        (self._folder / "pods").write_text(json.dumps({"items": pods}))

    @property
    def said(self) -> list[str]:
        return (self._folder / "said").read_text().splitlines()

    @property
    def applied(self) -> list[dict[str, object]]:
        items: list[dict[str, object]] = json.loads((self._folder / "applied").read_text())["items"]
        return items


@pytest.fixture
def kubectl(tmp_path: Path) -> Kubectl:
    return Kubectl(tmp_path / "bin")


def call(tmp_path: Path, *words: object) -> Ended:
    with patch.dict(os.environ, {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}):
        return atoll(*words, cwd=tmp_path)


def test_up_applies_every_manifest_and_status_reads_the_pods(tmp_path: Path, kubectl: Kubectl) -> None:
    run = tmp_path / "run"
    assert call(tmp_path, "up", RECIPE, "--on", "kubernetes", "--out", run).returncode == 0
    kinds = [item["kind"] for item in kubectl.applied]
    assert kinds.count("JobSet") == 3 and kinds.count("Secret") == 4 and kubectl.said[0].startswith("apply --namespace training")
    assert (run / "keys").stat().st_mode & 0o077 == 0, "the keys stay with their owner"

    kubectl.answers(0, "service/x unchanged\n", (POD,))
    again = call(tmp_path, "up", RECIPE, "--on", "kubernetes", "--out", run)
    assert again.returncode == 0 and "is up already" in again.stderr
    shown = json.loads(call(tmp_path, "status", run, "--json").stdout)
    assert shown["is_up"] and shown["workers"]["learner-1"]["state"] == "Running, restarts: 2"
    assert shown["workers"]["learner-0"]["state"] == "no pod"


def test_down_deletes_learners_before_the_syncer_and_keeps_the_volume(tmp_path: Path, kubectl: Kubectl) -> None:
    call(tmp_path, "up", RECIPE, "--on", "kubernetes", "--out", tmp_path / "run")
    assert call(tmp_path, "down", tmp_path / "run").returncode == 0
    first, second = [line for line in kubectl.said if " delete " in line]
    assert "jobsets" in first and "statefulsets" in second and "persistentvolumeclaims" not in first + second


def test_what_an_engine_refuses_is_one_sentence_with_its_words(tmp_path: Path, kubectl: Kubectl) -> None:
    kubectl.answers(1, "the server has no resource type JobSet\n")
    ended = call(tmp_path, "up", RECIPE, "--on", "kubernetes", "--out", tmp_path / "run")
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines() == [
        "atoll: the manifests were not applied: kubectl ended with exit code 1: the server has no resource type JobSet"
    ]


@pytest.mark.parametrize(("engine", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_engine_whose_commands_are_not_here_is_refused(tmp_path: Path, engine: str, program: str) -> None:
    with patch.dict(os.environ, {"PATH": str(tmp_path)}):
        ended = atoll("up", RECIPE, "--on", engine, "--out", tmp_path / "run", cwd=tmp_path)
    assert ended.returncode == 2 and f"this machine has no {program}" in ended.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("up", RECIPE, "--on", "nomad"), "--on nomad: must be one of local, slurm, kubernetes, ray"),
        (("status",), "RUN: name the run's folder; below runs none was brought up here"),
        (("down", "nowhere"), "was not brought up by `atoll up`"),
        (("up", RECIPE, "--out", "7days"), "must begin with a letter"),
        (("leave", "nowhere"), "there is no such folder"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(tmp_path: Path, words: tuple[object, ...], says: str) -> None:
    ended = atoll(*words, cwd=tmp_path)
    assert ended.returncode == 2 and says in ended.stderr


def test_a_groups_ranks_are_in_the_commands_of_its_learners(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    rows = "[[placement.learners]]\ngroup = 'a'\nranks = 4\nparallel = 'fsdp2'\n[[placement.learners]]\ngroup = 'b'\n"
    recipe.write_text(f"preset = 'decoupled'\nlearners = 2\n{rows}")
    deployment = Deployment("ranked", tmp_path / "run", load(recipe), load_placement(recipe))
    several, one = (" ".join(deployment.learner_words(n, reach=LearnerReach())) for n in (0, 1))
    assert "--ranks 4 --parallel fsdp2" in several
    assert "--ranks" not in one


def test_the_syncers_shards_are_in_its_command(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("preset = 'decoupled'\nlearners = 2\n[placement.syncer]\nshards = 4\n")
    deployment = Deployment("sharded", tmp_path / "run", load(recipe), load_placement(recipe))
    assert "--shards 4" in " ".join(deployment.syncer_words("127.0.0.1:0", keys=None))
    refused = atoll("up", recipe, "--preset", "ddp", "--out", tmp_path / "run", "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2 and "placement.syncer.shards = 4" in refused.stderr
