"""Chooses the kernels for a tensor: torch's operations, or compiled ones where there are: of `neon` on ARM, of `device` on a GPU.

Bytes, sums and errors are the same with both. The choice affects speed and never results, so it need not be recorded or agreed
between machines.
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
from functools import cache
from types import ModuleType
from typing import Final

from torch import Tensor

from atoll.codecs import neon
from atoll.codecs.layout import BLOCK
from atoll.errors import ConfigError

WORTHWHILE: Final = 16_384
"""Elements. Compiled kernels are faster from the first block on (0.1 to 0.2 ms per call against 0.3 to 0.6), but it takes about
a hundred calls to recover the time of compilation: a process with small tensors only should never compile."""

_forced: ContextVar[str | None] = ContextVar("kernels", default=None)
_lock = threading.Lock()
_built: list[neon.Neon | None] = []
"""Empty until the first request; then the kernels, or None if there are none."""


def kernels_for(name: str, *tensors: Tensor) -> neon.Neon | None:
    """The compiled kernels if they support that codec on these tensors and are worthwhile; None means torch's. The first tensor
    has the elements. They round to nearest only; stochastic rounding always uses torch."""
    forced = _forced.get()
    if name not in neon.NAMES or forced == "torch" or tensors[0].numel() < (BLOCK if forced else WORTHWHILE):
        return None
    # Tensors that require grad go to torch, which refuses them.
    fit = all(t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad for t in tensors)
    return _neon() if fit else None


def on_gpu(name: str, *tensors: Tensor) -> ModuleType | None:
    """`codecs.device`, if it has that codec and these tensors are on a GPU. Like `kernels_for` it rounds to nearest only."""
    if not tensors[0].is_cuda or tensors[0].numel() < BLOCK or _forced.get() == "torch":
        return None
    if not all(t.is_cuda and t.is_contiguous() and not t.requires_grad for t in tensors):
        return None
    device = _triton()
    return device if device is not None and name in device.FORMS else None


@cache
def _triton() -> ModuleType | None:
    """Compiles a kernel at the first call, which must not be while a graph is captured."""
    if importlib.util.find_spec("triton") is None:
        return None
    from atoll.codecs import device  # it imports Triton, which machines without a GPU need not have

    try:
        device.try_out()
    except Exception as error:  # Triton calls the machine's C compiler, and fails in ways of its own where there is none
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"the fast codecs for a GPU are not available: {why}", RuntimeWarning, stacklevel=2)
        return None
    return device


def below(factors: Tensor, limit: float) -> bool:
    """False also if there is a NaN."""
    low, high = factors.aminmax()
    return -limit < float(low) and float(high) < limit


def available_kernels() -> tuple[str, ...]:
    return ("torch",) if _neon() is None else ("torch", "neon")


def kernels_in_use() -> str:
    """The kernels of int4 and e3m0 on a large CPU tensor in this process: "neon" or "torch"."""
    return _forced.get() or available_kernels()[-1]


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Forces a choice for this thread, for any size: for tests and benchmarks. ConfigError if it is not available."""
    if name not in available_kernels():
        raise ConfigError(f"kernels {name!r} are not available here; use one of {', '.join(available_kernels())}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def _neon() -> neon.Neon | None:
    """Compiles at the first call, once per process."""
    if not _built:
        with _lock:
            if not _built:
                _built.append(_build())
    return _built[0]


def _build() -> neon.Neon | None:
    # The tables are for this byte order. macOS reports arm64 and is left out: it is not tested.
    if platform.machine() != "aarch64" or sys.byteorder != "little" or importlib.util.find_spec("llvmlite") is None:
        return None
    try:
        return neon.Neon()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # An llvmlite too old for this IR, or memory that may not be executed. torch's kernels give the same results, slower.
        warnings.warn(f"the fast int4 and e3m0 kernels are not available: {error}", RuntimeWarning, stacklevel=2)
        return None
