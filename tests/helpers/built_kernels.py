"""Builds the syncer's loops into their cache: half a minute in a new checkout, and seconds after that."""

from __future__ import annotations

from atoll.config import load
from atoll.kernels.fused import Fused, has_numba
from atoll.tensors.outer import outer_rule

RUNS = (("int4", "int8", "nesterov"), ("fp32", "bf16", "sgd"), ("bf16", "fp32", "momentum"))
"""Codecs up and down and outer optimisers that need every loop between them."""


def main() -> None:
    if not has_numba():
        return
    for up, down, optimizer in RUNS:
        config = load(preset_name="decoupled", overrides={
            "protocol": {"codec_up": up, "codec_down": down}, "outer": {"outer_optimizer": optimizer},
        })  # fmt: skip
        Fused(config, 1).warm_up(outer_rule(config))


if __name__ == "__main__":
    main()
