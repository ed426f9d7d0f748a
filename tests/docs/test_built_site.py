"""The site itself, where mkdocs is installed (`make docs`): it builds strictly, and a reader without a network misses nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

import atoll

for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(package, reason="the docs' packages are not installed: `make docs`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(to)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return to


def test_no_page_loads_a_script_style_font_or_image_from_the_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*>")
    found = []
    for page in site.rglob("*.html"):
        for tag in loads.findall(page.read_text(encoding="utf8")):
            if not tag.startswith("<link") or re.search(r"href=[\"']?(https?:)?//", tag):
                found.append((page.name, tag))
    styles = [sheet for sheet in site.rglob("*.css") if re.search(r"(url\(|@import\s+)[\"']?(https?:)?//", sheet.read_text())]
    assert not found and not styles


def test_diagrams_formulas_and_search_are_carried(site: Path) -> None:
    assert 1_000_000 < (site / "assets" / "mermaid.tiny.js").stat().st_size < 4_000_000
    assert (site / "search" / "search_index.js").is_file(), "the index that a page opened from a disk can read"
    arithmetic = (site / "reference" / "arithmetic.html").read_text(encoding="utf8")
    assert arithmetic.count("<math") > 100 and "arithmatex" not in arithmetic


def test_the_api_pages_have_what_a_program_imports(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf8")
    assert not [name for name in atoll.__all__ if name != "__version__" and f'id="atoll.{name}"' not in page]
    assert all(f'id="atoll.Learner.{name}"' in page for name in ("step", "shard", "leave"))


def test_no_marker_of_a_generated_part_is_left(site: Path) -> None:
    assert not [page.name for page in site.rglob("*.html") if "generated:" in page.read_text(encoding="utf8")]
