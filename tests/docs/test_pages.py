"""Pages: links resolve, files are in the navigation, terms of the glossary are used, diagrams are ones that mermaid reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, anchors_of, links_of, text_of

TERM = re.compile(r"^#### (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_resolve(page: Path) -> None:
    broken = []
    for target in links_of(text_of(page)):
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors_of(text_of(to))):
            broken.append(target)
    assert not broken


def test_paths_of_docs_that_sources_name_exist() -> None:
    """Comments, errors and recipes send readers to pages; a page that moved must not leave them behind."""
    named = re.compile(r"docs/[\w/-]+\.md")
    places = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("recipes/*.toml")]
    missing = {
        (str(place.relative_to(ROOT)), name)
        for place in places
        for name in named.findall(place.read_text(encoding="utf8"))
        if not (ROOT / name).is_file()
    }
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"assets/README.md"}
    assert pages <= named
    assert named - pages == {"contributing.md", "architecture.md", "changelog.md"}, "these are made from files of the root"


def test_every_term_of_the_glossary_is_used() -> None:
    terms = TERM.findall((DOCS / "glossary.md").read_text(encoding="utf8"))
    assert len(terms) > 50 and terms == sorted(terms, key=str.lower)
    others = [page for page in PAGES if page.name != "glossary.md"]
    words = "\n".join(path.read_text(encoding="utf8") for path in (*others, *ROOT.glob("src/**/*.py"))).lower()
    words = re.sub(r"[\s_]+", " ", words)
    assert not [term for term in terms if not re.search(rf"\b{re.escape(term.lower())}(s|es)?\b", words)]


def test_diagrams_have_no_semicolon() -> None:
    """It ends a statement of mermaid: one in a text makes the diagram an error on the page, and no build notices."""
    texts = [page.read_text(encoding="utf8") for page in DOCS.rglob("*.md")]
    diagrams = [block for text in texts for block in re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)]
    assert len(diagrams) >= 5
    assert not [line for diagram in diagrams for line in diagram.splitlines() if ";" in line]
