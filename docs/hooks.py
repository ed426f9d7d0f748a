"""What mkdocs does with a page besides rendering it: generated parts, pages from the repository's root, links and formulas.

Sources link as files of the repository do, so that they work in an editor and on a forge too; here a link is turned into one of
the site, and one to a file that is no page (a source, a recipe) becomes plain text. Formulas become MathML, which browsers render
without a script and without a font of their own.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import generate

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files of the repository's root."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    source = ROOT_PAGES.get(uri, f"docs/{uri}")
    parts = FENCE.split(generate.expand(markdown))
    return "".join(part if part.startswith("```") else _with_site_links(part, uri, source) for part in parts)


def _with_site_links(text: str, uri: str, source: str) -> str:
    def relinked(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, hash_, anchor = target.partition("#")
        place = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if place is None:
            return words
        return f"{image}[{words}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    return LINK.sub(relinked, text)


def _on_site(path: str) -> str | None:
    """Where a file of the repository is on the site; None: it is not."""
    if path == "README.md":
        return "index.md"
    for page, source in ROOT_PAGES.items():
        if path == source:
            return page
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    def rendered(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]), display=display)

    return FORMULA.sub(rendered, content)
