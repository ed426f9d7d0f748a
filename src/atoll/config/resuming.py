"""Going on from a snapshot: the keys that its state was counted, laid out or learnt by, and must keep.

Everything else may change: how long, how fast, who must be there, what travels. A codec leaves nothing behind that another could
not go on from: versions are stored whole beside their packets, and a residual is the plain difference that was not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from atoll.config.sections import Config
from atoll.errors import ConfigError


class Kept(NamedTuple):
    key: str
    why: str
    """Goes on after "the run that is resumed had X, and"."""
    effective: Callable[[Config], object] | None = None
    """What the key comes down to, where that is not its value; None there: it has no say."""

    def of(self, config: Config) -> object:
        return (self.effective or attrgetter(self.key))(config)


def _only_if(key: str, effective: Callable[[Config], bool]) -> Callable[[Config], object]:
    """The key's value in configs in which it has a say."""
    return lambda config: attrgetter(key)(config) if effective(config) else None


def _inner(*optimizers: str) -> Callable[[Config], bool]:
    return lambda config: config.inner.optimizer in optimizers


_PLACES: Final = "a place in its data is a number of"
_LAYOUT: Final = "its stored fragments are cut by that"
_MOMENTS: Final = "its learners' inner optimisers go on with their state and settings"
KEPT: Final = (
    Kept("preset", "a resumed run keeps it"),
    Kept("seed", "the order of its data was drawn from that"),
    Kept("data.batch_size", f"{_PLACES} batches that large (of the largest in data.samples_by_learner, where they differ)",
         lambda c: max(c.data.samples_by_learner or (c.data.batch_size,))),
    Kept("data.seq_len", f"{_PLACES} windows that long"),
    Kept("inner.accumulate", f"{_PLACES} steps of so many batches"),
    Kept("protocol.local_steps_per_round", f"{_PLACES} units of so many steps"),
    Kept("model.name", "its weights are of that model"),
    Kept("model.numbers", "its weights are of a model of those numbers"),
    Kept("model.dtype", "its learners' weights and moments are of that type"),
    Kept("protocol.fragmentation", _LAYOUT),
    Kept("protocol.fragments", _LAYOUT),
    Kept("protocol.layer_order", _LAYOUT, _only_if("protocol.layer_order", lambda c: c.protocol.fragmentation == "layer")),
    Kept("outer.apply_outer_optimizer_to", _LAYOUT),
    Kept("outer.outer_optimizer", "its outer state is that optimiser's"),
    Kept("outer.delay", "its outer gradients are gathered by so many",
         _only_if("outer.delay", lambda c: c.outer.outer_optimizer == "delayed_nesterov")),
    Kept("protocol.anchor", "its learners count their work from there",
         lambda c: "round_start" if c.protocol.anchor == "round_start" else "present or adopted"),
    Kept("protocol.error_feedback", "what was rounded away is part of its learners' state or not by that"),
    Kept("inner.optimizer", _MOMENTS),
    Kept("inner.weight_decay", _MOMENTS),
    Kept("inner.betas", _MOMENTS, _only_if("inner.betas", _inner("AdamW", "Adam", "Muon"))),
    Kept("inner.momentum", _MOMENTS, _only_if("inner.momentum", _inner("SGD"))),
    Kept("inner.muon_momentum", _MOMENTS, _only_if("inner.muon_momentum", _inner("Muon"))),
    Kept("inner.muon_except", _MOMENTS, _only_if("inner.muon_except", _inner("Muon"))),
    Kept("protocol.embedding_glob", _MOMENTS, _only_if("protocol.embedding_glob", _inner("Muon"))),
)  # fmt: skip
"""A changed one is refused, first come first told: whoever changed the model wants to hear of the model, not of its layout."""

_TEXT: Final = "its places in the data are places in what that gave"
DATA: Final = (
    Kept("data.corpus", _TEXT),
    Kept("data.field", _TEXT),
    Kept("data.max_bytes", _TEXT),
    Kept("data.tokenizer", _TEXT),
    Kept("data.vocab", _TEXT),
    Kept("data.end_of_document", _TEXT),
    Kept("data.heldout", _TEXT, lambda c: "set" if c.data.heldout else "empty"),
)
"""Refused only where the data came out differently: a file may have moved."""


def refuse_changed(was: Mapping[str, Any], now: Config) -> None:
    """`was`: the config that a snapshot's manifest holds, as plain values."""
    before = _read(was)
    if sentence := _first_change(KEPT, before, now):
        raise ConfigError(f"{sentence}, or start anew")
    if (end := _ramp_end(before)) != _ramp_end(now):  # else learners would wait for what was never due
        instead = f"give protocol.ramp = {end / now.total_steps:.6g}, or start anew"
        raise ConfigError(
            f"key protocol.ramp = {now.protocol.ramp} of total_steps = {now.total_steps}: the run that is resumed ramps over its "
            f"first {end} outer steps, and which fragment is due when follows from that; {instead}"
        )


def refuse_changed_data(was: Mapping[str, Any], now: Config) -> None:
    """For data that is not what it was: if a key says why, that is refused."""
    if sentence := _first_change(DATA, _read(was), now):
        raise ConfigError(f"{sentence} (or wherever the same data lies now), or start anew")


def reshuffled(was: Mapping[str, Any], now: Config) -> str:
    """What is allowed and still worth a warning, or nothing."""
    before = _read(was).learners
    if before == now.learners:
        return ""
    return (
        f"learners = {now.learners}: the run that is resumed had {before}, and its data is dealt out anew among {now.learners}: "
        "until the epoch ends some samples come a second time and others not at all"
    )


def _read(was: Mapping[str, Any]) -> Config:
    """Not checked for contradictions: what is refused today may have run then, and only the new config must make sense."""
    try:
        return msgspec.convert(was, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the config of the run that is resumed is not of this Atoll: {error}") from None


def _first_change(rows: tuple[Kept, ...], before: Config, now: Config) -> str:
    for row in rows:
        had, has = row.of(before), row.of(now)
        if had != has:
            return f"key {row.key} = {has!r}: the run that is resumed had {had!r}, and {row.why}; give {had!r}"
    return ""


def _ramp_end(config: Config) -> int:
    """As rules.py has it: with H, all that the phases follow from."""
    return round(config.total_steps * config.protocol.ramp)
