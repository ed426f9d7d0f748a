"""The schema of JobSet that manifests are checked against is what JobSet's own definitions give."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.extras
MAKER = Path(__file__).parents[1] / "engines" / "schemas" / "make_jobset.py"


def test_carried_schema_is_made_from_the_published_definitions() -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="the package kubeflow-trainer-api is not installed")
    spec = importlib.util.spec_from_file_location("make_jobset", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert json.loads(maker.FILE.read_text()) == maker.made()
