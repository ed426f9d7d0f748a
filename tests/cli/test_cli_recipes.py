"""Recipes and fault plans by their names, from any folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from command import atoll

from atoll.cli.recipes import complete_recipe, own_plans, own_recipes
from atoll.config import load

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_file_is_a_recipe_or_a_plan_by_its_name() -> None:
    assert {**own_recipes(), **own_plans()} == {path.stem: path for path in RECIPES.glob("*.toml")}
    assert all("faults" in tomllib.loads(path.read_text(encoding="utf8")) for path in own_plans().values())


def test_named_recipe_is_the_file_of_that_name(tmp_path: Path) -> None:
    done = atoll("config", "tiny", cwd=tmp_path)
    assert done.returncode == 0 and tomllib.loads(done.stdout)["total_steps"] == load(RECIPES / "tiny.toml").total_steps


def test_file_of_that_name_in_the_folder_goes_first(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("total_steps = 7\n")
    assert tomllib.loads(atoll("config", "tiny", cwd=tmp_path).stdout)["total_steps"] == 7


@pytest.mark.parametrize("words", [("config", "tyni"), ("config", "recipes/tiny.toml"), ("compare", "--recipe", "tyni")])
def test_missing_recipe_is_refused_with_the_names_there_are(words: tuple[str, ...], tmp_path: Path) -> None:
    done = atoll(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"recipe {words[-1]}: no such file; Atoll's own recipes go by name: books_35m, " in done.stderr


def test_named_plan_is_used_and_a_missing_one_refused(tmp_path: Path) -> None:
    words = ("sim", "--set", "total_steps=8", "--json", "--chaos")
    assert atoll(*words, "two_kills", cwd=tmp_path).returncode == 0
    done = atoll(*words, "three_kills", cwd=tmp_path)
    assert done.returncode == 2 and "chaos plan three_kills: no such file; " in done.stderr and "two_kills" in done.stderr


def test_completion_offers_names_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more").mkdir()
    for name in ("mine.toml", "more/mild.toml", "mint.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert list(complete_recipe("m")) == ["mnist_lenet5_diloco", "mnist_lenet5_fedavg", "moe_tiny", "mine.toml", "more/"]
    assert list(complete_recipe("more/")) == ["more/mild.toml"]
