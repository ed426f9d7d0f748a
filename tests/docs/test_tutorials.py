"""Code of the tutorials: what a reader copies must run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in PYTHON.findall(page.read_text(encoding="utf8")):
        ast.parse(block)


def test_the_merge_and_the_codec_of_the_tutorial_train(tmp_path: Path) -> None:
    merge, codec = PYTHON.findall((DOCS / "tutorials" / "merge-rule.md").read_text(encoding="utf8"))
    (tmp_path / "my_merges.py").write_text(merge, encoding="utf8")
    (tmp_path / "my_codecs.py").write_text(codec, encoding="utf8")
    command = (
        "train --virtual --learners 3 --set total_steps=12 --set protocol.merge=median --set protocol.codec_up=sign "
        "--set protocol.local_steps_per_round=4 --set protocol.fragments=4 "
        "--allow-plugin my_merges.py --allow-plugin my_codecs.py --out run --json"
    )
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *command.split()],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["loss_final"] < summary["loss_first"]
