"""A public name has one owner: a reader who greps for a class finds one definition of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "atoll"
FILES = sorted(SOURCE.rglob("*.py"))


def public(path: Path, *kinds: type[ast.stmt]) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf8")).body:
        if isinstance(node, kinds) and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def aliases(path: Path) -> Iterator[str]:
    """Assigned names that read as a class."""
    for node in ast.parse(path.read_text(encoding="utf8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id[0].isupper() and not t.id.isupper())


def is_command(path: Path, name: str) -> bool:
    """A command has its file's name and may be named after the function that it calls; `main` is where a process begins."""
    return name == "main" or (path.relative_to(SOURCE).parts[0] == "cli" and path.stem == name)


def shared(owners: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(files)}" for name, files in owners.items() if len(files) > 1 and not name.startswith("_")]


def owners_of(*kinds: type[ast.stmt]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for name in public(path, *kinds):
            if not is_command(path, name):
                found[name].append(str(path.relative_to(SOURCE)))
    return found


def test_every_public_class_has_one_owner() -> None:
    assert not shared(owners_of(ast.ClassDef))


def test_every_public_function_has_one_owner_unless_it_is_a_command() -> None:
    assert not shared(owners_of(ast.FunctionDef, ast.AsyncFunctionDef))


def test_no_type_alias_has_the_name_of_a_class() -> None:
    classes = owners_of(ast.ClassDef)
    assert not [f"{path.relative_to(SOURCE)}: {name}" for path in FILES for name in aliases(path) if name in classes]
