"""The model of `agreement.py`: a decoder whose training step lasts as long as an accelerator's would.

Learners on one machine compete for its cores, with each other, with the syncer and with other processes; learners on
separate machines do not, and a simulator describes those. So the forward pass waits like a host that waits for
its device, and the arithmetic is small beside it. Everything else is real: gradients, codecs, sockets, merges, disks.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from atoll.workload.models.decoder import build_model

FORWARD_SECONDS = 0.09


class DeviceTime:
    def __init__(self) -> None:
        self._began = 0.0

    def begin(self, model: nn.Module, arguments: Any) -> None:
        self._began = time.monotonic()

    def end(self, model: nn.Module, arguments: Any, logits: Any) -> None:
        if model.training:
            time.sleep(max(0.0, self._began + FORWARD_SECONDS - time.monotonic()))


def timed(**numbers: int | float | bool) -> nn.Module:
    model, device = build_model("decoder", numbers, 0), DeviceTime()
    model.register_forward_pre_hook(device.begin)
    model.register_forward_hook(device.end)
    return model
