"""Checks of keys against each other: contradictions, and combinations that are allowed but differ from the papers."""

from __future__ import annotations

from atoll.config.codecs import CODECS, codec_spec
from atoll.config.merges import merge_spec
from atoll.config.sections import ALL, IMAGE_MODELS, Config, Data


def contradictions(c: Config) -> list[tuple[bool, str]]:
    """Every possible contradiction: (whether this config has it, the sentence)."""
    p, o = c.protocol, c.outer
    exact_all = p.quorum == ALL and p.adopt == "exact"
    context = c.model.numbers.get("context", c.data.seq_len)
    up, rounds = codec_spec(p.codec_up), " or ".join(spec.name for spec in CODECS.values() if spec.stochastic)
    return [
        (p.overlap >= p.local_steps_per_round and p.anchor != "round_start" and p.overlap > 0,
         f"key protocol.overlap = {p.overlap}: must be below protocol.local_steps_per_round = {p.local_steps_per_round}"),
        (p.anchor == "round_start" and p.overlap != p.local_steps_per_round,
         f"key protocol.anchor = 'round_start': is the one-round delay and needs protocol.overlap = "
         f"protocol.local_steps_per_round = {p.local_steps_per_round}, not {p.overlap}"),
        (p.anchor == "round_start" and not (exact_all and p.fragmentation == "whole"),
         "key protocol.anchor = 'round_start': needs quorum = 'all', adopt = 'exact' and fragmentation = 'whole'"),
        (p.adopt == "exact" and p.quorum != ALL and int(p.quorum) < c.learners,
         f"key protocol.adopt = 'exact': makes learners wait, which only quorum = 'all' (or {c.learners}) may; got {p.quorum}"),
        (p.adopt == "arrival" and p.overlap == 0,
         "key protocol.overlap = 0: adoption on arrival needs at least 1 (a result takes time to come back)"),
        (p.quorum != ALL and int(p.quorum) > c.learners,
         f"key protocol.quorum = {p.quorum}: must be 'all' or at most learners = {c.learners}"),
        (bool(p.overlap_by_learner) and (p.adopt != "exact" or len(p.overlap_by_learner) != c.learners),
         f"key protocol.overlap_by_learner = {p.overlap_by_learner}: needs adopt = 'exact' and {c.learners} numbers"),
        (any(t >= p.local_steps_per_round for t in p.overlap_by_learner),
         f"key protocol.overlap_by_learner = {p.overlap_by_learner}: each must be below H = {p.local_steps_per_round}"),
        (bool(c.data.end_of_document) and c.data.tokenizer in ("bytes", "bpe"),
         f"key data.end_of_document = {c.data.end_of_document!r}: is for Hugging Face tokenizers only; leave it empty"),
        (bool(c.data.samples_by_learner) and len(c.data.samples_by_learner) != c.learners,
         f"key data.samples_by_learner = {c.data.samples_by_learner}: must be empty or have {c.learners} numbers"),
        (p.contribution == "gradient" and not (p.local_steps_per_round == 1 and p.overlap == 0 and exact_all),
         "key protocol.contribution = 'gradient': needs local_steps_per_round = 1, overlap = 0, quorum = 'all', adopt = 'exact'"),
        (p.contribution == "gradient" and p.fragmentation != "whole",
         f"key protocol.fragmentation = {p.fragmentation!r}: Theta's optimiser clips each fragment separately, so contribution = "
         f"'gradient' is data-parallel training only with 'whole'"),
        ((p.contribution == "gradient") != (o.outer_optimizer == "inner"),
         f"key outer.outer_optimizer = {o.outer_optimizer!r}: 'inner' and protocol.contribution = 'gradient' go together"),
        (p.contribution == "gradient" and o.apply_outer_optimizer_to == "all_floating",
         "key outer.apply_outer_optimizer_to = 'all_floating': a buffer has no gradient; with protocol.contribution = 'gradient' "
         "it must be 'parameters'"),
        (p.ramp > 0 and p.adopt != "arrival",
         f"key protocol.ramp = {p.ramp}: is for adopt = 'arrival'; this run is synchronous already, so use 0"),
        (p.fragments > 1 and p.fragmentation == "whole", "key protocol.fragments: fragmentation = 'whole' has one fragment"),
        (p.lead >= 0 and p.adopt == "exact" and p.lead != p.overlap,
         f"key protocol.lead = {p.lead}: exact adoption leads by overlap = {p.overlap}; leave it at -1"),
        (p.error_feedback and up.lossless, f"key protocol.error_feedback = true: {p.codec_up} leaves no error to feed back"),
        (p.feedback_decay < 1 and not p.error_feedback,
         f"key protocol.feedback_decay = {p.feedback_decay}: is for protocol.error_feedback = true; leave it at 1"),
        (c.inner.adam_rate != 1 and c.inner.optimizer != "Muon",
         f"key inner.adam_rate = {c.inner.adam_rate}: is for inner.optimizer = 'Muon', beside whose rate it is; with "
         f"{c.inner.optimizer!r} leave it at 1 and set inner.learning_rate"),
        (p.stochastic_rounding and not up.stochastic,
         f"key protocol.stochastic_rounding = true: needs {rounds} as codec_up, not {p.codec_up!r}"),
        (c.learners > c.limits.members_max, f"key learners = {c.learners}: above limits.members_max = {c.limits.members_max}"),
        (c.model.name in ("decoder", "vlm") and context < c.data.seq_len,
         f"key model.numbers.context = {context}: must be at least data.seq_len = {c.data.seq_len}"),
        *_outer_over_time(c),
        *_methods(c),
        *_eager(c),
        *_keep_overlap(c),
        *_dynamic_steps(c),
        *_whole_tensors(c),
        *_text_keys_for_images(c),
        *_slices(c),
    ]  # fmt: skip


