"""Which kernels work on a tensor: torch's operations, everywhere, or `neon`'s compiled ones, where there are such.

Bytes, sums and errors are the same on both. The choice is a matter of speed and never of results, so nobody has to
know it, record it, or agree on it with another machine.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from torch import Tensor

from atoll.codecs import neon
from atoll.codecs.layout import BLOCK
from atoll.errors import ConfigError

WORTHWHILE: Final = 16_384
"""Elements. Compiled, the kernels are ahead from the first block on (0.1 to 0.2 ms a call against 0.3 to 0.6), but it
takes some hundred calls to win back the compilation: a process with small tensors alone shall never pay it."""

_forced: ContextVar[str | None] = ContextVar("kernels", default=None)
_lock = threading.Lock()
_built: list[neon.Neon | None] = []
"""Empty until first asked for; then the kernels, or None where there are none."""


def kernels_for(name: str, *tensors: Tensor) -> neon.Neon | None:
    """The compiled kernels if they can do that codec on these tensors and it is worthwhile, None for torch's. The first
    tensor holds the elements. They round to nearest; who rounds stochastically does not ask."""
    forced = _forced.get()
    if name not in neon.NAMES or forced == "torch" or tensors[0].numel() < (BLOCK if forced else WORTHWHILE):
        return None
    # What autograd follows goes to torch, which refuses it.
    fit = all(t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad for t in tensors)
    return _neon() if fit else None


def below(factors: Tensor, limit: float) -> bool:
    """False too where there is NaN."""
    low, high = factors.aminmax()
    return -limit < float(low) and float(high) < limit


def available_kernels() -> tuple[str, ...]:
    return ("torch",) if _neon() is None else ("torch", "neon")


def kernels_in_use() -> str:
    """What int4 and e3m0 on a large CPU tensor take here and now: "neon" or "torch"."""
    return _forced.get() or available_kernels()[-1]


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Forces a choice for this thread, whatever the size: for tests and benchmarks. ConfigError where it cannot be had."""
    if name not in available_kernels():
        raise ConfigError(f"kernels {name!r} are not to be had here; there are {', '.join(available_kernels())}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def _neon() -> neon.Neon | None:
    """Compiles at the first call, once a process."""
    if not _built:
        with _lock:
            if not _built:
                _built.append(_build())
    return _built[0]


def _build() -> neon.Neon | None:
    # Tables are written for this byte order, and macOS calls the machine arm64: nobody has tried there.
    if platform.machine() != "aarch64" or sys.byteorder != "little" or importlib.util.find_spec("llvmlite") is None:
        return None
    try:
        return neon.Neon()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # An llvmlite too old for this IR, or memory that may not be executed. Work goes on as well, only slower.
        warnings.warn(f"the fast int4 and e3m0 kernels are not available: {error}", RuntimeWarning, stacklevel=2)
        return None
