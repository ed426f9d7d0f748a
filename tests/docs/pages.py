"""What the tests of the docs share: the repository's pages, their links and headings, and the generator of the reference."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)(?: +\{ *#([\w.-]+) *\})? *$", re.MULTILINE)


def load_generator() -> ModuleType:
    """docs/generate.py is no part of the package: the docs' build imports it from its folder, and so do the tests."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GENERATE = load_generator()


def text_of(page: Path) -> str:
    """As the site shows it: with the generated parts."""
    expanded: str = GENERATE.expand(page.read_text(encoding="utf8"))
    return expanded


def links_of(text: str) -> list[str]:
    """Targets of links outside of code, those of the web left out."""
    plain = _CODE.sub("", _FENCE.sub("", text))
    return [target for target in _LINK.findall(plain) if not re.match(r"[a-z]+:", target)]


def anchors_of(text: str) -> set[str]:
    found, names = _HEADING.findall(_FENCE.sub("", text)), list[str]()
    for title, given in found:
        name = given or slug(title)
        names.append(name if name not in names else f"{name}_{names.count(name)}")
    return set(names)


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """Every table of a page, as rows by the head's words, without backquotes."""
    found, lines = list[list[dict[str, str]]](), _FENCE.sub("", text).splitlines()
    for at, line in enumerate(lines):
        if line.startswith("|") and re.fullmatch(r"[|\s-]+", lines[at + 1] if at + 1 < len(lines) else ""):
            rows = list(itertools.takewhile(lambda each: each.startswith("|"), lines[at + 2 :]))
            found.append([dict(zip(_cells(line), _cells(row), strict=True)) for row in rows])
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]


def slug(title: str) -> str:
    """As Python-Markdown's toc has it, and forges too."""
    kept = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)