def _outer_over_time(c: Config) -> list[tuple[bool, str]]:
    o, moving = c.outer, c.outer.outer_optimizer in ("momentum", "nesterov")
    given = [key for key in ("momentum_warmup", "momentum_schedule", "rate_schedule") if getattr(o, key)]
    falling = any(list(stages) != sorted(stages) for stages in (o.momentum_schedule, o.rate_schedule))
    return [
        (falling, f"key outer.momentum_schedule = {o.momentum_schedule}, rate_schedule = {o.rate_schedule}: shares must rise"),
        (any(momentum >= 1 for _, momentum in o.momentum_schedule),
         f"key outer.momentum_schedule = {o.momentum_schedule}: each momentum must be below 1"),
        (bool(o.momentum_warmup or o.momentum_schedule) and not moving,
         f"key outer.{given[0] if given else ''}: is for outer_optimizer 'momentum' or 'nesterov', not {o.outer_optimizer!r}"),
        (bool(given) and (o.outer_optimizer == "inner" or c.protocol.ramp > 0),
         f"key outer.{given[0] if given else ''}: counts a fragment's own outer steps, which a ramp and outer_optimizer 'inner' "
         f"do not take; leave it out"),
        *((merge_spec(name).by_momentum and o.outer_optimizer in ("sgd", "inner"),
           f"key protocol.{key} = {name!r}: compares with the outer momentum, which outer_optimizer {o.outer_optimizer!r} does "
           f"not have") for key, name in (("merge", c.protocol.merge), ("embedding_merge", c.protocol.embedding_merge))),
        (o.average_decay > 0 and o.outer_optimizer == "inner",
         f"key outer.average_decay = {o.average_decay}: is part of an outer state, which preset 'ddp' does not have; use 0"),
    ]  # fmt: skip


def _methods(c: Config) -> list[tuple[bool, str]]:
    """What a published method is defined by. Without it the run would be another method under this name."""
    p, o = c.protocol, c.outer
    return [
        (c.preset == "muloco" and c.inner.optimizer != "Muon",
         f"key inner.optimizer = {c.inner.optimizer!r}: preset 'muloco' is DiLoCo with Muon inside; with another optimiser use "
         f"preset 'diloco'"),
        (c.preset == "sparseloco" and not p.error_feedback,
         "key protocol.error_feedback = false: is what preset 'sparseloco' has in place of outer momentum; for dropped values "
         "without it use preset 'diloco'"),
        (c.preset == "sparseloco" and o.outer_optimizer != "sgd",
         f"key outer.outer_optimizer = {o.outer_optimizer!r}: preset 'sparseloco' has error feedback in place of outer momentum; "
         f"use 'sgd', or preset 'diloco'"),
        (c.preset == "heloco" and p.merge != "aligned",
         f"key protocol.merge = {p.merge!r}: preset 'heloco' is decoupled training with the merge 'aligned'; use preset "
         f"'decoupled'"),
        (c.preset == "pier" and not (o.momentum_warmup and o.momentum_schedule),
         "key outer.momentum_warmup, momentum_schedule: preset 'pier' is DiLoCo with both; for a constant momentum use preset "
         "'diloco'"),
    ]  # fmt: skip


