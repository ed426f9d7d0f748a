"""`--on kubernetes`: manifests for a StatefulSet (the syncer) and one JobSet for each learner, applied by kubectl.

One JobSet per learner, because a JobSet restarts all of itself. The pods share no folder: the recipe comes from a ConfigMap, keys
from a Secret of each pod's own, and the syncer's folder is a volume that outlives its pod. An eviction runs `preStop`, which is a
leave; a pod that ends with the exit code after it is replaced without counting a failure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atoll.engines.commands import follow_command, run_command
from atoll.engines.deployment import (
    LEFT_CODE,
    SYNCER,
    Deployment,
    EngineState,
    LearnerReach,
    Rendered,
    WorkerStatus,
    learner_name,
)
from atoll.engines.record import UpRecord, prepare_folder, record_of, write_record
from atoll.engines.trust import ensure_keys, learner_files, syncer_files
from atoll.toml import to_toml

NAME: Final = "kubernetes"
PORT: Final = 7077
PEER_PORT: Final = 7078
RUN: Final = Path("/var/lib/atoll")
"""The run's folder in every container."""
KEYS: Final = Path("/etc/atoll/keys")
RECIPE: Final = Path("/etc/atoll/recipe")
USER: Final = 1000
"""Of the container file."""
PYTHON: Final = "python3"
GRACE_SLACK_SECONDS: Final = 15
"""Beyond the time to leave, before Kubernetes kills."""
USERS_FAULT: Final = 2
RESTARTS_MAX: Final = 50
DELETE_SECONDS: Final = 120
LABEL: Final = "app.kubernetes.io"

KubernetesObject = dict[str, Any]
ReadFile = Callable[[Path], bytes]


class KubernetesEngine:
    """Engine: see choose.py."""

    def render(self, deployment: Deployment) -> list[Rendered]:
        shown = manifests(deployment, lambda path: b"")
        for manifest in shown:
            if manifest["kind"] == "Secret":
                manifest["data"] = dict.fromkeys(manifest["data"], "(secret)")
        files = [Rendered(f"{m['kind']} {m['metadata']['name']}", json.dumps(m, indent=1) + "\n") for m in shown]
        namespace = deployment.placement.kubernetes.namespace
        return [*files, Rendered("commands", f"kubectl apply --namespace {namespace} -f -\n")]

    def up(self, deployment: Deployment) -> bool:
        prepare_folder(deployment)
        ensure_keys(deployment)
        namespace = deployment.placement.kubernetes.namespace
        items = {"apiVersion": "v1", "kind": "List", "items": manifests(deployment, Path.read_bytes)}
        words = ["kubectl", "apply", "--namespace", namespace, "-f", "-"]
        printed = run_command(words, "the manifests were not applied", json.dumps(items))
        write_record(record_of(deployment, NAME, namespace=namespace))
        return any(not line.endswith(" unchanged") for line in printed.splitlines())

    def status(self, record: UpRecord) -> EngineState:
        words = [*_kubectl(record), "get", "pods", "--selector", _selector(record.name), "--output", "json"]
        found: dict[str, Any] = {}
        for pod in json.loads(run_command(words, "the pods cannot be listed"))["items"]:
            worker = pod["metadata"].get("labels", {}).get(f"{LABEL}/component", "")
            if worker not in found or pod["metadata"]["creationTimestamp"] > found[worker]["metadata"]["creationTimestamp"]:
                found[worker] = pod
        workers = [_status_of(worker, found.get(worker)) for worker in record.workers]
        return EngineState(workers, bool(found))

    def logs(self, record: UpRecord, workers: list[str], follow: bool) -> Iterator[tuple[str, str]]:
        base = [*_kubectl(record), "logs", "--tail=-1", *(["--follow"] if follow else []), "--selector"]
        if follow and len(workers) > 1:  # kubectl follows them all at once, and names each line's pod
            words = [*base, _selector(record.name), "--prefix", f"--max-log-requests={len(record.workers) + 1}"]
            yield from ((record.name, line) for line in follow_command(words, "the logs cannot be read"))
            return
        for worker in workers:
            words = [*base, f"{_selector(record.name)},{LABEL}/component={worker}"]
            yield from ((worker, line) for line in follow_command(words, f"the logs of {worker} cannot be read"))

    def down(self, record: UpRecord) -> None:
        """Learners first: deleting a JobSet runs the preStop of its pods, which waits until they have left. The volume stays."""
        for kinds in ("jobsets.jobset.x-k8s.io", "statefulsets,services,poddisruptionbudgets,secrets,configmaps"):
            seconds = round(record.leave_seconds) + GRACE_SLACK_SECONDS + DELETE_SECONDS
            words = [*_kubectl(record), "delete", kinds, "--selector", _selector(record.name), "--cascade=foreground", "--wait"]
            run_command([*words, f"--timeout={seconds}s"], f"{kinds} were not deleted", seconds=seconds + 10)


