"""Writes jobset-v1alpha2.json from JobSet's own API definitions, as the package `kubeflow-trainer-api` carries them.

    pip install kubeflow-trainer-api==2.3.0 && python tests/engines/schemas/make_jobset.py

The definitions have no values of enumerations: those are the CRD's, and are added here. Unknown fields are refused, descriptions
are left out, and what Kubernetes itself defines is checked against Kubernetes' own schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = "JobSet v1alpha2, from kubeflow-trainer-api 2.3.0 (Apache-2.0)"
FILE = Path(__file__).with_name("jobset-v1alpha2.json")
OWN = "JobsetV1alpha2"
VALUES = {
    "DependsOn.status": ["Ready", "Complete"],
    "FailurePolicy.restartStrategy": ["Recreate", "BlockingRecreate", "InPlaceRestart"],
    "FailurePolicyRule.action": [
        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts",
    ],
    "FailurePolicyRule.onJobFailureReasons": [
        "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
    ],
    "JobSet.apiVersion": ["jobset.x-k8s.io/v1alpha2"],
    "JobSet.kind": ["JobSet"],
    "StartupPolicy.startupPolicyOrder": ["AnyOrder", "InOrder"],
    "SuccessPolicy.operator": ["All", "Any"],
}  # fmt: skip
KUBERNETES = {
    "IoK8sApiBatchV1JobTemplateSpec": "io.k8s.api.batch.v1.JobTemplateSpec",
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
}
NOT_RENDERED = {"JobSet.status", "JobSetSpec.volumeClaimPolicies"}
"""The first is the cluster's to write; the second reaches definitions that no manifest of Atoll uses."""


def made() -> dict[str, Any]:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # type: ignore[import-not-found]

    whole = JobsetV1alpha2JobSet.model_json_schema()
    theirs = whole.pop("$defs") | {f"{OWN}JobSet": whole}
    definitions, open_names = {}, ["JobSet"]
    while open_names:
        name = open_names.pop()
        if name not in definitions:
            definitions[name] = _strict(name, theirs[OWN + name])
            open_names += [found for found in _references(definitions[name]) if OWN + found in theirs]
    return {"jobset": SOURCE, "definitions": dict(sorted(definitions.items()))}


def _strict(name: str, definition: dict[str, Any]) -> dict[str, Any]:
    fields = {}
    for field, schema in definition["properties"].items():
        if f"{name}.{field}" not in NOT_RENDERED:
            fields[field] = _plain(schema, VALUES.get(f"{name}.{field}"))
    required = ["apiVersion", "kind", "metadata", "spec"] if name == "JobSet" else definition.get("required", [])
    return {"type": "object", "additionalProperties": False, "required": required, "properties": fields}


def _plain(schema: dict[str, Any], values: list[str] | None) -> dict[str, Any]:
    """Without words, defaults and the null that pydantic allows for a field that is left out."""
    kept = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
    if "$ref" in kept:
        name = kept["$ref"].rpartition("/")[2]
        return {"$ref": "#/definitions/" + KUBERNETES.get(name, name.removeprefix(OWN))}
    if kept["type"] == "array":
        return {"type": "array", "items": _plain(kept["items"], values)}
    return {"type": kept["type"]} | ({"enum": values} if values else {})


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n")