def _eager(c: Config) -> list[tuple[bool, str]]:
    """A learner adds what the syncer's outer step makes of its own share. That is a part of Theta only while the outer step is
    linear and the same each time, and while every learner weighs 1/M."""
    p, o, key = c.protocol, c.outer, "key protocol.eager = true:"
    return [
        (c.preset == "eager" and not p.eager,
         "key protocol.eager = false: preset 'eager' is 'async_diloco' with each learner's own share applied early; use preset "
         "'async_diloco'"),
        (p.eager and p.anchor != "round_start",
         f"{key} needs protocol.anchor = 'round_start' (preset 'eager'), not {p.anchor!r}"),
        (p.eager and not p.merge == p.embedding_merge == "mean",
         f"{key} needs merge = 'mean' and embedding_merge = 'mean', of which an own share is a part; got {p.merge!r} and "
         f"{p.embedding_merge!r}"),
        (p.eager and p.aggregation_weighting != "uniform",
         f"{key} needs aggregation_weighting = 'uniform', because a learner knows no weight but its own; got "
         f"{p.aggregation_weighting!r}"),
        (p.eager and p.alpha > 0, f"{key} needs alpha = 0, not {p.alpha}: own work would be kept twice"),
        (p.eager and o.outer_optimizer not in ("sgd", "momentum", "nesterov"),
         f"{key} needs outer_optimizer 'sgd', 'momentum' or 'nesterov', not {o.outer_optimizer!r}"),
        (p.eager and bool(o.momentum_warmup or o.momentum_schedule or o.rate_schedule),
         f"{key} needs the same outer rate and momentum at every outer step; leave outer.momentum_warmup, momentum_schedule and "
         f"rate_schedule out"),
    ]  # fmt: skip


def _keep_overlap(c: Config) -> list[tuple[bool, str]]:
    """What is kept is what an adoption would replace. Elsewhere nothing is replaced, or it is kept already."""
    p, key = c.protocol, "key protocol.keep_overlap = true:"
    return [
        (p.keep_overlap and max(p.overlap_by_learner or (p.overlap,)) == 0,
         f"{key} needs protocol.overlap of at least 1: with 0 nothing is trained meanwhile"),
        (p.keep_overlap and (p.anchor == "round_start" or p.contribution == "gradient"),
         f"{key} is for adoptions that replace weights; with anchor = {p.anchor!r} and contribution = {p.contribution!r} nothing "
         f"is lost in them, so leave it out"),
        (p.keep_overlap and p.alpha > 0, f"{key} needs alpha = 0, not {p.alpha}: own work would be kept twice"),
        (p.keep_overlap and p.dynamic_steps,
         f"{key} needs dynamic_steps = false: there a learner's steps are counted from its adoption"),
    ]  # fmt: skip


def _dynamic_steps(c: Config) -> list[tuple[bool, str]]:
    """Learners are merged one by one, each against the version that it began with, into an outer step that counts them."""
    p, o, key = c.protocol, c.outer, "key protocol.dynamic_steps = true:"
    return [
        (c.preset == "dylu" and not p.dynamic_steps,
         "key protocol.dynamic_steps = false: preset 'dylu' merges each learner after its own number of steps; with one number "
         "for all use preset 'async_diloco' or 'decoupled'"),
        (p.dynamic_steps and p.fragmentation != "whole",
         f"{key} needs fragmentation = 'whole', because a learner is merged as a whole; got {p.fragmentation!r}"),
        (p.dynamic_steps and not (p.adopt == "arrival" and p.quorum == 1 and p.lead < 0),
         f"{key} needs adopt = 'arrival', quorum = 1 and lead = -1: nobody waits for anybody"),
        (p.dynamic_steps and (p.anchor != "adopted" or p.alpha > 0),
         f"{key} needs anchor = 'adopted' and alpha = 0; got {p.anchor!r} and {p.alpha}"),
        (p.dynamic_steps and not (p.merge == p.embedding_merge == "mean" and p.aggregation_weighting == "uniform"),
         f"{key} needs merge = 'mean', embedding_merge = 'mean' and aggregation_weighting = 'uniform': each contribution adds "
         f"1/N of itself"),
        (p.dynamic_steps and (o.outer_optimizer != "delayed_nesterov" or bool(o.rate_schedule)),
         f"{key} needs outer_optimizer = 'delayed_nesterov', which counts contributions, without a rate_schedule, which counts "
         f"outer steps; got {o.outer_optimizer!r}"),
        (p.dynamic_steps and (p.ramp > 0 or p.freeze_not_due),
         f"{key} needs ramp = 0 and freeze_not_due = false: no outer step is due before a learner is ready"),
    ]  # fmt: skip


