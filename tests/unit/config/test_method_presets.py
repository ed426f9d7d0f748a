"""Presets of published methods: what makes each what it is, and the sentence with which anything else is refused."""

from __future__ import annotations

import pytest

from atoll.config import load, warnings
from atoll.errors import ConfigError

REFUSED = [
    ("muloco", "inner.optimizer=AdamW", "preset 'muloco' is DiLoCo with Muon inside"),
    ("sparseloco", "protocol.error_feedback=false", "in place of outer momentum; for dropped values without it"),
    ("sparseloco", "outer.outer_optimizer=nesterov", "preset 'sparseloco' has error feedback in place of outer momentum"),
    ("sparseloco", "protocol.codec_up=fp32", "fp32 leaves no error to feed back"),
    ("sparseloco", "protocol.stochastic_rounding=true", "needs int8 or int4"),
    ("heloco", "protocol.merge=rda", "with the merge 'aligned'; use preset 'decoupled'"),
    ("heloco", "outer.outer_optimizer=sgd", "compares with the outer momentum, which outer_optimizer 'sgd' does not have"),
    ("pier", "outer.momentum_warmup=0", "preset 'pier' is DiLoCo with both"),
    ("pier", "outer.outer_optimizer=sgd", "is for outer_optimizer 'momentum' or 'nesterov', not 'sgd'"),
    ("pier", "outer.momentum_schedule=[[0.2, 0.9], [0.1, 0.8]]", "shares must rise"),
    ("pier", "outer.momentum_schedule=[[0.2, 1.0]]", "each momentum must be below 1"),
    ("eager", "protocol.eager=false", "is 'async_diloco' with each learner's own share applied early; use preset 'async_diloco'"),
    ("eager", "protocol.merge=rda", "needs merge = 'mean' and embedding_merge = 'mean'"),
    ("eager", "protocol.aggregation_weighting=tokens", "needs aggregation_weighting = 'uniform'"),
    ("eager", "protocol.alpha=0.3", "needs alpha = 0"),
    ("eager", "outer.outer_optimizer=delayed_nesterov", "needs outer_optimizer 'sgd', 'momentum' or 'nesterov'"),
    ("eager", "outer.rate_schedule=[[0.5, 0.5]]", "needs the same outer rate and momentum at every outer step"),
    ("dylu", "protocol.dynamic_steps=false", "preset 'dylu' merges each learner after its own number of steps"),
    ("dylu", "protocol.fragmentation=balanced", "needs fragmentation = 'whole'"),
    ("dylu", "protocol.quorum=2", "nobody waits for anybody"),
    ("dylu", "protocol.anchor=present", "needs anchor = 'adopted' and alpha = 0"),
    ("dylu", "protocol.merge=rda", "each contribution adds 1/N of itself"),
    ("dylu", "outer.outer_optimizer=nesterov", "needs outer_optimizer = 'delayed_nesterov', which counts contributions"),
    ("dylu", "outer.rate_schedule=[[0.5, 0.5]]", "without a rate_schedule, which counts outer steps"),
    ("dylu", "protocol.ramp=0.1", "no outer step is due before a learner is ready"),
    ("diloco", "protocol.eager=true", "needs protocol.anchor = 'round_start'"),
    ("decoupled_ramp", "outer.rate_schedule=[[0.5, 0.5]]", "counts a fragment's own outer steps"),
    ("ddp", "outer.average_decay=0.9", "which preset 'ddp' does not have"),
    ("diloco", "protocol.feedback_decay=0.5", "is for protocol.error_feedback = true"),
    ("diloco", "protocol.codec_up=chunk_top_k", "must be fp32, bf16"),
    ("diloco", "inner.adam_rate=2", "is for inner.optimizer = 'Muon', beside whose rate it is"),
]


@pytest.mark.parametrize(("preset", "assignment", "sentence"), REFUSED)
def test_what_a_method_cannot_do_is_refused_with_a_sentence(preset: str, assignment: str, sentence: str) -> None:
    assignments = [assignment, *(["protocol.feedback_decay=1"] if assignment == "protocol.error_feedback=false" else [])]
    with pytest.raises(ConfigError, match=sentence):
        load(preset_name=preset, assignments=assignments)


def test_muloco_brings_muon_and_sparseloco_leaves_the_inner_optimiser_open() -> None:
    assert load(preset_name="muloco").inner.optimizer == "Muon"
    assert load(preset_name="sparseloco", assignments=["inner.optimizer=Muon"]).inner.optimizer == "Muon"


def test_delay_of_zero_is_as_many_contributions_as_there_are_learners() -> None:
    assert load(preset_name="dylu", assignments=["learners=7"]).outer.delay == 7
    assert load(preset_name="dylu", assignments=["learners=7", "outer.delay=3"]).outer.delay == 3


def test_codec_that_drops_values_warns_only_without_error_feedback() -> None:
    long = ["total_steps=30"]
    assert warnings(load(preset_name="sparseloco", assignments=long)) == []
    told = warnings(load(preset_name="fedavg", assignments=[*long, "protocol.codec_up=chunk_top_k:0.02"]))
    assert len(told) == 1 and "drops values" in told[0]
