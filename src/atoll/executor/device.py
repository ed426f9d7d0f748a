"""Where a virtual run's tensors lie: on the host, or all of them on one device that its learners share.

On a device a dense decoder's learners step as a fleet, their products batched and in bf16, the step compiled. Whatever a fleet
cannot do (pictures, experts, data-parallel, other optimisers) steps one learner after the other, as on the host.
"""

from __future__ import annotations

import dataclasses

import torch

from atoll.config import Config
from atoll.errors import UserError
from atoll.executor.fleet import FleetHands
from atoll.executor.stacked_optimizer import STACKED
from atoll.executor.syncer import TensorHands
from atoll.executor.workbench import Workbench

REASON_MAX = 120
"""Characters: where torch has more to say, it lists its backends."""


def checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # read back, which a device of shapes alone (meta) cannot do
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        why = f" ({reason})" if 0 < len(reason) <= REASON_MAX else ""
        raise UserError(f"--device {name}: cannot be used here{why}; there is {', '.join(devices_here())}") from None
    return device


def devices_here() -> list[str]:
    other = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if other is None else ["cpu", *(f"{other.type}:{i}" for i in range(torch.accelerator.device_count()))]


def evaluated_on(bench: Workbench, device: torch.device) -> Workbench:
    """The same task, its held-out set measured there."""
    if device.type == "cpu":
        return bench
    accuracy = bench.accuracy
    return dataclasses.replace(
        bench, evaluate=lambda model: bench.evaluate(model.to(device)),
        accuracy=None if accuracy is None else lambda model: accuracy(model.to(device)),
    )  # fmt: skip


def is_fleet(config: Config) -> bool:
    """What a fleet's step is written for."""
    dense = config.model.name == "decoder" and not config.model.numbers.get("experts", 0)
    plain = config.model.dtype == "float32" and config.protocol.contribution == "weights"
    return dense and plain and config.inner.optimizer in STACKED


def hands_on(bench: Workbench, device: torch.device, learners: int) -> TensorHands | FleetHands:
    """`learners`: the declared ones and those that a plan lets come. A device other than the host holds everything."""
    if device.type == "cpu":
        return TensorHands(bench)
    if is_fleet(bench.config):
        return FleetHands(bench, device, learners=learners, compiled=device.type == "cuda")
    return TensorHands(bench, device=device)