def _slices(c: Config) -> list[tuple[bool, str]]:
    chips, slices = c.cluster.chips, -(-c.cluster.chips // c.cluster.slice_chips)
    return [
        (chips > 0 and slices < c.learners,
         f"key cluster.chips = {chips}: makes {slices} slices of cluster.slice_chips = {c.cluster.slice_chips}, and each of the "
         f"{c.learners} learners needs one"),
        (chips > 0 and c.cluster.mtbf_seconds > 0,
         f"key cluster.mtbf_seconds = {c.cluster.mtbf_seconds:g}: is for learners that fail as a whole; with cluster.chips use "
         f"cluster.mtbi_hours"),
    ]  # fmt: skip


def _whole_tensors(c: Config) -> list[tuple[bool, str]]:
    """An inner optimiser freezes, and resets moments of, whole tensors only."""
    cut = c.protocol.fragmentation == "sub_tensor" and c.protocol.fragments != 1
    why = "'sub_tensor' has pieces of one tensor in several fragments; choose another protocol.fragmentation"
    return [
        (cut and c.protocol.freeze_not_due, f"key protocol.freeze_not_due = true: freezes whole tensors, and {why}"),
        (cut and not c.inner.preserve_optimizer_state,
         f"key inner.preserve_optimizer_state = false: resets the moments of whole tensors, and {why}"),
    ]  # fmt: skip


def _text_keys_for_images(c: Config) -> list[tuple[bool, str]]:
    """Keys of [data] that only text has. `field`, `vocab` and `cache` are not checked: some texts do not use them either."""
    usual, name = Data(), c.model.name
    return [
        (name in IMAGE_MODELS and value != getattr(usual, key),
         f"key data.{key} = {value!r}: is for text, and model.name = {name!r} reads images; leave it out")
        for key, value in (("heldout", c.data.heldout), ("tokenizer", c.data.tokenizer), ("max_bytes", c.data.max_bytes))
    ]  # fmt: skip


def warnings(c: Config) -> list[str]:
    """Sentences about settings that are allowed but differ from the papers."""
    p, found = c.protocol, []
    h = p.local_steps_per_round
    first = next((k * h // p.fragments for k in range(1, p.fragments) if k * h // p.fragments), h)
    if p.dynamic_steps:
        pass  # the last outer step takes what there is
    elif first > c.total_steps and p.ramp == 0:
        found.append(f"total_steps = {c.total_steps}: ends before the first fragment is due (step {first}), so nothing is merged")
    elif p.fragments == 1 and p.anchor != "round_start" and (rest := c.total_steps % h):
        lost = f"the last {rest} of total_steps = {c.total_steps} are in no merge"
        found.append(f"{lost}: it is not a multiple of protocol.local_steps_per_round = {h}")
    if c.outer.apply_outer_optimizer_to == "all_floating":
        found.append("outer.apply_outer_optimizer_to = 'all_floating' gives buffers outer momentum: an experiment, not DiLoCo")
    if not c.inner.preserve_optimizer_state:
        found.append("inner.preserve_optimizer_state = false restarts the inner optimiser on adoption: not faithful DiLoCo")
    if merge_spec(p.merge).robust and not merge_spec(p.embedding_merge).robust:
        found.append(
            f"protocol.merge = {p.merge!r} bounds what one learner can do, and embedding_merge = {p.embedding_merge!r} does not: "
            f"set protocol.embedding_merge = {p.merge!r} too"
        )
    if p.quorum == 1 and c.learners > 1 and p.grace == "none" and p.pace == 0:
        found.append("quorum = 1 without grace and with pace 0 merges about one learner per round, which costs quality")
    if p.lead == 0 and p.adopt == "arrival":
        found.append("protocol.lead = 0 is a barrier: every learner waits for each round that is due, as in data-parallel")
    if p.overlap > 5 and p.anchor != "round_start":
        found.append(f"protocol.overlap = {p.overlap}: above 5 gains no utilisation and costs quality")
    if p.freeze_not_due:
        found.append("protocol.freeze_not_due = true trains only the fragments due next (FedPart): known to be far worse")
    if codec_spec(p.codec_up).selects and not p.error_feedback:
        found.append(f"protocol.codec_up = {p.codec_up!r} drops values: an ablation, known to be worse than int4")
    if p.contribution == "weights" and c.inner.optimizer == "SGD" and p.local_steps_per_round > 1:
        found.append("inner.optimizer = 'SGD': DiLoCo is defined with AdamW inside")
    return found
