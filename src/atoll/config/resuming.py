"""Resuming from a snapshot: the keys that the saved state depends on, which must keep their values.

All other keys may change: length, pace, quorum, codecs. No saved state depends on a codec: versions are stored in full beside
their packets, and a residual is the plain difference that was not sent.
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
    """Continues the sentence "the resumed run had X, and"."""
    effective: Callable[[Config], object] | None = None
    """The value that counts, if it is not the key's own. It returns None if the key has no effect."""

    def of(self, config: Config) -> object:
        return (self.effective or attrgetter(self.key))(config)


def _only_if(key: str, effective: Callable[[Config], bool]) -> Callable[[Config], object]:
    """The key's value, or None in configs in which the key has no effect."""
    return lambda config: attrgetter(key)(config) if effective(config) else None


def _inner(*optimizers: str) -> Callable[[Config], bool]:
    return lambda config: config.inner.optimizer in optimizers


_PLACES: Final = "a position in its data is a number of"
_LAYOUT: Final = "its stored fragments depend on that"
_MOMENTS: Final = "its learners' inner optimisers keep their state and settings"
KEPT: Final = (
    Kept("preset", "a resumed run keeps it"),
    Kept("seed", "the order of its data was drawn from that"),
    Kept("data.batch_size", f"{_PLACES} batches of that size (the largest in data.samples_by_learner, if they differ)",
         lambda c: max(c.data.samples_by_learner or (c.data.batch_size,))),
    Kept("data.seq_len", f"{_PLACES} windows of that length"),
    Kept("inner.accumulate", f"{_PLACES} steps of that many batches"),
    Kept("protocol.local_steps_per_round", f"{_PLACES} units of that many steps"),
    Kept("model.name", "its weights are of that model"),
    Kept("model.numbers", "its weights are of a model with those numbers"),
    Kept("protocol.fragmentation", _LAYOUT),
    Kept("protocol.fragments", _LAYOUT),
    Kept("protocol.layer_order", _LAYOUT, _only_if("protocol.layer_order", lambda c: c.protocol.fragmentation == "layer")),
    Kept("outer.apply_outer_optimizer_to", _LAYOUT),
    Kept("outer.outer_optimizer", "its outer state is that optimiser's"),
    Kept("outer.delay", "its outer state sums that many outer gradients",
         _only_if("outer.delay", lambda c: c.outer.outer_optimizer == "delayed_nesterov")),
    Kept("protocol.dynamic_steps", "its outer state counts contributions with it and outer steps without"),
    Kept("protocol.anchor", "its learners' work is measured from there",
         lambda c: "round_start" if c.protocol.anchor == "round_start" else "present or adopted"),
    Kept("protocol.eager", "its learners' weights hold what they applied early"),
    Kept("protocol.error_feedback", "it decides whether residuals are part of its learners' state"),
    Kept("inner.optimizer", _MOMENTS),
    Kept("inner.weight_decay", _MOMENTS),
    Kept("inner.betas", _MOMENTS, _only_if("inner.betas", _inner("AdamW", "Adam", "Muon"))),
    Kept("inner.momentum", _MOMENTS, _only_if("inner.momentum", _inner("SGD"))),
    Kept("inner.muon_momentum", _MOMENTS, _only_if("inner.muon_momentum", _inner("Muon"))),
    Kept("inner.muon_except", _MOMENTS, _only_if("inner.muon_except", _inner("Muon"))),
    Kept("protocol.embedding_glob", _MOMENTS, _only_if("protocol.embedding_glob", _inner("Muon"))),
)  # fmt: skip
"""The first changed key of this list is refused: a user who changed the model should read of the model, not of its layout."""

_TEXT: Final = "its positions refer to the data of that"
DATA: Final = (
    Kept("data.corpus", _TEXT),
    Kept("data.field", _TEXT),
    Kept("data.max_bytes", _TEXT),
    Kept("data.tokenizer", _TEXT),
    Kept("data.vocab", _TEXT),
    Kept("data.end_of_document", _TEXT),
    Kept("data.heldout", _TEXT, lambda c: "set" if c.data.heldout else "empty"),
)
"""Refused only if the data differs: a file may have moved."""


def refuse_changed(was: Mapping[str, Any], now: Config) -> None:
    """`was`: the config in a snapshot's manifest, as plain values."""
    before = _read(was)
    if sentence := _first_change(KEPT, before, now):
        raise ConfigError(f"{sentence}, or start a new run")
    if (end := _ramp_end(before)) != _ramp_end(now):  # otherwise learners would wait for fragments that were never due
        instead = f"give protocol.ramp = {end / now.total_steps:.6g}, or start a new run"
        raise ConfigError(
            f"key protocol.ramp = {now.protocol.ramp} of total_steps = {now.total_steps}: the resumed run ramps over its first "
            f"{end} outer steps, which decide when each fragment is due; {instead}"
        )


def refuse_changed_data(was: Mapping[str, Any], now: Config) -> None:
    """For data that differs: if a changed key explains it, that key is refused."""
    if sentence := _first_change(DATA, _read(was), now):
        raise ConfigError(f"{sentence} (or the present place of the same data), or start a new run")


def reshuffled(was: Mapping[str, Any], now: Config) -> str:
    """A warning about a change that is allowed, or ""."""
    before = _read(was).learners
    if before == now.learners:
        return ""
    return (
        f"learners = {now.learners}: the resumed run had {before}, and its data is divided again among {now.learners}: "
        "until the epoch ends, some samples are used a second time and others not at all"
    )


def _read(was: Mapping[str, Any]) -> Config:
    """Without the check for contradictions: what is refused today may have run then, and only the new config must pass."""
    try:
        return msgspec.convert(was, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the config of the resumed run is of another version of Atoll: {error}") from None


def _first_change(rows: tuple[Kept, ...], before: Config, now: Config) -> str:
    for row in rows:
        had, has = row.of(before), row.of(now)
        if had != has:
            return f"key {row.key} = {has!r}: the resumed run had {had!r}, and {row.why}; give {had!r}"
    return ""


def _ramp_end(config: Config) -> int:
    """As in rules.py: the ramp's phases follow from this and H."""
    return round(config.total_steps * config.protocol.ramp)
