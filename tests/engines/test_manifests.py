"""Rendered manifests fit Kubernetes' and JobSet's own schemas, and a broken field of each kind is seen."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from schema import flaws

from atoll.config import load, load_placement
from atoll.engines.deployment import LEFT_CODE, Deployment
from atoll.engines.kubernetes import manifests

HERE = Path(__file__).parent
KUBERNETES = json.loads((HERE / "schemas" / "kubernetes-1.34.0.json").read_text())["definitions"]
JOBSET = json.loads((HERE / "schemas" / "jobset-v1alpha2.json").read_text())["definitions"]
SCHEMA_OF = {
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet", "Service": "io.k8s.api.core.v1.Service",
    "Secret": "io.k8s.api.core.v1.Secret", "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget", "JobSet": "JobSet",
}  # fmt: skip


def rendered(tmp_path: Path) -> list[dict[str, Any]]:
    recipe = HERE / "recipe.toml"
    deployment = Deployment("golden", tmp_path / "run", load(recipe), load_placement(recipe))
    return manifests(deployment, lambda path: path.name.encode())


def wrong_in(manifest: dict[str, Any]) -> list[str]:
    definitions = KUBERNETES | JOBSET
    return list(flaws(manifest, definitions[SCHEMA_OF[manifest["kind"]]], definitions, manifest["kind"]))


def test_every_manifest_is_valid_and_every_kind_is_there(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    assert {manifest["kind"] for manifest in found} == set(SCHEMA_OF)
    assert [flaw for manifest in found for flaw in wrong_in(manifest)] == []
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in found]
    assert len(set(names)) == len(names) and all(len(name) <= 63 for _, name in names)


def _pod(jobset: dict[str, Any]) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


BREAKS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("StatefulSet", lambda m: m["spec"].pop("selector")),
    ("StatefulSet", lambda m: m["spec"]["template"]["spec"]["containers"][0]["readinessProbe"].update(tcpSocket={"prot": 1})),
    ("Service", lambda m: m["spec"]["ports"][0].update(port="seven")),
    ("Secret", lambda m: m["data"].update(token=5)),
    ("ConfigMap", lambda m: m.update(content={})),
    ("PodDisruptionBudget", lambda m: m["spec"].update(minAvailable=[1])),
    ("JobSet", lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="RestartEverything")),
    ("JobSet", lambda m: m["spec"]["replicatedJobs"][0].pop("name")),
    ("JobSet", lambda m: _pod(m)["containers"][0]["lifecycle"]["preStop"].update(command=["true"])),
]


@pytest.mark.parametrize(("kind", "damage"), BREAKS)
def test_broken_field_is_refused(tmp_path: Path, kind: str, damage: Callable[[dict[str, Any]], Any]) -> None:
    manifest = copy.deepcopy(next(m for m in rendered(tmp_path) if m["kind"] == kind))
    damage(manifest)
    assert wrong_in(manifest) != []


def test_each_pod_gets_its_own_keys_and_no_other(tmp_path: Path) -> None:
    secrets = {m["metadata"]["name"]: m["data"] for m in rendered(tmp_path) if m["kind"] == "Secret"}
    assert set(secrets["golden-learner-1"]) == {"ca.pem", "learner-1.pem", "learner-1.key", "token"}
    assert set(secrets["golden-syncer"]) == {"ca.pem", "syncer.pem", "syncer.key", "token.key", "token"}
    assert base64.b64decode(secrets["golden-learner-1"]["learner-1.key"]) == b"learner-1.key"
    rest = json.dumps([m for m in rendered(tmp_path) if m["kind"] != "Secret"])
    assert base64.b64encode(b"learner-1.key").decode() not in rest


def test_learner_that_left_is_replaced_without_a_failure_and_has_time_to_leave(tmp_path: Path) -> None:
    jobset = next(m for m in rendered(tmp_path) if m["kind"] == "JobSet")
    rules = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    ignored = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "Ignore" and "onExitCodes" in rule]
    words = _pod(jobset)["containers"][0]["command"]
    assert ignored == [[LEFT_CODE]] and words[words.index("--left-code") + 1] == str(LEFT_CODE)
    assert float(words[words.index("--leave-seconds") + 1]) < 40.0 < _pod(jobset)["terminationGracePeriodSeconds"]
