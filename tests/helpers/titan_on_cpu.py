"""Runs examples/torchtitan/train.py on CPUs and gloo. torchtitan knows accelerators only: this gives it what it asks of one. What
is replaced are measurements, timeouts, and a kernel and a reduction that a CPU has not; not the trainer, its model or FSDP2.

    torchrun --nproc-per-node 2 tests/helpers/titan_on_cpu.py examples/torchtitan/train.py --syncer ...
"""

from __future__ import annotations

import runpy
import sys
import types
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


def give_the_cpu_what_is_asked_of_a_gpu() -> None:
    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None


def replace_what_a_cpu_lacks() -> None:
    """FlexAttention has no backward pass there, gloo no sum with a factor, and a barrier takes no device."""
    from torchtitan.distributed import utils  # type: ignore[import-not-found]
    from torchtitan.models.common.attention import FlexAttention  # type: ignore[import-not-found]

    def causal(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sum(module: FSDPModule, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FlexAttention._compiled_flex_attn = staticmethod(causal)
    FSDPModule.set_gradient_divide_factor = divide_by_sum  # type: ignore[method-assign]
    utils.set_pg_timeouts = lambda **_: None


if __name__ == "__main__":
    give_the_cpu_what_is_asked_of_a_gpu()
    replace_what_a_cpu_lacks()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
