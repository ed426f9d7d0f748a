"""Code of the tutorials: what a reader copies must run."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from command import atoll
from pages import DOCS
from plugged import plugged

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
        "--set protocol.local_steps_per_round=4 --set protocol.fragments=4 --out run --json"
    )
    with plugged(Path("my_merges.py"), Path("my_codecs.py")) as allow:
        done = atoll(*command.split(), *allow, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["loss_final"] < summary["loss_first"]
