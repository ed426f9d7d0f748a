"""Which cases of a parametrized test are for `make test`, and which are repetition that `make soak` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_soak(cases: Iterable[Any], *, keep: Iterable[Any]) -> list[Any]:
    """All cases, for `parametrize`; those not in `keep` are left to `make soak`."""
    kept, every = list(keep), list(cases)
    assert all(case in every for case in kept), "what is kept must be one of the cases"
    return [case if case in kept else _soaked(case) for case in every]


def _soaked(case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.soak) if isinstance(case, tuple) else pytest.param(case, marks=pytest.mark.soak)
