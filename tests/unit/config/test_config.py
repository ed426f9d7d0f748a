"""The border: presets against the family's table, what is refused and in which words, recipes, --set, TOML round trips."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import ALL, PRESETS, Config, from_builtins, load, preset, read_toml, to_toml, warnings
from atoll.errors import ConfigError


def refusal(*assignments: str, preset_name: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(preset_name=preset_name, assignments=assignments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def recipe(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf8")
    return path


# ---------------------------------------------------------------- the family as one table (docs/reference/arithmetic.md)

TABLE: dict[str, dict[str, Any]] = {
    "ddp": {
        "local_steps_per_round": 1, "quorum": ALL, "grace": "none", "contribution": "gradient", "merge": "mean",
        "codec_up": "fp32", "codec_down": "fp32", "outer_optimizer": "inner", "elastic": False,
    },
    "fedavg": {
        "fragments": 1, "overlap": 0, "quorum": ALL, "grace": "none", "aggregation_weighting": "num_samples",
        "merge": "mean", "outer_optimizer": "sgd", "outer_learning_rate": 1.0, "alpha": 0.0, "anchor": "adopted",
        "adopt": "exact", "codec_up": "fp32", "codec_down": "fp32",
    },
    "diloco": {
        "fragments": 1, "local_steps_per_round": 500, "overlap": 0, "quorum": ALL, "grace": "none",
        "aggregation_weighting": "uniform", "merge": "mean", "outer_optimizer": "nesterov", "outer_learning_rate": 0.7,
        "outer_momentum": 0.9, "alpha": 0.0, "anchor": "adopted", "adopt": "exact", "codec_up": "fp32", "codec_down": "fp32",
    },
    "async_diloco": {
        "fragments": 1, "local_steps_per_round": 100, "overlap": 100, "quorum": ALL, "grace": "none",
        "aggregation_weighting": "uniform", "merge": "mean", "outer_optimizer": "nesterov", "alpha": 0.0,
        "anchor": "round_start", "adopt": "exact", "codec_up": "fp32", "codec_down": "fp32",
    },
    "streaming": {
        "fragmentation": "layer", "layers_per_fragment": 3, "layer_order": "strided", "local_steps_per_round": 30,
        "overlap": 1, "quorum": ALL, "grace": "none", "aggregation_weighting": "uniform", "merge": "mean",
        "outer_optimizer": "nesterov", "outer_learning_rate": 0.4, "outer_momentum": 0.9, "alpha": 0.5,
        "anchor": "adopted", "adopt": "exact", "codec_up": "e3m0", "codec_down": "fp32",
    },
    "decoupled": {
        "fragmentation": "balanced", "fragments": 24, "local_steps_per_round": 24, "overlap": 2, "quorum": 1,
        "grace": "adaptive", "grace_gamma": 0.8, "ema_weight": 0.1, "pace": 1.0, "aggregation_weighting": "tokens",
        "merge": "rda", "embedding_merge": "mean", "merge_norm": "tensor", "outer_optimizer": "nesterov", "alpha": 0.0,
        "anchor": "present", "adopt": "arrival", "codec_up": "int4", "codec_down": "bf16", "ramp": 0.0,
        "error_feedback": False, "stochastic_rounding": False, "freeze_not_due": False,
    },
    "decoupled_ramp": {"fragments": 24, "local_steps_per_round": 24, "overlap": 2, "quorum": 1, "adopt": "arrival", "ramp": 0.1},
    "eager": {
        "fragments": 1, "local_steps_per_round": 30, "overlap": 30, "quorum": ALL, "anchor": "round_start", "adopt": "exact",
        "eager": True, "merge": "mean", "aggregation_weighting": "uniform", "alpha": 0.0, "outer_optimizer": "nesterov",
        "outer_learning_rate": 0.4, "outer_momentum": 0.9, "codec_up": "fp32", "codec_down": "fp32",
    },
    "dylu": {
        "fragments": 1, "local_steps_per_round": 50, "dynamic_steps": True, "quorum": 1, "adopt": "arrival", "anchor": "adopted",
        "overlap": 2, "merge": "mean", "aggregation_weighting": "uniform", "outer_optimizer": "delayed_nesterov",
        "outer_learning_rate": 0.7, "outer_momentum": 0.9, "codec_up": "fp32", "codec_down": "fp32",
    },
    "muloco": {"fragments": 1, "local_steps_per_round": 30, "outer_optimizer": "nesterov", "codec_up": "fp32", "quorum": ALL},
    "heloco": {
        "fragments": 24, "quorum": 1, "adopt": "arrival", "merge": "aligned", "embedding_merge": "aligned", "codec_up": "int4",
        "outer_learning_rate": 0.7, "outer_momentum": 0.9,
    },
    "pier": {
        "fragments": 1, "local_steps_per_round": 50, "outer_optimizer": "nesterov", "outer_momentum": 0.99,
        "momentum_warmup": 0.1, "momentum_schedule": ((0.15, 0.95), (0.2, 0.9)),
    },
    "sparseloco": {
        "fragments": 1, "local_steps_per_round": 30, "quorum": ALL, "codec_up": "chunk_top_k:0.02", "codec_down": "bf16",
        "error_feedback": True, "feedback_decay": 0.95, "outer_optimizer": "sgd", "outer_learning_rate": 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, row in TABLE.items() for field in row])
def test_preset_field_is_that_of_the_table(name: str, field: str) -> None:
    config = load(preset_name=name)
    section = config.protocol if hasattr(config.protocol, field) else config.outer
    assert getattr(section, field) == TABLE[name][field]


def test_presets_are_those_of_the_table_and_each_names_itself() -> None:
    assert set(PRESETS) == set(TABLE)
    assert [load(preset_name=name).preset for name in PRESETS] == list(PRESETS)


def test_decoupled_ramp_differs_from_decoupled_in_the_ramp_alone() -> None:
    plain, ramped = load(preset_name="decoupled"), load(preset_name="decoupled_ramp")
    assert msgspec.structs.replace(plain.protocol, ramp=0.1) == ramped.protocol
    assert (plain.outer, plain.inner, plain.model, plain.data) == (ramped.outer, ramped.inner, ramped.model, ramped.data)


@pytest.mark.parametrize("name", ["decoupled", "decoupled_ramp"])
def test_decoupled_presets_merge_by_a_mean_with_full_outer_steps_under_muon(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[for.{name}.inner]\noptimizer = "Muon"\n')
    by_set = load(preset_name=name, assignments=["inner.optimizer=Muon"])
    assert (by_set.protocol.merge, by_set.outer.outer_learning_rate, by_set.outer.outer_momentum) == ("mean", 1.0, 0.5)
    assert by_set == load(recipe, preset_name=name) == load(preset_name=name, overrides={"inner": {"optimizer": "Muon"}})
    assert load(recipe, preset_name=name, assignments=["inner.optimizer=AdamW"]) == load(preset_name=name)
    usual = load(preset_name=name)
    assert (usual.protocol.merge, usual.outer.outer_learning_rate, usual.outer.outer_momentum) == ("rda", 0.4, 0.7)
    assert msgspec.structs.replace(by_set, inner=usual.inner, outer=usual.outer, protocol=usual.protocol) == usual


def test_keys_that_were_given_win_over_what_muon_brings() -> None:
    given = ["inner.optimizer=Muon", "protocol.merge=rda", "outer.outer_momentum=0.9"]
    found = load(preset_name="decoupled", assignments=given)
    assert (found.protocol.merge, found.outer.outer_learning_rate, found.outer.outer_momentum) == ("rda", 1.0, 0.9)


@pytest.mark.parametrize("name", ["ddp", "fedavg", "diloco", "async_diloco", "streaming"])
def test_other_presets_are_the_same_with_muon(name: str) -> None:
    with_muon = load(preset_name=name, assignments=["inner.optimizer=Muon"])
    assert msgspec.structs.replace(with_muon, inner=load(preset_name=name).inner) == load(preset_name=name)


@pytest.mark.parametrize("text", ["inner = 3", "[inner]\noptimizer = 3", "[inner]\noptimizer = ['Muon']"])
def test_optimiser_that_is_no_word_is_refused_with_the_key(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match="key inner"):
        load(recipe)


def test_streaming_derives_its_fragments_from_the_number_of_blocks() -> None:
    config = load(preset_name="streaming", assignments=["model.numbers.layers=7"])
    assert config.protocol.fragments == 3 + 1  # three groups of at most three blocks, and what is no block


def test_whole_model_has_one_fragment_whatever_was_asked() -> None:
    assert load(preset_name="decoupled", assignments=["protocol.fragmentation=whole"]).protocol.fragments == 1


def test_configs_are_values_equal_when_equal_and_frozen() -> None:
    config = load(preset_name="decoupled")
    assert config == load(preset_name="decoupled") != load(assignments=["seed=1"])
    with pytest.raises(AttributeError):
        config.protocol.overlap = 3  # type: ignore[misc]


# ---------------------------------------------------------------- refusals: key, value, what would be right


def test_unknown_key_close_to_a_known_one_is_refused_with_did_you_mean() -> None:
    assert refusal("protocol.overlapp=2") == "key protocol.overlapp = 2: no such key; did you mean protocol.overlap?"


def test_unknown_key_like_nothing_is_refused_with_the_keys_there_are() -> None:
    sentence = refusal("zzz=1")
    assert sentence.startswith("key zzz = 1: no such key; use one of preset, seed, learners")


def test_unknown_section_is_refused_with_did_you_mean() -> None:
    assert "did you mean protocol?" in refusal("protocl.merge=mean")


def test_unknown_preset_is_refused_with_the_presets_there_are() -> None:
    with pytest.raises(ConfigError, match="preset = 'dilocco': no such preset; choose one of ddp, fedavg, diloco"):
        preset("dilocco")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("learners=0", "key learners = 0: expected `int` >= 1"),
        ("seed=-1", "key seed = -1: expected `int` >= 0"),
        ("total_steps=10.5", "key total_steps = 10.5: expected `int`, got `float`"),
        ("protocol.local_steps_per_round=0", "key protocol.local_steps_per_round = 0: expected `int` >= 1"),
        ("protocol.alpha=1.5", "key protocol.alpha = 1.5: expected `float` <= 1.0"),
        ("protocol.grace_gamma=-0.1", "key protocol.grace_gamma = -0.1: expected `float` >= 0.0"),
        ("protocol.ema_weight=0.0", "key protocol.ema_weight = 0.0: expected `float` > 0.0"),
        ("protocol.ramp=1.0", "key protocol.ramp = 1.0: expected `float` < 1.0"),
        ("protocol.pace=-1", "key protocol.pace = -1: expected `float` >= 0.0"),
        ("protocol.lead=-2", "key protocol.lead = -2: expected `int` >= -1"),
        ("protocol.quorum=0", "key protocol.quorum = 0: expected `int` >= 1"),
        ("outer.outer_learning_rate=0.0", "key outer.outer_learning_rate = 0.0: expected `float` > 0.0"),
        ("outer.outer_momentum=1.0", "key outer.outer_momentum = 1.0: expected `float` < 1.0"),
        ("inner.accumulate=0", "key inner.accumulate = 0: expected `int` >= 1"),
        ("inner.preserve_optimizer_state=maybe", "key inner.preserve_optimizer_state = 'maybe': expected `bool`, got `str`"),
        ("cluster.up_gbit=0", "key cluster.up_gbit = 0: expected `float` >= 1e-06"),
        ("cluster.slow_factor=0.9", "key cluster.slow_factor = 0.9: expected `float` >= 1.0"),
        ("limits.versions_max=1", "key limits.versions_max = 1: expected `int` >= 2"),
        ("limits.upload_bytes_max=0", "key limits.upload_bytes_max = 0: expected `int` >= 1024"),
        ("protocol.merge=median", "key protocol.merge = 'median': must be one of mean, rda, clipped_mean, trimmed_mean, "
         "geometric_median, aligned, or one that --allow-plugin FILE registers"),
        ("protocol.adopt=late", "key protocol.adopt = 'late': must be one of 'exact', 'arrival'"),
        ("model.precision=fp16", "key model.precision = 'fp16': must be one of 'auto', 'fp32', 'tf32', 'bf16'"),
        ("inner.optimizer=Lion", "key inner.optimizer = 'Lion': must be one of 'AdamW', 'Adam', 'SGD', 'Muon'"),
        ("protocol=3", "key protocol = 3: is a section, give its keys"),
        ("learners.x=3", "key learners = {'x': 3}: is a single value, not a section"),
        ("nothing", "--set 'nothing': must be key=value, such as protocol.overlap=2"),
        ("=3", "--set '=3': must be key=value, such as protocol.overlap=2"),
    ],
)  # fmt: skip
def test_bad_value_is_refused_with_key_value_and_what_would_be_right(assignment: str, sentence: str) -> None:
    assert refusal(assignment) == sentence


def test_bad_word_for_a_quorum_is_refused_in_the_users_words() -> None:
    sentence = refusal("protocol.quorum=some")
    assert sentence.startswith("key protocol.quorum = 'some': ")
    assert "'all'" in sentence and "class" not in sentence and "typing" not in sentence


def test_bad_number_inside_an_array_is_refused_with_the_number() -> None:
    sentence = refusal("inner.betas=[0.9, 2.0]")
    assert "inner.betas" in sentence and "2.0" in sentence and "< 1.0" in sentence


def test_bad_length_of_an_array_is_refused_with_the_array() -> None:
    assert refusal("inner.betas=[0.9]") == "key inner.betas = [0.9]: expected `array` of length 2, got 1"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", ["protocol.pace", "cluster.detect_seconds", "inner.learning_rate", "limits.silence_steps"])
def test_number_that_is_not_finite_is_refused(key: str, value: str) -> None:
    assert refusal(f"{key}={value}").startswith(f"key {key} = {value}")


@pytest.mark.parametrize("key", ["protocol.codec_up", "protocol.codec_down"])
def test_unknown_codec_is_refused_at_the_border_with_the_codecs_there_are(key: str) -> None:
    sentence = refusal(f"{key}=int3")
    assert sentence.startswith(f"key {key} = 'int3': ") and "int4" in sentence and "bf16" in sentence


# ---------------------------------------------------------------- cross checks


@pytest.mark.parametrize(
    ("preset_name", "assignments", "key", "right"),
    [
        ("decoupled", ["protocol.overlap=24"], "protocol.overlap = 24", "below protocol.local_steps_per_round = 24"),
        ("streaming", ["protocol.overlap=30"], "protocol.overlap = 30", "below protocol.local_steps_per_round = 30"),
        ("async_diloco", ["protocol.overlap=5"], "protocol.anchor = 'round_start'", "= 100, not 5"),
        ("async_diloco", ["protocol.fragmentation=balanced", "protocol.fragments=2"], "protocol.anchor", "= 'whole'"),
        ("diloco", ["protocol.quorum=1"], "protocol.adopt = 'exact'", "quorum = 'all' (or 4) may; got 1"),
        ("decoupled", ["protocol.overlap=0"], "protocol.overlap = 0", "at least 1"),
        ("decoupled", ["protocol.quorum=5"], "protocol.quorum = 5", "'all' or at most learners = 4"),
        ("streaming", ["protocol.overlap_by_learner=[1, 2]"], "protocol.overlap_by_learner = (1, 2)", "4 numbers"),
        ("decoupled", ["protocol.overlap_by_learner=[1, 2, 1, 2]"], "protocol.overlap_by_learner", "adopt = 'exact'"),
        ("streaming", ["protocol.overlap_by_learner=[1, 2, 3, 30]"], "protocol.overlap_by_learner", "below H = 30"),
        ("decoupled", ["data.samples_by_learner=[1, 2]"], "data.samples_by_learner = (1, 2)", "4 numbers"),
        ("ddp", ["protocol.local_steps_per_round=2"], "protocol.contribution = 'gradient'", "local_steps_per_round = 1"),
        ("diloco", ["outer.outer_optimizer=inner"], "outer.outer_optimizer = 'inner'", "go together"),
        ("ddp", ["outer.outer_optimizer=sgd"], "outer.outer_optimizer = 'sgd'", "go together"),
        ("diloco", ["protocol.ramp=0.1"], "protocol.ramp = 0.1", "adopt = 'arrival'"),
        ("streaming", ["protocol.lead=3"], "protocol.lead = 3", "leave it at -1"),
        ("diloco", ["protocol.error_feedback=true"], "protocol.error_feedback = true", "fp32 leaves no error"),
        ("diloco", ["protocol.stochastic_rounding=true"], "protocol.stochastic_rounding = true", "int8 or int4 or int2 or e3m0"),
        ("decoupled", ["protocol.fragments=0"], "protocol.fragments = 0", "give a number"),
        ("streaming", ["model.name=mlp"], "protocol.fragments = 0", "model.numbers.layers"),
        ("decoupled", ["limits.members_max=3"], "learners = 4", "limits.members_max = 3"),
        ("ddp", ["protocol.fragmentation=balanced"], "protocol.fragmentation = 'balanced'", "only with 'whole'"),
        ("ddp", ["protocol.fragmentation=tensor"], "protocol.fragmentation = 'tensor'", "only with 'whole'"),
        ("ddp", ["outer.apply_outer_optimizer_to=all_floating"], "outer.apply_outer_optimizer_to = 'all_floating'",
         "a buffer has no gradient; with protocol.contribution = 'gradient' it must be 'parameters'"),
        ("decoupled", ["protocol.fragmentation=sub_tensor", "protocol.freeze_not_due=true"], "protocol.freeze_not_due = true",
         "'sub_tensor' has pieces of one tensor in several fragments; choose another protocol.fragmentation"),
        ("decoupled", ["protocol.fragmentation=sub_tensor", "inner.preserve_optimizer_state=false"],
         "inner.preserve_optimizer_state = false", "'sub_tensor' has pieces of one tensor in several fragments"),
        ("decoupled", ["model.numbers.context=4"], "model.numbers.context = 4", "at least data.seq_len = 64"),
        ("decoupled", ["model.name=vlm", "model.numbers.context=63"], "model.numbers.context = 63", "at least data.seq_len = 64"),
        ("diloco", ["model.name=lenet5", "data.heldout=x.txt"], "data.heldout = 'x.txt'", "'lenet5' reads images"),
        ("diloco", ["model.name=resnet18", "data.tokenizer=bpe"], "data.tokenizer = 'bpe'", "'resnet18' reads images"),
        ("diloco", ["model.name=vlm", "data.max_bytes=1000"], "data.max_bytes = 1000", "'vlm' reads images"),
    ],
)  # fmt: skip
def test_combination_that_makes_no_sense_is_refused_with_what_would(
    preset_name: str, assignments: list[str], key: str, right: str
) -> None:
    sentence = refusal(*assignments, preset_name=preset_name)
    assert sentence.startswith(f"key {key}")
    assert right in sentence


def test_pieces_of_tensors_in_one_fragment_are_whole_tensors_again() -> None:
    for key in ("protocol.freeze_not_due=true", "inner.preserve_optimizer_state=false"):
        load(preset_name="diloco", assignments=["protocol.fragmentation=sub_tensor", "protocol.fragments=1", key])


# ---------------------------------------------------------------- recipes


def test_recipe_keys_lie_over_the_preset_and_set_over_the_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'preset = "diloco"\nlearners = 3\nseed = 5\n[protocol]\nlocal_steps_per_round = 7\n')
    config = load(path, assignments=["seed=6"])
    assert (config.preset, config.learners, config.seed, config.protocol.local_steps_per_round) == ("diloco", 3, 6, 7)
    assert config.outer == load(preset_name="diloco").outer


def test_recipe_without_a_preset_is_decoupled(tmp_path: Path) -> None:
    assert load(recipe(tmp_path, "learners = 2\n")).preset == "decoupled"


def test_preset_by_name_wins_over_the_recipes_own(tmp_path: Path) -> None:
    assert load(recipe(tmp_path, 'preset = "diloco"\n'), preset_name="fedavg").preset == "fedavg"


@pytest.mark.parametrize(("own", "asked"), [("decoupled", "diloco"), ("diloco", "fedavg"), ("decoupled", "decoupled_ramp")])
def test_preset_over_a_written_out_config_of_another_preset_is_refused(
    tmp_path: Path, own: str, asked: str
) -> None:
    path = recipe(tmp_path, to_toml(load(preset_name=own, assignments=["learners=2", "inner.optimizer=Muon"])))
    with pytest.raises(ConfigError) as caught:
        load(path, preset_name=asked, assignments=["protocol.local_steps_per_round=7"])
    sentence = str(caught.value)
    assert sentence.startswith(f"preset = {asked!r}: {path} is for preset {own!r}")
    assert "give the recipe that the run was started with" in sentence and "\n" not in sentence
    assert load(path, preset_name=own) == load(path)


def test_preset_over_a_written_out_config_is_taken_where_its_section_differs(tmp_path: Path) -> None:
    path = recipe(tmp_path, to_toml(load(preset_name="decoupled")) + "[for.decoupled_ramp.protocol]\nramp = 0.1\n")
    assert load(path, preset_name="decoupled_ramp").protocol.ramp == 0.1


def test_recipe_section_for_a_preset_holds_only_for_that_preset(tmp_path: Path) -> None:
    path = recipe(tmp_path, "learners = 2\n[for.diloco.protocol]\nlocal_steps_per_round = 9\n[for.fedavg]\nlearners = 3\n")
    by_name = {name: load(path, preset_name=name) for name in ("diloco", "fedavg", "decoupled")}
    assert by_name["diloco"].protocol.local_steps_per_round == 9
    assert by_name["fedavg"].protocol.local_steps_per_round == 30
    assert by_name["decoupled"].protocol.local_steps_per_round == 24
    assert {name: c.learners for name, c in by_name.items()} == {"diloco": 2, "fedavg": 3, "decoupled": 2}


def test_recipe_section_for_a_preset_wins_over_the_recipe_and_set_over_it(tmp_path: Path) -> None:
    path = recipe(tmp_path, "seed = 1\n[for.diloco]\nseed = 2\n")
    assert load(path, preset_name="diloco").seed == 2
    assert load(path, preset_name="diloco", assignments=["seed=3"]).seed == 3


def test_recipe_section_for_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset = 'dilocco': no such preset"):
        load(recipe(tmp_path, "[for.dilocco]\nseed = 2\n"))


@pytest.mark.parametrize("text", ["for = 3\n", "[for]\ndiloco = 3\n"])
def test_recipe_section_for_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="one table per preset"):
        load(recipe(tmp_path, text))


def test_unknown_key_in_a_section_for_another_preset_is_refused_when_that_runs(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[for.diloco.protocol]\nlocal_step_per_round = 9\n")
    with pytest.raises(ConfigError, match=r"did you mean protocol\.local_steps_per_round"):
        load(path, preset_name="diloco")


def test_recipe_with_a_preset_that_is_no_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset = 3: must be one of ddp, fedavg"):
        load(recipe(tmp_path, "preset = 3\n"))


def test_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        read_toml(tmp_path / "gone.toml")


def test_recipe_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_recipe_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(recipe(tmp_path, "learners == 3\n"))


def test_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_toml(path)


# ---------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("protocol.merge=mean", "mean"),
        ("protocol.merge='mean'", "mean"),
        (' protocol.merge = "mean" ', "mean"),
    ],
)
def test_set_takes_a_bare_word_or_a_quoted_one(assignment: str, value: str) -> None:
    assert load(assignments=[assignment]).protocol.merge == value


def test_set_takes_numbers_arrays_and_booleans_as_toml_writes_them() -> None:
    config = load(assignments=[
        "learners=2", "data.max_bytes=1_000", "data.samples_by_learner=[3, 4]", "protocol.elastic=false",
        "cluster.latency_seconds=1e-3",
    ])  # fmt: skip
    assert (config.learners, config.data.max_bytes, config.data.samples_by_learner) == (2, 1000, (3, 4))
    assert (config.protocol.elastic, config.cluster.latency_seconds) == (False, 0.001)


def test_set_quorum_takes_a_number_or_all() -> None:
    assert load(assignments=["protocol.quorum=3"]).protocol.quorum == 3
    assert load(assignments=["protocol.quorum=all"]).protocol.quorum == ALL


def test_set_of_model_numbers_is_free_where_the_model_is_the_users_code() -> None:
    given = ["model.name=own.code:make", "model.numbers.layers=6", "model.numbers.odd=0.5"]
    assert load(assignments=given).model.numbers == {"layers": 6, "odd": 0.5}


def test_set_twice_the_later_wins() -> None:
    assert load(assignments=["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("overrides", [None, {"preset": "diloco"}])
def test_preset_given_where_it_cannot_choose_is_never_silently_ignored(overrides: dict[str, str] | None) -> None:
    """Invariant 10: nothing silently falls back. It may choose the preset or be refused."""
    try:
        config = load(overrides=overrides, assignments=[] if overrides else ["preset=diloco"])
    except ConfigError as refused:
        assert "preset" in str(refused)
    else:
        assert config.preset == "diloco" and config.protocol.fragments == 1


# ---------------------------------------------------------------- TOML


@pytest.mark.parametrize("name", list(PRESETS))
def test_toml_of_a_preset_loads_back_as_the_same_config(tmp_path: Path, name: str) -> None:
    config = load(preset_name=name)
    assert load(recipe(tmp_path, to_toml(config))) == config


def test_toml_of_a_changed_config_loads_back_as_the_same_config(tmp_path: Path) -> None:
    config = load(preset_name="decoupled", assignments=[
        "learners=2", "data.samples_by_learner=[3, 5]", "model.numbers={experts = 4, balance = 0.1}",
        'data.corpus="a \\"quoted\\" päth\\\\x"', "protocol.quorum=all", "cluster.latency_seconds=1e-9",
    ])  # fmt: skip
    assert config.data.corpus == 'a "quoted" päth\\x'
    assert load(recipe(tmp_path, to_toml(config))) == config


@settings(deadline=None)
@given(
    st.floats(0.0, 1.0), st.floats(1e-300, 1e3), st.text(max_size=20), st.lists(st.integers(1, 10**9), min_size=4, max_size=4)
)
def test_toml_keeps_every_number_and_word_exactly(alpha: float, rate: float, corpus: str, sizes: list[int]) -> None:
    config = load(overrides={
        "protocol": {"alpha": alpha}, "inner": {"learning_rate": rate}, "data": {"corpus": corpus, "samples_by_learner": sizes},
    })  # fmt: skip
    assert from_builtins(tomllib.loads(to_toml(config))) == config


def test_toml_holds_every_section_and_key_of_the_config() -> None:
    config = load(preset_name="decoupled")
    tables = tomllib.loads(to_toml(config))
    sections = [name for name in Config.__struct_fields__ if isinstance(getattr(config, name), msgspec.Struct)]
    assert list(tables) == list(Config.__struct_fields__)
    assert all(sorted(tables[s]) == sorted(getattr(config, s).__struct_fields__) for s in sections)


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_as_they_are_warn_of_nothing(name: str) -> None:
    assert warnings(load(preset_name=name)) == []


@pytest.mark.parametrize(
    ("preset_name", "assignments", "word"),
    [
        ("diloco", ["outer.apply_outer_optimizer_to=all_floating"], "all_floating"),
        ("diloco", ["inner.preserve_optimizer_state=false"], "preserve_optimizer_state"),
        ("decoupled", ["protocol.grace=none", "protocol.pace=0"], "pace 0"),
        ("decoupled", ["protocol.overlap=6"], "overlap = 6"),
        ("decoupled", ["protocol.lead=0"], "lead = 0 is a barrier"),
        ("decoupled", ["protocol.freeze_not_due=true"], "freeze_not_due"),
        ("decoupled", ["protocol.codec_up=top_k:0.1"], "top_k"),
        ("decoupled", ["protocol.codec_up=random_drop:0.1"], "random_drop"),
        ("diloco", ["inner.optimizer=SGD"], "AdamW"),
        ("diloco", ["total_steps=250", "protocol.local_steps_per_round=30"], "the last 10 of total_steps = 250 are in no merge"),
    ],
)
def test_combination_allowed_but_unfaithful_warns_with_one_sentence(preset_name: str, assignments: list[str], word: str) -> None:
    found = warnings(load(preset_name=preset_name, assignments=assignments))
    assert len(found) == 1 and word in found[0] and "\n" not in found[0]


# ---------------------------------------------------------------- one key at a time


@pytest.mark.parametrize("text", ["learners=3\nseed=9", "learners=3\n[model]\nname='lenet5'", "seed = 1\nv2 = 2"])
def test_assignment_of_several_keys_at_once_is_refused(text: str) -> None:
    key = text.partition("=")[0].strip()
    assert refusal(text) == f"--set {text!r}: sets more than {key}; give one --set for each key"


def test_assignment_may_end_its_line_and_say_why() -> None:
    assert load(assignments=["seed=9 # of luck\n"]).seed == 9
