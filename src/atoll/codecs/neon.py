"""int4 and e3m0 on ARM's vector unit: handwritten LLVM IR, compiled once per process by llvmlite. It changes speed, not results.

Why at all: in torch every operation is a separate pass, and these codecs make 5 to 14; even inside the cache that takes as long
as 6 to 14 copies of x. Here one pass is enough, and whole calls take as long as 1.1 to 1.6 copies.

Why handwritten IR: training machines often have no compiler, and llvmlite is one wheel. numba's loops (through the same LLVM)
took as long as 3 to 9 copies for three of the four jobs: its vectoriser uses neither the table lookups nor the narrowing used
here. Fixed vectors of 16 elements state the intent, and LLVM still selects instructions and registers.

The cost in vector operations per four elements (a Neoverse-N1 starts two per cycle; a copy takes about five):
    encode int4      4.9    magnitude 1, maximum 1, product 1, sum with the magic number 1, narrow and pack 0.9
    encode e3m0      5.6    magnitude 1, maximum 1, product 1, bits to codes and pack 2.6
    accumulate int4  4.3    codes to floats 2.3, product 1, sum 1
    accumulate e3m0  3.3    codes to floats 2.3, fused product and sum 1
They are hardly faster on data that is already in L1, so fewer operations would help and more prefetching would not.

Why the bytes equal torch's: each element has the same roundings in the same order. No fast-math flag is set, so LLVM neither
reorders nor fuses. Where the steps differ (maxima of bits, codes by table), both are exact; `neon_ir` gives the reasons.

Pointers need only the alignment of their element. Sums and codes do not depend on threads: each call runs in the caller's
thread, without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from atoll.codecs.layout import BLOCK
from atoll.codecs.neon_ir import module_text

NAMES: Final = ("int4", "e3m0")
FACTOR_LIMIT: Final = 2.0**120
"""Below this no product of code and factor overflows: the largest code expands to 128."""

_INFINITY_BITS: Final = 0x7F800000
_CODES: Final = BLOCK // 2
"""Bytes per block."""


class Neon:
    """The compiled kernels. They process whole blocks; the caller processes the short block at the end."""

    def __init__(self) -> None:
        """Takes 0.2 s, once. ImportError without llvmlite."""
        llvm: Any = importlib.import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(module_text())
        module.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
        )
        module.triple = llvm.get_default_triple()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the machine code: lives as long as this
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        jobs = [f"{job}_{name}" for name in NAMES for job in ("encode", "decode", "accumulate")]
        self._functions: dict[str, Callable[..., int]] = {job: kind(self._engine.get_function_address(job)) for job in jobs}

    def encode(self, name: str, x: Tensor, blocks: int, scales: Tensor, codes: Tensor) -> bool:
        """Fills scales and codes, rounded to nearest. False if x has NaN or Inf; both are then garbage."""
        return self._call(f"encode_{name}", x, blocks, scales, codes) < _INFINITY_BITS

    def decode(self, name: str, out: Tensor, blocks: int, factors: Tensor, codes: Tensor) -> None:
        self._call(f"decode_{name}", out, blocks, factors, codes)

    def accumulate(self, name: str, into: Tensor, blocks: int, factors: Tensor, codes: Tensor) -> None:
        """into += factor * code. Factors must be below FACTOR_LIMIT."""
        self._call(f"accumulate_{name}", into, blocks, factors, codes)

    def _call(self, job: str, elements: Tensor, blocks: int, per_block: Tensor, codes: Tensor) -> int:
        # The compiled code checks no bounds, so they are checked here.
        for part, dtype, count in ((elements, torch.float32, BLOCK), (per_block, torch.float32, 1), (codes, torch.int8, _CODES)):
            fits = part.dtype == dtype and part.is_contiguous() and part.device.type == "cpu"
            assert fits and part.numel() >= blocks * count, f"{job} of {blocks} blocks got {tuple(part.shape)} {part.dtype}"
        assert blocks > 0, "the kernels read the first block before they count"
        return self._functions[job](elements.data_ptr(), blocks, per_block.data_ptr(), codes.data_ptr())
