"""bench/provenance.py: a line names the commit of the code that ran, or says that it was another."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1\n", encoding="utf8")
    (tmp_path / "bench" / "results" / "a.jsonl").write_text("{}\n", encoding="utf8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_code_of_the_commit_has_its_name_while_lines_are_added(bench_script: Callable[[str], ModuleType], tree: Path) -> None:
    provenance = bench_script("provenance")
    (tree / "bench" / "results" / "a.jsonl").write_text("{}\n{}\n", encoding="utf8")
    assert provenance.commit(tree / "bench") == git(tree, "rev-parse", "--short", "HEAD")


@pytest.mark.parametrize("name", ["src/a.py", "src/new.py", "bench/new.py"])
def test_other_code_is_dirty(bench_script: Callable[[str], ModuleType], tree: Path, name: str) -> None:
    (tree / name).write_text("2\n", encoding="utf8")
    assert bench_script("provenance").commit(tree / "bench") == git(tree, "rev-parse", "--short", "HEAD") + "-dirty"


def test_tree_without_git_has_no_commit(bench_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert bench_script("provenance").commit(tmp_path) == ""
