"""What `atoll up --dry-run` prints for each engine, word by word: a change of it is read in the diff. `ATOLL_GOLDEN=write`
rewrites the files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command import atoll

HERE = Path(__file__).parent
ENGINES = ("local", "slurm", "kubernetes", "ray")


@pytest.mark.parametrize("engine", ENGINES)
def test_dry_run_prints_what_would_be_submitted_and_does_nothing(engine: str, tmp_path: Path) -> None:
    run = tmp_path / "golden"
    ended = atoll("up", HERE / "recipe.toml", "--on", engine, "--out", run, "--dry-run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.replace(str(run), "/RUN").replace(sys.executable, "/PYTHON")
    golden = HERE / "golden" / f"{engine}.txt"
    if os.environ.get("ATOLL_GOLDEN") == "write":
        golden.write_text(printed, encoding="utf8")
    assert printed == golden.read_text(encoding="utf8")
    assert not list(tmp_path.iterdir()), "nothing was made"
