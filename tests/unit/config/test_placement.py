"""[placement]: where processes go, checked once, and no part of what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config import load, load_placement
from atoll.errors import ConfigError

GROUPS = """
[placement]
leave_seconds = 45.0
[[placement.learners]]
group = "a"
count = 3
least = 2
most = 5
resources = { cpus = 4, gpus = 1 }
site = "tokyo"
[[placement.learners]]
group = "b"
environment = { LEVEL = "1" }
"""


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf8")
    return path


def test_groups_say_how_many_learners_there_are_and_what_each_needs(tmp_path: Path) -> None:
    path = recipe(tmp_path, GROUPS)
    placement, settings = load_placement(path), load(path)
    assert settings.learners == 4
    assert [group.group for group in placement.by_learner(settings.learners)] == ["a", "a", "a", "b"]
    assert [group.device for group in placement.groups(settings.learners)] == ["cuda", "cpu"]


def test_placement_is_no_part_of_the_config(tmp_path: Path) -> None:
    """So a run may go on under another one, and neither tapes nor learners carry it."""
    assert load(recipe(tmp_path, GROUPS)) == load(overrides={"learners": 4})
    assert load_placement(recipe(tmp_path, "total_steps = 9\n")).by_learner(4) == load_placement(None).by_learner(4)


def test_set_changes_placement_and_config_each_by_its_own_keys(tmp_path: Path) -> None:
    path, words = recipe(tmp_path, GROUPS), ["placement.slurm.partition=gpu", "placement.leave_seconds=9", "total_steps=77"]
    placement = load_placement(path, words)
    assert (placement.slurm.partition, placement.leave_seconds, len(placement.learners)) == ("gpu", 9.0, 2)
    assert load(path, assignments=words).total_steps == 77


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[placement]\nwhere = 1\n", "unknown field `where`"),
        ("placement = 3\n", "placement"),
        ("[[placement.learners]]\ncount = 0\n", "count"),
        ("[[placement.learners]]\ngroup = 'Big'\n", "learners"),
        ("[[placement.learners]]\n[[placement.learners]]\n", "two groups have the name 'learners'"),
        ("[[placement.learners]]\nranks = 0\n", "placement.learners[0].ranks: expected `int` >= 1"),
        ("[[placement.learners]]\nranks = 2\nparallel = 'fsdp'\n", "placement.learners[0].parallel: invalid enum value 'fsdp'"),
        ("[[placement.learners]]\nparallel = 'ddp'\n", "says how several ranks share the work; set ranks, or leave it out"),
        ("[[placement.learners]]\ncount = 2\nleast = 3\n", "least = 3: must be at most count = 2"),
        ("[[placement.learners]]\ncount = 2\nmost = 1\n", "most = 1: must be at least count = 2"),
        ("[[placement.learners]]\nenvironment = { 'A B' = '1' }\n", "'A B' is no name of an environment variable"),
        ("learners = 3\n[[placement.learners]]\ncount = 2\n", "the groups of [placement] have 2"),
    ],
)
def test_wrong_placement_is_refused_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(recipe(tmp_path, text))
    assert says in str(caught.value) and "\n" not in str(caught.value)