def _kubectl(record: UpRecord) -> list[str]:
    return ["kubectl", "--namespace", str(record.details["namespace"])]


def _selector(name: str) -> str:
    return f"{LABEL}/instance={name}"


def _status_of(worker: str, pod: Any) -> WorkerStatus:
    if pod is None:
        return WorkerStatus(worker, "no pod")
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    waiting = next((c["state"]["waiting"].get("reason", "") for c in containers if "waiting" in c.get("state", {})), "")
    restarts = sum(int(c.get("restartCount", 0)) for c in containers)
    state = waiting or status.get("phase", "Unknown")
    note = status.get("message", "") or next((c.get("message", "") for c in status.get("conditions", []) if c.get("message")), "")
    return WorkerStatus(worker, state + (f", restarts: {restarts}" if restarts else ""), f"pod {pod['metadata']['name']}", note)


# ---------------------------------------------------------------- manifests


def manifests(deployment: Deployment, read: ReadFile) -> list[KubernetesObject]:
    """In the order in which they are applied. `read` gives the keys' files, which `--dry-run` does not have."""
    inside = replace(deployment, run=RUN, python=PYTHON)
    found = [_recipe(deployment), _secret(deployment, SYNCER, syncer_files(deployment.keys) or _expected(deployment), read)]
    found += [_secret(deployment, learner_name(n), learner_files(deployment.keys, n), read) for n in deployment.learners]
    found += [_service(deployment), _syncer(inside, deployment), _budget(deployment, SYNCER, {"maxUnavailable": 1})]
    groups = deployment.placement.groups(deployment.settings.learners)
    found += [_budget(deployment, group.group, {"minAvailable": group.least or 1}) for group in groups]
    return found + [_learner(inside, n) for n in deployment.learners]


def _expected(deployment: Deployment) -> list[Path]:
    """Before the keys are made."""
    return [deployment.keys / name for name in ("ca.pem", "syncer.pem", "syncer.key", "token.key", "token")]


def _named(deployment: Deployment, worker: str, group: str = "") -> KubernetesObject:
    labels = {f"{LABEL}/name": "atoll", f"{LABEL}/instance": deployment.name, f"{LABEL}/component": worker}
    if group:
        labels["atoll/group"] = group
    return {"name": f"{deployment.name}-{worker}", "namespace": deployment.placement.kubernetes.namespace, "labels": labels}


def _recipe(deployment: Deployment) -> KubernetesObject:
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": _named(deployment, "recipe"),
        "data": {"config.toml": to_toml(deployment.settings)},
    }  # fmt: skip


def _secret(deployment: Deployment, worker: str, files: list[Path], read: ReadFile) -> KubernetesObject:
    data = {path.name: base64.b64encode(read(path)).decode() for path in files}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _named(deployment, worker), "type": "Opaque", "data": data}


def _service(deployment: Deployment) -> KubernetesObject:
    """Headless: a name for the syncer's pod, wherever it runs. It answers once the syncer listens."""
    spec = {
        "clusterIP": "None", "selector": _named(deployment, SYNCER)["labels"],
        "ports": [{"name": "grpc", "port": _port(deployment), "targetPort": "grpc"}],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Service", "metadata": _named(deployment, SYNCER), "spec": spec}


def _port(deployment: Deployment) -> int:
    return deployment.placement.syncer.port or PORT


def _budget(deployment: Deployment, who: str, allows: KubernetesObject) -> KubernetesObject:
    """For drains of nodes. A syncer may go: its volume follows it, and learners train on meanwhile."""
    labels = _named(deployment, SYNCER)["labels"]
    if who != SYNCER:
        del labels[f"{LABEL}/component"]
        labels["atoll/group"] = who
    return {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": _named(deployment, SYNCER if who == SYNCER else f"group-{who}"),
        "spec": allows | {"selector": {"matchLabels": labels}},
    }  # fmt: skip


def _container(inside: Deployment, worker: str, command: list[str]) -> KubernetesObject:
    resources, _, environment = inside.needs(worker)
    amounts: KubernetesObject = {"cpu": str(resources.cpus), "memory": f"{round(1024 * resources.memory_gb)}Mi"}
    limits = {"memory": amounts["memory"]} | ({"nvidia.com/gpu": str(resources.gpus)} if resources.gpus else {})
    return {
        "name": "syncer" if worker == SYNCER else "learner", "image": inside.placement.kubernetes.image, "command": command,
        "resources": {"requests": amounts, "limits": limits},
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, {"name": "HOME", "value": str(RUN)},
            *({"name": name, "value": value} for name, value in sorted(environment.items())),
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "run", "mountPath": str(RUN)}, {"name": "keys", "mountPath": str(KEYS), "readOnly": True}],
    }  # fmt: skip


