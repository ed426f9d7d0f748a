from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.codecs import available_kernels, kernels


# One scope for a whole module: hypothesis refuses fixtures that belong to a function.
@pytest.fixture(scope="module", params=available_kernels())
def each_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs tests on torch's kernels, and again on the compiled ones where this machine has them."""
    with kernels(request.param):
        yield request.param
