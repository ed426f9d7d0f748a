"""Which keys a resumed run keeps: those that a snapshot's state was counted, laid out or learnt by, and no others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.config import Config, changed, load
from atoll.config.resuming import DATA, KEPT, refuse_changed, refuse_changed_data, reshuffled
from atoll.errors import ConfigError

HARMLESS = {
    "learners", "total_steps", "protocol.layers_per_fragment", "protocol.overlap", "protocol.overlap_by_learner",
    "protocol.quorum", "protocol.grace", "protocol.grace_gamma", "protocol.ema_weight", "protocol.pace",
    "protocol.aggregation_weighting",
    "protocol.merge", "protocol.embedding_merge", "protocol.merge_norm", "protocol.alpha", "protocol.adopt", "protocol.lead",
    "protocol.keep_overlap",
    "protocol.codec_up", "protocol.codec_down", "protocol.feedback_decay", "protocol.stochastic_rounding",
    "protocol.freeze_not_due",
    "protocol.snapshot_interval", "protocol.rollback_interval", "protocol.elastic",
    "outer.outer_learning_rate", "outer.outer_momentum", "inner.learning_rate", "inner.adam_rate", "outer.momentum_warmup",
    "outer.momentum_schedule", "outer.rate_schedule", "outer.average_decay",
    "inner.clip_norm", "inner.schedule", "inner.warmup_share", "inner.final_share", "inner.preserve_optimizer_state",
    "model.precision", "model.compile", "model.deterministic", "model.checkpoint_activations", "model.init",
    "data.cache", "data.heldout_batches", "data.heldout_every", "data.augment",
}  # fmt: skip
BY_ANOTHER = {
    "data.samples_by_learner": "data.batch_size, the largest of them",
    "protocol.contribution": "outer.outer_optimizer: 'gradient' and 'inner' go together",
    "protocol.ramp": "where the ramp ends",
    "model.size": "model.numbers: a resolved config holds the size's numbers",
}


def plain(config: Config) -> dict[str, Any]:
    """As a manifest holds it: JSON knows no tuples."""
    held: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return held


def keys_of(section: Any, path: str = "") -> set[str]:
    found = set()
    for name in type(section).__struct_fields__:
        value = getattr(section, name)
        found |= keys_of(value, f"{path}{name}.") if isinstance(value, msgspec.Struct) else {path + name}
    return found


def refused(before: Config, *changes: str) -> str:
    with pytest.raises(ConfigError) as said:
        refuse_changed(plain(before), changed(before, changes))
    return str(said.value)


def test_every_key_is_kept_or_known_to_be_harmless() -> None:
    """A new key is one or the other: its author decides which. Limits and virtual hardware are nobody's state."""
    keys = {key for key in keys_of(Config()) if not key.startswith(("limits.", "cluster."))}
    named = [row.key for row in (*KEPT, *DATA)]
    assert len(named) == len(set(named))
    assert set(named) | HARMLESS | BY_ANOTHER.keys() == keys
    assert not set(named) & HARMLESS


