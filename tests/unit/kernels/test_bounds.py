"""The loops read and write within their arrays. Without numba's own checks a read beyond an end is a wrong number at best."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.soak
def test_loops_stay_within_their_arrays(tmp_path: Path) -> None:
    """All tests of the loops once more, compiled with checks."""
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    files = [TESTS / "unit" / "kernels" / "test_fused.py", TESTS / "unit" / "executor" / "test_shards.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-m", "not soak", *map(str, files)], cwd=TESTS.parent, env=os.environ | checked,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
