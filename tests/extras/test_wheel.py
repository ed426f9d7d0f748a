"""`make wheel`: what it builds installs into an empty environment, and trains in an empty folder away from the repository."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from upped import processes_of, wait_until

from atoll.version import __version__

ROOT = Path(__file__).parents[2]
BESIDE = (".git", ".venv", "runs", "build", "dist", "site", "shared", "node_modules", "__pycache__", ".*_cache")
SMALL = ("--set", "total_steps=24", "--learners", "2")

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="needs the package build (extra release)"),
]


def clean() -> Mapping[str, str]:
    """Nothing of the repository, nor of the environment that the tests run in, may help."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a clone has it, without what this checkout has beside it; its dist folder."""
    tree = tmp_path_factory.mktemp("tree") / "atoll"
    beside = shutil.ignore_patterns(*BESIDE)
    shutil.copytree(ROOT, tree, ignore=beside)
    subprocess.run([sys.executable, "-m", "build", "--quiet"], cwd=tree, env=clean(), check=True, timeout=300)
    return tree / "dist"


def test_wheel_has_recipes_types_and_the_version_of_one_place(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"atoll-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    recipes = {f"atoll/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert recipes | sources | {"atoll/py.typed"} <= names
    assert not [name for name in names if not name.startswith(("atoll/", f"atoll-{__version__}.dist-info/"))]


def test_source_archive_has_what_the_tests_need_and_no_runs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {"pyproject.toml", "Makefile", "LICENSE", "recipes/first.toml", "tests/test_tidy.py", "src/atoll/py.typed"} <= names
    assert not [name for name in names if name.split("/")[0] in (".venv", "runs", "dist", "site", ".git")]


class Installed(NamedTuple):
    bin: Path
    folder: Path
    """Empty."""

    def atoll(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "atoll", *words], cwd=self.folder, env={**clean(), **environment}, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], env=clean(), check=True)
    (wheel,) = built.glob("*.whl")
    install = [home / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", wheel], env=clean(), cwd=home, check=True, timeout=600)
    folder = home / "empty"
    folder.mkdir()
    return Installed(home / "venv" / "bin", folder)


def test_train_without_a_recipe_and_by_a_name_works_in_an_empty_folder(installed: Installed) -> None:
    done = installed.atoll("train", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["total_steps"] == 24 and (installed.folder / summary["theta"]).is_file()
    named = installed.atoll("train", "tiny", "--virtual", *SMALL, "--json")
    assert named.returncode == 0, named.stderr
    assert json.loads(named.stdout)["preset"] == "decoupled"


def test_default_run_ends_with_a_loss_below_its_first(installed: Installed) -> None:
    done = installed.atoll("train", "--json", "--out", "default")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["loss_final"] < summary["loss_first"]


def test_watch_shows_a_run_as_text_and_as_a_page(installed: Installed) -> None:
    done = installed.atoll("train", "tiny", "--virtual", *SMALL, "--out", "watched", "--json")
    assert done.returncode == 0, done.stderr
    told = installed.atoll("watch", "watched", "--text")
    assert told.returncode == 0 and "finished: step 24 of 24" in told.stdout, told.stderr
    words = [installed.bin / "python", "-u", "-m", "atoll", "watch", "watched"]
    with subprocess.Popen(words, cwd=installed.folder, env=clean(), stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = re.search(r"http://\S+", serving.stdout.readline())
        assert address is not None
        page = urllib.request.urlopen(address[0], timeout=20).read().decode()
        status = json.load(urllib.request.urlopen(address[0].replace("/?", "/api/status?"), timeout=20))
        serving.terminate()  # a job in the background ignores SIGINT
    assert "<script" in page and status["last_step"] == 24


def test_up_on_this_machine_follows_and_ends_a_run(installed: Installed) -> None:
    up = installed.atoll("up", "tiny", "--on", "local", "--set", "learners=2", "--set", "total_steps=100000", "--out", "upped")
    assert up.returncode == 0, up.stderr
    try:
        tape = installed.folder / "upped" / "syncer" / "run.tape"
        wait_until(lambda: tape.exists() and b"FixParticipants" in tape.read_bytes(), "rounds", 300.0)
        states = json.loads(installed.atoll("status", "upped", "--json").stdout)
        assert states["is_up"] and set(states["workers"]) == {"syncer", "learner-0", "learner-1"}
        assert "joining the run at" in installed.atoll("logs", "0", "--run", "upped").stdout
    finally:
        down = installed.atoll("down", "upped")
    assert down.returncode == 0 and not processes_of(installed.folder / "upped"), down.stderr


def test_recipe_that_is_not_there_is_refused_with_the_names_of_those_that_are(installed: Installed) -> None:
    done = installed.atoll("train", "recipes/tiny.toml")
    assert done.returncode == 2
    assert "recipe recipes/tiny.toml: no such file; Atoll's own recipes go by name: " in done.stderr and " tiny" in done.stderr


def test_version_names_torch_and_the_platform_and_shells_complete(installed: Installed) -> None:
    version = installed.atoll("--version").stdout
    assert version.startswith(f"atoll {__version__}, torch 2.") and sys.platform.capitalize() in version
    found = installed.atoll(_ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll tra", COMP_CWORD="1")
    assert found.stdout.split() == ["train"]
    recipes = installed.atoll(_ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll train mnist", COMP_CWORD="2")
    assert recipes.stdout.split() == ["mnist_lenet5_diloco", "mnist_lenet5_fedavg"]