@pytest.mark.parametrize(
    "change",
    [
        "seed=1", "data.batch_size=4", "data.samples_by_learner=[4, 2, 2, 2]", "data.seq_len=32", "inner.accumulate=2",
        "protocol.local_steps_per_round=12", "model.name=own:make", "model.numbers={heads=8}",
        "protocol.fragmentation=tensor", "protocol.fragments=12", "outer.apply_outer_optimizer_to=all_floating",
        "outer.outer_optimizer=sgd", "outer.outer_optimizer=delayed_nesterov", "protocol.error_feedback=true",
        "inner.optimizer=Adam", "inner.optimizer=SGD", "inner.weight_decay=0.3", "inner.betas=[0.5, 0.6]",
    ],
)  # fmt: skip
def test_changed_key_that_state_depends_on_is_refused_with_both_values(change: str) -> None:
    key = change.partition("=")[0].replace("samples_by_learner", "batch_size")
    said = refused(load(), change)
    assert said.startswith(f"key {key} = ")
    assert ": the resumed run had " in said
    assert "; give " in said and said.endswith(", or start a new run")


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (["inner.optimizer=Muon"], "inner.muon_momentum=0.5"),
        (["inner.optimizer=Muon"], "inner.muon_except=x"),
        (["inner.optimizer=Muon"], "protocol.embedding_glob=x"),
        (["inner.optimizer=SGD"], "inner.momentum=0.5"),
        (["outer.outer_optimizer=delayed_nesterov"], "outer.delay=3"),
        (["protocol.fragmentation=layer", "protocol.fragments=3"], "protocol.layer_order=sequential"),
    ],
)
def test_key_is_kept_where_it_has_a_say_and_free_elsewhere(first: list[str], change: str) -> None:
    assert refused(load(assignments=first), change).startswith(f"key {change.partition('=')[0]} = ")
    refuse_changed(plain(load()), load(assignments=[change]))


def test_work_counted_from_the_start_of_a_round_is_not_counted_from_elsewhere() -> None:
    """Loaded as they are, the old starts would be subtracted in every round to come."""
    before = load(preset_name="async_diloco")
    said = refused(before, "protocol.anchor=adopted", "protocol.overlap=2")
    assert said.startswith("key protocol.anchor = 'present or adopted'")
    refuse_changed(plain(load()), load(assignments=["protocol.anchor=adopted"]))


@pytest.mark.parametrize(
    "change",
    [
        "total_steps=900", "learners=6", "protocol.quorum=2", "protocol.grace=none", "protocol.pace=2.0", "protocol.overlap=4",
        "protocol.codec_up=int8", "protocol.codec_down=fp32", "inner.learning_rate=0.1", "outer.outer_learning_rate=0.9",
        "outer.outer_momentum=0.5", "protocol.snapshot_interval=7", "limits.versions_max=4", "cluster.step_seconds=2.0",
        "data.cache=off", "protocol.merge=mean", "data.samples_by_learner=[8, 4, 4, 8]", "data.corpus=elsewhere",
    ],
)  # fmt: skip
def test_harmless_key_may_change(change: str) -> None:
    refuse_changed(plain(load()), load(assignments=[change]))


def test_longer_run_keeps_the_ramp_it_is_in() -> None:
    """The ramp is a share of all outer steps: of more it would end later, and learners would wait for what was never due."""
    before = load(preset_name="decoupled", assignments=["total_steps=200", "protocol.ramp=0.1"])
    said = refused(before, "total_steps=400")
    assert said.startswith("key protocol.ramp = 0.1 of total_steps = 400: the resumed run ramps over its first 20 outer")
    assert "give protocol.ramp = 0.05," in said
    refuse_changed(plain(before), changed(before, ["total_steps=400", "protocol.ramp=0.05"]))
    assert "ramps over its first 0 outer steps" in refused(load(), "protocol.ramp=0.5")


def test_other_data_is_refused_by_the_key_that_chose_it() -> None:
    before = load()
    with pytest.raises(ConfigError, match=r"^key data.corpus = 'b.txt': the resumed run had 'stdlib', and its positions"):
        refuse_changed_data(plain(before), changed(before, ["data.corpus=b.txt"]))
    refuse_changed_data(plain(before), before)
    held = changed(before, ["data.heldout=a.txt"])
    refuse_changed_data(plain(held), changed(before, ["data.heldout=b.txt"]))


def test_another_number_of_learners_is_told() -> None:
    assert reshuffled(plain(load()), load()) == ""
    said = reshuffled(plain(load()), load(assignments=["learners=6"]))
    assert said.startswith("learners = 6: the resumed run had 4, and its data is divided again")


def test_config_of_another_atoll_is_told_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="the config of the resumed run is of another version of Atoll: "):
        refuse_changed({"no_such_key": 1}, load())
