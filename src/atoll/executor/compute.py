"""How a learner computes its forward and backward pass on its own device: the precision, and whether torch.compile builds them.

A config says `auto` or names both; each learner resolves it for itself, so learners of one run may differ. Weights, moments and
what is exchanged are fp32 always, so none of this is visible to another process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.config import Config
from atoll.errors import ConfigError, UserError

BatchLoss = Callable[[nn.Module, Any], Tensor]
COMPILERS = ("c++", "g++", "clang++")
WORDS_MAX = 200
CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Buffers with which cuBLAS is deterministic, as its documentation says."""


class ComputeMode(NamedTuple):
    precision: str
    """`fp32`, `tf32` or `bf16`."""
    compiled: bool
    deterministic: bool = False
    """On a GPU; a CPU always is, and need not say so."""

    def __str__(self) -> str:
        how = f"{self.precision}, {'compiled' if self.compiled else 'eager'}"
        return f"{how}, deterministic" if self.deterministic else how


PLAIN = ComputeMode("fp32", compiled=False)


def resolved(config: Config, device: torch.device) -> ComputeMode:
    """What `auto` is on this device. What the device cannot do is refused; nothing falls back."""
    m = config.model
    cuda = device.type == "cuda"
    precision = m.precision if m.precision != "auto" else ("bf16" if cuda else "fp32")
    compiled = cuda if m.compile == "auto" else m.compile == "on"
    if precision == "tf32" and not cuda:
        raise UserError(f"key model.precision = 'tf32': is a mode of NVIDIA GPUs, and this learner is on {device}; write 'fp32'")
    if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"key model.precision = '{m.precision}': {name} has no bf16; write model.precision = 'fp32' or 'tf32'")
    if compiled and (lacking := _lacking(cuda)):
        raise UserError(f"key model.compile = '{m.compile}': there is no {lacking} here; write model.compile = 'off'")
    return ComputeMode(precision, compiled, deterministic=cuda and m.deterministic)


def _lacking(cuda: bool) -> str:
    if cuda:
        return "" if importlib.util.find_spec("triton") else "Triton"
    return "" if any(map(shutil.which, COMPILERS)) else "C++ compiler"


def autocast(compute: ComputeMode, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if compute.precision == "bf16" else nullcontext()


def use_matrix_precision(compute: ComputeMode, device: torch.device) -> None:
    """For the whole process: fp32 products that autocast leaves take TF32, unless fp32 was asked for."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if compute.precision == "fp32" else "high")
        if compute.deterministic:
            use_deterministic(compiled=compute.compiled)


def use_deterministic(*, compiled: bool) -> None:
    """For the whole process, before its first product on a GPU: cuBLAS reads its setting once. An operation of torch that has no
    deterministic form raises an error that names it."""
    os.environ.setdefault(*CUBLAS_SETTING)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    if compiled:
        from torch._inductor import config as inductor

        # Without it the compiler times several forms of a reduction and takes the fastest, which need not be the same twice.
        inductor.deterministic = True


def loss_of(task_loss: BatchLoss, compute: ComputeMode, device: torch.device) -> BatchLoss:
    """The task's loss as this learner computes it."""
    use_matrix_precision(compute, device)

    def in_precision(model: nn.Module, batch: Any) -> Tensor:
        with autocast(compute, device):
            return task_loss(model, batch)

    return torch.compile(in_precision) if compute.compiled else in_precision


@contextmanager
def compiling(model_name: str) -> Iterator[None]:
    """Around the first forward and backward pass. What goes wrong in torch.compile is one sentence, with the key that helps."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:WORDS_MAX]
        raise ConfigError(
            f"key model.compile: model {model_name!r} cannot be compiled ({first}); write model.compile = 'off'"
        ) from error


def warm_up(model: nn.Module, loss: BatchLoss, batch: Any, model_name: str) -> None:
    """One forward and backward pass whose result is thrown away: compilation takes a minute, and is no part of a step."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    with compiling(model_name):
        loss(model, batch).backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)
