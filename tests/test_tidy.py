"""Rooms import only what ARCHITECTURE.md allows; no stray prints, sleeps or unfinished notes."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "atoll"
FILES = sorted(SOURCE.rglob("*.py"))

BELOW = {"ids", "errors"}
ROOMS: dict[str, set[str]] = {
    "ids": set(),
    "errors": set(),
    "toml": BELOW,
    "config": BELOW | {"toml"},
    "rules": BELOW | {"config"},
    "protocol": BELOW | {"config", "rules"},
    "tensors": BELOW | {"config"},
    "codecs": BELOW,
    "tape": BELOW | {"config", "protocol"},
    "chaos": BELOW,
    "workload": BELOW | {"config"},
    "executor": BELOW | {"config", "rules", "protocol", "tensors", "codecs", "workload"},
    "transport": BELOW,
    "sim": BELOW | {"config", "rules", "protocol", "tape", "chaos", "executor", "tensors"},
    "planner": BELOW | {"toml", "config", "rules", "sim", "executor"},
    "runtime": BELOW
    | {"config", "rules", "protocol", "tape", "chaos", "executor", "tensors", "codecs", "transport", "workload", "views"},
    "views": BELOW | {"config", "protocol", "tape"},
    "cli": BELOW | {"planner", "config", "protocol", "tape", "chaos", "views", "sim", "executor", "runtime", "transport"},
    "__main__": {"cli"},
}
"""A room imports itself and what its row names: the table of ARCHITECTURE.md."""

NOT_IN_PROTOCOL = {"torch", "asyncio", "time", "random", "os", "socket", "threading", "logging", "numpy"}
FORBIDDEN: dict[str, set[str]] = {
    "protocol": NOT_IN_PROTOCOL,
    "rules": NOT_IN_PROTOCOL,
    "config": {"torch", "asyncio", "time", "random", "threading"},
    "tape": {"torch", "asyncio", "time", "random"},
    "chaos": {"torch", "asyncio", "time"},
    "views": {"torch", "asyncio"},
    "sim": {"asyncio", "time", "threading"},
}


def room_of(path: Path) -> str:
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "__init__.py"], ids=lambda p: str(p.relative_to(SOURCE)))
def test_room_imports_only_what_its_row_names(path: Path) -> None:
    room = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "atoll" and len(parts) > 1 and parts[1] != "__version__":
            assert parts[1] == room or parts[1] in ROOMS[room], f"{path.name} imports {name}"
        assert parts[0] not in FORBIDDEN.get(room, set()), f"{path.name} imports {name}"


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Folders of tests are no packages: of two files of one name pytest collects one, and only a run of all of them tells."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_every_room_has_a_row() -> None:
    assert {room_of(f) for f in FILES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_source_has_no_print_no_sleep_no_pickle_and_no_note_to_self(path: Path) -> None:
    text = path.read_text(encoding="utf8")
    tree = ast.parse(text)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"print", "time.sleep", "sleep", "eval", "exec"}
    assert not any(word in text for word in ("TODO", "FIXME", "XXX"))
    assert not any(name.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal") for name in imports_of(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_and_files_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf8")
    tree = ast.parse(text)
    imports = sum((n.end_lineno or 0) - n.lineno + 1 for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom))
    assert text.count("\n") - imports <= 500, f"{path.name} outgrew its room: split it by noun"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 75, f"{path.name}: {node.name} is too long"