def _pod(inside: Deployment, worker: str, container: KubernetesObject, volumes: list[KubernetesObject]) -> KubernetesObject:
    _, site, _ = inside.needs(worker)
    group = "" if worker == SYNCER else inside.group_of[int(worker.removeprefix("learner-"))].group
    keys = {"name": "keys", "secret": {"secretName": f"{inside.name}-{worker}", "defaultMode": 0o440}}
    spec: KubernetesObject = {
        "containers": [container], "volumes": [keys, *volumes], "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "terminationGracePeriodSeconds": round(inside.placement.leave_seconds) + GRACE_SLACK_SECONDS,
    }  # fmt: skip
    if site:
        spec["nodeSelector"] = {"topology.kubernetes.io/zone": site}
    return {"metadata": {"labels": _named(inside, worker, group)["labels"]}, "spec": spec}


def _syncer(inside: Deployment, deployment: Deployment) -> KubernetesObject:
    """A StatefulSet starts a container that has ended again. After the run's end it only waits to be deleted."""
    words = inside.syncer_words(f"0.0.0.0:{_port(inside)}", keys=KEYS)
    words[1] = str(RECIPE / "config.toml")
    over = f'if [ -e {RUN}/{SYNCER}/theta.safetensors ]; then exec sleep infinity; fi; exec "$@"'
    container = _container(inside, SYNCER, ["sh", "-c", over, "atoll", PYTHON, "-m", "atoll", *words])
    listens = {"tcpSocket": {"port": "grpc"}}
    container |= {
        "ports": [{"name": "grpc", "containerPort": _port(inside)}],
        "startupProbe": listens | {"periodSeconds": 5, "failureThreshold": 720},  # an hour: text is encoded first
        "readinessProbe": listens | {"periodSeconds": 5},
    }
    container["volumeMounts"].append({"name": "recipe", "mountPath": str(RECIPE), "readOnly": True})
    recipe = {"name": "recipe", "configMap": {"name": f"{deployment.name}-recipe"}}
    place = inside.placement.kubernetes
    claim: KubernetesObject = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{place.storage_gb}Gi"}}}
    if place.storage_class:
        claim["storageClassName"] = place.storage_class
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _named(deployment, SYNCER),
        "spec": {
            "replicas": 1, "serviceName": f"{deployment.name}-{SYNCER}",
            "selector": {"matchLabels": _named(deployment, SYNCER)["labels"]},
            "template": _pod(inside, SYNCER, container, [recipe]),
            "volumeClaimTemplates": [{"metadata": {"name": "run"}, "spec": claim}],
        },
    }  # fmt: skip


def _learner(inside: Deployment, learner: int) -> KubernetesObject:
    worker, out = learner_name(learner), str(inside.out(learner))
    place, group = inside.placement.kubernetes, inside.group_of[learner].group
    host = inside.placement.syncer.host or f"{inside.name}-{SYNCER}.{place.namespace}.svc"
    reach = LearnerReach(keys=KEYS, syncer=f"{host}:{_port(inside)}", listen=f"$(POD_IP):{PEER_PORT}")
    leave = ["leave", out, "--within", f"{inside.delivery_seconds:g}", "--wait", f"{inside.placement.leave_seconds:g}"]
    container = _container(inside, worker, [PYTHON, "-m", "atoll", *inside.learner_words(learner, reach=reach)])
    container |= {
        "ports": [{"name": "peers", "containerPort": PEER_PORT}],
        "lifecycle": {"preStop": {"exec": {"command": [PYTHON, "-m", "atoll", *leave]}}},
        "readinessProbe": {"exec": {"command": ["sh", "-c", f"ls {out}/*.tape"]}, "periodSeconds": 10},  # it has its place
    }
    pod = _pod(inside, worker, container, [{"name": "run", "emptyDir": {}}])
    pod["spec"]["restartPolicy"] = "Never"
    job = {
        "parallelism": 1, "completions": 1, "backoffLimit": RESTARTS_MAX, "template": pod,
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"containerName": "learner", "operator": "In", "values": [LEFT_CODE]}},
            {"action": "FailJob", "onExitCodes": {"containerName": "learner", "operator": "In", "values": [USERS_FAULT]}},
        ]},
    }  # fmt: skip
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _named(inside, worker, group),
        "spec": {
            "failurePolicy": {
                "maxRestarts": RESTARTS_MAX,
                "rules": [{"name": "input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "learner", "replicas": 1, "template": {"spec": job}}],
        },
    }  # fmt: skip
