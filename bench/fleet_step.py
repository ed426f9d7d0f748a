"""What a step of a fleet costs a device, part by part: where the time of the quality runs goes.

    python bench/fleet_step.py --size 35M --learners 1 8 --compiled --out bench/results/fleet_step.jsonl
    python bench/fleet_step.py --size nano --learners 2 --vocab 257 --step-tokens 512 --seq-len 32 --device cpu   # to try it

The learners share `--step-tokens`, Muon inside, batches of random tokens. A JSON line for each number of learners, in
milliseconds, the median of `--steps`: `loss_ms` forward and backward, `optimizer_ms`, and `step_ms` of both without a wait
between them; `tokens_per_second`, and `tflops` by six operations a parameter and token. --profile prints the kernels that
take longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from atoll.config import Config, load
from atoll.config.models import SIZES
from atoll.executor.compute import ComputeMode, autocast, use_matrix_precision
from atoll.executor.fleet.optimizer import StackedOptimizer
from atoll.executor.optim.build import build_optimizer, turned_names
from atoll.tensors.layout import build_layout
from atoll.workload.models.decoder import Decoder, build_model
from atoll.workload.models.stacked import stacked_loss

WARM = 5
ROWS = 25
"""Of the profile."""


class FleetStep:
    """The two parts of `executor.fleet.Fleet.flush`, without a run around them."""

    def __init__(self, given: argparse.Namespace, learners: int, device: torch.device) -> None:
        numbers = SIZES[given.size] | {"vocab": given.vocab}
        self._config = settings(given, learners)
        model = build_model("decoder", numbers, seed=0)
        assert isinstance(model, Decoder)
        fragments = build_layout(model, "whole").fragments
        self.parameters = sum(p.numel() for p in model.parameters())
        self._shape, self._device = model.shape, device
        self._compute = ComputeMode("bf16" if device.type == "cuda" else "fp32", given.compiled)
        use_matrix_precision(self._compute, device)
        named = {name: p.detach().to(device) for name, p in model.named_parameters()}
        self._weights = {name: torch.stack([p] * learners).requires_grad_() for name, p in named.items()}
        self._cos, self._sin = model.cos.to(device), model.sin.to(device)
        turned = turned_names(self._config, fragments)
        self._moments = StackedOptimizer(self._config, self._weights, turned, compiled=given.compiled)
        own = [{name: w.detach()[m] for name, w in self._weights.items()} for m in range(learners)]
        self._who = {m: (1, build_optimizer(self._config, each, fragments)) for m, each in enumerate(own)}
        samples = given.step_tokens // given.seq_len // learners
        rng = torch.Generator().manual_seed(0)
        self._batch = torch.randint(0, given.vocab, (learners, samples, given.seq_len + 1), generator=rng).to(device)
        self._samples = torch.full((learners,), samples, device=device)
        self._loss: Callable[..., Any] = torch.compile(stacked_loss, dynamic=False) if given.compiled else stacked_loss

    def gradients(self) -> list[torch.Tensor]:
        with autocast(self._compute, self._device):
            losses = self._loss(self._shape, self._weights, self._batch, self._samples, self._cos, self._sin)
        return list(torch.autograd.grad(losses.sum(), list(self._weights.values())))

    def optimize(self, grads: list[torch.Tensor]) -> None:
        self._moments.step(self._who, grads)

    def both(self) -> None:
        self.optimize(self.gradients())


def settings(given: argparse.Namespace, learners: int) -> Config:
    inner = {"optimizer": "Muon", "betas": [0.9, 0.99], "learning_rate": 1e-5, "weight_decay": 0.1}
    return load(preset_name="decoupled", overrides={"learners": learners, "inner": inner, "total_steps": 10**6})


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def median_ms(given: argparse.Namespace, device: torch.device, work: Callable[[], Any], in_a_row: int = 1) -> float:
    """With several in a row the host need not wait between them."""
    found = [seconds(device, lambda: [work() for _ in range(in_a_row)]) / in_a_row for _ in range(given.steps)]
    return round(1e3 * statistics.median(found), 3)


def measure(given: argparse.Namespace, learners: int) -> dict[str, Any]:
    device = torch.device(given.device)
    step = FleetStep(given, learners, device)
    for _ in range(WARM):
        step.both()
    grads = step.gradients()
    line = {
        "size": given.size, "learners": learners, "step_tokens": given.step_tokens, "compiled": given.compiled,
        "parameters": step.parameters, "loss_ms": median_ms(given, device, step.gradients),
        "optimizer_ms": median_ms(given, device, lambda: step.optimize(grads)),
        "step_ms": median_ms(given, device, step.both, in_a_row=5),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
    }  # fmt: skip
    rate = given.step_tokens / (line["step_ms"] / 1e3)
    line |= {"tokens_per_second": round(rate), "tflops": round(6 * step.parameters * rate / 1e12, 3)}
    if given.profile:
        profiled(step, device)
    return line


def profiled(step: FleetStep, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        for _ in range(3):
            step.both()
        seconds(device, lambda: None)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="35M")
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--step-tokens", type=int, default=65_536)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for learners in given.learners:
        machine = torch.cuda.get_device_name() if given.device == "cuda" else given.device
        line = json.dumps(measure(given, learners) | {"device": machine, "commit": commit()})
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
