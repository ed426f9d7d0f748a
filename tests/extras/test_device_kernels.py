"""The GPU's codec kernels, by the interpreter of Triton, give the bytes of torch. On a GPU the tests of staging compare them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extras
SCRIPT = Path(__file__).parents[1] / "helpers" / "interpreted_codecs.py"


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "e3m0"])
def test_kernels_give_the_bytes_of_torch(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, SCRIPT, name], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split()[-1:] == ["equal"]
