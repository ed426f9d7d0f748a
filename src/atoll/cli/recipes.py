"""Atoll's own recipes and fault plans, by name: in a wheel they lie inside the package, in a checkout at its top."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import ConfigError, PlanError

FAULTS = "[[faults]]"
"""A fault plan has at least one such table, and a recipe has none."""


def own_recipes() -> dict[str, Path]:
    return {path.stem: path for path in _own_files() if FAULTS not in path.read_text(encoding="utf8")}


def own_plans() -> dict[str, Path]:
    return {path.stem: path for path in _own_files() if FAULTS in path.read_text(encoding="utf8")}


def _own_files() -> list[Path]:
    """One folder serves both: `recipes/` of the repository, which the wheel has as `atoll/recipes/`."""
    packaged = Path(__file__).parents[1] / "recipes"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[3] / "recipes"
    return sorted(folder.glob("*.toml"))


def found_recipe(recipe: Path | None) -> Path | None:
    """A file that is there is meant, whatever its name. One that cannot be read is refused by the code that reads it."""
    if recipe is None or not _is_missing(recipe):
        return recipe
    own = own_recipes()
    if str(recipe) in own:
        return own[str(recipe)]
    raise ConfigError(f"recipe {recipe}: no such file; Atoll's own recipes go by name: {', '.join(own)}")


def found_plan(plan: str | None) -> str | None:
    if plan is None or not _is_name(plan) or not _is_missing(Path(plan)):
        return plan
    own = own_plans()
    if plan in own:
        return str(own[plan])
    raise PlanError(
        f"chaos plan {plan}: no such file; give a TOML file, random:SEED:COUNT:SECONDS or a plan of Atoll's: {', '.join(own)}"
    )


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _is_name(plan: str) -> bool:
    return plan.strip() != "" and not plan.startswith("random:") and Path(plan).suffix == "" and "/" not in plan


def complete_recipe(incomplete: str) -> Iterator[str]:
    """For the shell: Atoll's own recipes, then what lies there."""
    yield from (name for name in own_recipes() if name.startswith(incomplete))
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    found = (path for path in sorted(folder.glob("*")) if path.is_dir() or path.suffix == ".toml")
    shown = (f"{path}/" if path.is_dir() else str(path) for path in found)
    yield from (path for path in shown if path.startswith(incomplete))


RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe", readable=False, callback=found_recipe, autocompletion=complete_recipe,
        help="The recipe that all of them share: a TOML file, or the name of one of Atoll's own.",
    ),
]  # fmt: skip
