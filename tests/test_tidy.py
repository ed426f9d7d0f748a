"""Rooms import only what ARCHITECTURE.md's table allows, files do not import each other in a circle, retired words stay out, and
nothing decides by the words of a sentence."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "atoll"
FILES = sorted(SOURCE.rglob("*.py"))

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

EVERYWHERE = {"ids", "errors", "version"}


def table() -> dict[str, set[str]]:
    """The rooms of ARCHITECTURE.md and what each may import. A sub-room has its room's row."""
    rooms: dict[str, set[str]] = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([a-z_]+)(?:\.py|/)`", cells[0]) if line.startswith("| `") and len(cells) == 3 else []
        for name in names:
            rooms[name] = set() if cells[2] == "everything" else set(re.findall(r"[a-z_]+", cells[2]))
            if cells[2] == "everything":
                rooms[name] = {room_of(path) for path in FILES}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


ROOMS = table()


def test_room_imports_only_what_its_row_names() -> None:
    for path in (file for file in FILES if file.name != "__init__.py"):
        room = room_of(path)
        for imported in imports_of(path):
            parts = imported.split(".")
            if parts[0] == "atoll" and len(parts) > 1 and room != "__main__":
                assert parts[1] in {room, *EVERYWHERE, *ROOMS[room]}, f"{shown(path)} imports {imported}"
            assert parts[0] not in FORBIDDEN.get(room, set()), f"{shown(path)} imports {imported}"


def test_every_room_has_a_row_and_every_sub_room_a_line() -> None:
    assert {room_of(f) for f in FILES} - {"__init__", "__main__"} == set(ROOMS)
    written = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf8")
    for room in ("executor", "runtime", "workload", "sim"):
        for folder in (SOURCE / room).iterdir():
            if (folder / "__init__.py").exists():
                assert f"| `{room}/{folder.name}/` |" in written


def test_no_two_files_import_each_other_directly_or_in_a_circle() -> None:
    """Not for types either: an import below TYPE_CHECKING counts."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if path.parent == SOURCE and path.name == "__init__.py":
            continue  # the package's public names are imported when they are asked for
        wanted = {name if name in MODULES else name.rpartition(".")[0] for name in imports_of(path)}
        graph[module] = {name for name in wanted if name in MODULES and name not in (module, "atoll")}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join((*trail[trail.index(module) :], module))}"
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


# ---------------------------------------------------------------- words

RETIRED = re.compile(
    r"\b(?:TensorHands|FleetHands|BroughtHands|Hands|hands_for|blob|Blob|desk|Desk|errand|Errand|shelf|Shelf|shelves|workbench|"
    r"Workbench|onlooker|Onlooker|nursery|Nursery|hurdles?|Hurdles|muster|mustered|stance|Stance|entrance|kept_text|"
    r"outer_steps|muster_seconds)\b"
)
SPEAKS_OF_THEM = {"src/atoll/config/renamed.py", "tests/test_tidy.py", "CHANGELOG.md"}
"""Where an old key is named so that its new name can be told."""


def pages() -> Iterator[Path]:
    for folder, endings in (("src", ("*.py",)), ("tests", ("*.py",)), ("docs", ("*.md", "*.py")), ("bench", ("*.py",))):
        for ending in endings:
            yield from (ROOT / folder).rglob(ending)
    yield from (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))


def test_retired_words_are_nowhere() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in pages()
        if path.relative_to(ROOT).as_posix() not in SPEAKS_OF_THEM
        for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1)
        for word in RETIRED.findall(line)
        if "renamed" not in line and "is called" not in line
    ]
    assert not found


SENTENCES = {"reason", "reasons", "flaw", "detail", "message", "sentence", "refusal", "objection", "log_line", "stderr", "why"}
READING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find", "index", "split"}


def is_sentence(node: ast.expr) -> bool:
    """A name or attribute that holds words for people, or such words made by `str(error)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and len(node.args) == 1:
        argument = node.args[0]
        return isinstance(argument, ast.Name) and argument.id in ({"error"} | SENTENCES)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in SENTENCES


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_text, node.elts))
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""
    return constant or isinstance(node, ast.JoinedStr)


def decides_by_words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            function = node.func
            if function.attr in READING and is_sentence(function.value):
                yield ast.unparse(node)
            if isinstance(function.value, ast.Name) and function.value.id == "re" and any(map(is_sentence, node.args)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_sentence, sides)) and any(map(is_text, sides)):
                yield ast.unparse(node)


def test_nothing_decides_by_the_words_of_a_sentence() -> None:
    found = {shown(path): list(decides_by_words(tree_of(path))) for path in FILES}
    assert not {path: decisions for path, decisions in found.items() if decisions}


@pytest.mark.parametrize(
    "planted",
    [
        "if effect.reason.startswith('poisoned'): pass",
        "late = 'late' in refusal.detail",
        "gone = reason == 'is gone'",
        "found = re.search(r'os error (\\d+)', str(error))",
        "full = 'No space' in str(error)",
        "if flaw in ('NaN', 'Inf'): pass",
    ],
)
def test_planted_decision_by_words_is_found(planted: str) -> None:
    assert list(decides_by_words(ast.parse(planted)))


# ---------------------------------------------------------------- habits


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Folders of tests are no packages: of two files of one name pytest collects one, and only a run of all of them tells."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_test_names_are_short_and_no_test_imports_a_private_name() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert len(node.name) <= 80, f"{path.name}: {node.name}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atoll"):
                private = [a.name for a in node.names if a.name.startswith("_") and a.name != "__version__"]
                assert not private, f"{path.name} imports {private}"


def test_source_has_no_print_no_sleep_no_pickle_and_no_note_to_self() -> None:
    for path in FILES:
        calls = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
        assert not calls & {"print", "time.sleep", "sleep", "eval", "exec"}, shown(path)
        assert not any(word in path.read_text(encoding="utf8") for word in ("TODO", "FIXME", "XXX")), shown(path)
        packages = {module.split(".")[0] for module in imports_of(path)}
        assert not packages & {"pickle", "cloudpickle", "dill", "marshal"}, shown(path)


def test_functions_and_files_stay_readable() -> None:
    for path in FILES:
        tree, lines = tree_of(path), path.read_text(encoding="utf8").count("\n")
        imports = sum((n.end_lineno or 0) - n.lineno + 1 for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom))
        assert lines - imports <= 500, f"{shown(path)} outgrew its room: split it by noun"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 75, f"{shown(path)}: {node.name} is too long"
