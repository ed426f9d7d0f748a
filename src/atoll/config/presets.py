"""Presets: each algorithm of the family is a function that returns a complete `Config`. docs/research/presets.md is the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.config.sections import ALL, Config, Inner, Outer, Protocol
from atoll.errors import ConfigError


def _whole(**changes: Any) -> Protocol:
    """The settings that the synchronous whole-model algorithms share."""
    base = Protocol(
        fragmentation="whole", fragments=1, overlap=0, quorum=ALL, grace="none", pace=0.0,
        aggregation_weighting="uniform", merge="mean", embedding_merge="mean", alpha=0.0,
        anchor="adopted", adopt="exact", codec_up="fp32", codec_down="fp32",
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def ddp() -> Config:
    """Gradients are averaged in rank order at each step; the inner optimiser steps on Theta. A dead rank stops all."""
    protocol = _whole(local_steps_per_round=1, contribution="gradient", elastic=False)
    return Config(preset="ddp", protocol=protocol, outer=Outer(outer_optimizer="inner", outer_learning_rate=1.0))


def fedavg() -> Config:
    protocol = _whole(local_steps_per_round=30, aggregation_weighting="num_samples")
    return Config(preset="fedavg", protocol=protocol, outer=Outer(outer_optimizer="sgd", outer_learning_rate=1.0))


def diloco() -> Config:
    return Config(preset="diloco", total_steps=1000, protocol=_whole(local_steps_per_round=500))


def async_diloco() -> Config:
    """The merge of round r runs while round r+1 trains and is applied at its end: tau = H."""
    protocol = _whole(local_steps_per_round=100, overlap=100, anchor="round_start")
    return Config(preset="async_diloco", protocol=protocol)


def streaming() -> Config:
    protocol = _whole(
        local_steps_per_round=30, fragmentation="layer", fragments=0, overlap=1, alpha=0.5, codec_up="e3m0"
    )  # fmt: skip
    return Config(preset="streaming", protocol=protocol, outer=Outer(outer_learning_rate=0.4))


MUON_OUTER = Outer(outer_learning_rate=1.0, outer_momentum=0.5)
"""With the mean, for the decoupled presets with Muon (docs/research/results.md): outer learning rate 1.0, momentum 0.5. These
settings were compared at scale; at RDA_OUTER, tuned for RDA, the mean is worse than RDA with Muon too."""
RDA_OUTER = Outer(outer_learning_rate=0.4, outer_momentum=0.7)
"""The better of two settings tried at 35M with RDA and AdamW (docs/research/results.md). RDA restores the norm that a mean of M
learners loses, so the published 0.7 / 0.9 takes larger steps than with a mean: too large in runs of a few thousand steps."""


def decoupled() -> Config:
    return Config(preset="decoupled", outer=RDA_OUTER)


def decoupled_ramp() -> Config:
    return Config(preset="decoupled_ramp", protocol=Protocol(ramp=0.1), outer=RDA_OUTER)


def muloco() -> Config:
    """DiLoCo with Muon inside."""
    return Config(preset="muloco", protocol=_whole(local_steps_per_round=30), inner=Inner(optimizer="Muon"))


def sparseloco() -> Config:
    """Few values go up; what was left out fades and is added to the next, in place of an outer momentum."""
    protocol = _whole(
        local_steps_per_round=30, codec_up="chunk_top_k:0.02", codec_down="bf16", error_feedback=True, feedback_decay=0.95
    )  # fmt: skip
    return Config(preset="sparseloco", protocol=protocol, outer=Outer(outer_optimizer="sgd", outer_learning_rate=1.0))


def eager() -> Config:
    """As `async_diloco`, with each learner's own newest outer gradient applied without the delay."""
    protocol = _whole(local_steps_per_round=30, overlap=30, anchor="round_start", eager=True)
    return Config(preset="eager", protocol=protocol, outer=Outer(outer_learning_rate=0.4))


def dylu() -> Config:
    """Asynchronous: a learner is merged by delayed Nesterov when it has trained as many steps as its speed gives it."""
    protocol = Protocol(
        dynamic_steps=True, fragmentation="whole", fragments=1, local_steps_per_round=50, anchor="adopted",
        aggregation_weighting="uniform", merge="mean", codec_up="fp32", codec_down="fp32",
    )  # fmt: skip
    return Config(preset="dylu", protocol=protocol, outer=Outer(outer_optimizer="delayed_nesterov", delay=0))


def heloco() -> Config:
    """Decoupled training whose merge turns what points away from the outer momentum towards it."""
    return Config(preset="heloco", protocol=Protocol(merge="aligned", embedding_merge="aligned"))


def pier() -> Config:
    """DiLoCo whose outer momentum is gathered before it is applied, and lowered in steps."""
    outer = Outer(outer_momentum=0.99, momentum_warmup=0.1, momentum_schedule=((0.15, 0.95), (0.2, 0.9)))
    return Config(preset="pier", total_steps=1000, protocol=_whole(local_steps_per_round=50), outer=outer)


PRESETS: dict[str, Callable[[], Config]] = {
    f.__name__: f for f in (ddp, fedavg, diloco, async_diloco, streaming, decoupled, decoupled_ramp)
} | {f.__name__: f for f in (muloco, sparseloco, pier, heloco, eager, dylu)}
"""The family, then methods of others."""


def preset(name: str, optimizer: str = "AdamW") -> Config:
    """The preset with the settings for this inner optimiser. `inner.optimizer` itself keeps the preset's value: the caller sets
    that key."""
    if name not in PRESETS:
        raise ConfigError(f"preset = {name!r}: no such preset; choose one of {', '.join(PRESETS)}")
    found = PRESETS[name]()
    if optimizer == "Muon" and name in (decoupled.__name__, decoupled_ramp.__name__):
        return msgspec.structs.replace(found, protocol=msgspec.structs.replace(found.protocol, merge="mean"), outer=MUON_OUTER)
    return found
