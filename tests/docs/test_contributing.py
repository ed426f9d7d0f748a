"""CONTRIBUTING.md's three recipes, followed word by word on a copy of the tree; how many files of src each of them touches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import ROOT

pytestmark = pytest.mark.soak  # it applies every recipe of the page to a copy of the source

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
BLOCK = r"\n\n```\w*\n(?P<block>.*?)^```$"
EDIT = re.compile(
    r"^In `(?P<file>[^`]+)`, (?P<how>after|before|replace) `(?P<line>[^`]+)`,? (?:add|by):" + BLOCK, re.MULTILINE | re.DOTALL
)
NEW = re.compile(r"^Make `(?P<file>[^`]+)`:" + BLOCK, re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```\n(?P<block>atoll .*?)^```$", re.MULTILINE | re.DOTALL)


class Followed(NamedTuple):
    folder: Path
    """The copy of the tree."""
    touched: set[str]
    """Files of src that were changed or made."""
    code: int
    """With which the recipe's commands and the check after them ended."""
    output: str
    """What they printed."""


def recipe(title: str) -> str:
    found = re.search(rf"^### {title}\n(.*?)(?=^##|\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md has no recipe {title!r}"
    return found[1]


def edited(text: str, how: str, line: str, block: str) -> str:
    lines = text.splitlines(keepends=True)
    at = [number for number, here in enumerate(lines) if here.strip() == line]
    assert len(at) == 1, f"{line!r} is {len(at)} lines of the file, and the recipe means one"
    first, last = {"before": (at[0], at[0]), "after": (at[0] + 1, at[0] + 1), "replace": (at[0], at[0] + 1)}[how]
    return "".join([*lines[:first], block, *lines[last:]])


def applied(title: str, folder: Path) -> set[str]:
    """Applies the recipe's blocks to a copy of the tree below `folder`; which files that touched."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info"))  # compiled files stay valid
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    steps, touched = recipe(title), set[str]()
    for step in EDIT.finditer(steps):
        path = folder / step["file"]
        path.write_text(edited(path.read_text(encoding="utf8"), step["how"], step["line"], step["block"]), encoding="utf8")
        touched.add(step["file"])
    for step in NEW.finditer(steps):
        path = folder / step["file"]
        assert not path.exists()
        path.write_text(step["block"], encoding="utf8")
        touched.add(step["file"])
    return touched


def commands_of(title: str) -> list[str]:
    """The recipe's own commands, line by line."""
    steps = recipe(title)
    blocks = sum(1 for line in steps.splitlines() if line.startswith("```")) // 2
    commands = [block["block"] for block in COMMANDS.finditer(steps)]
    understood = len(EDIT.findall(steps)) + len(NEW.findall(steps)) + len(commands)
    assert understood == blocks, "a block of the recipe is neither an edit nor a file nor commands"
    return [line.partition(" #")[0] for block in commands for line in block.splitlines()]


FORKED = """
import json, os, shlex, sys, traceback
import torch
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports as much again

def follow(folder, lines, check):
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(folder)
    sys.path.insert(0, os.path.join(folder, "src"))
    from atoll.cli.app import app
    assert sys.modules["atoll"].__file__.startswith(folder), "not the copy's sources"
    for line in lines:
        assert not app(shlex.split(line)[1:], standalone_mode=False), line
    exec(check, {})

for job in json.load(sys.stdin):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            follow(*job)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""A process for each recipe, with the sources of its own copy and nothing of this tree's: forked from one that has imported
torch and nothing of Atoll, since that import is most of what a start costs."""


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Followed]:
    folders = {title: tmp_path_factory.mktemp("recipe") for title in CHECKS}
    touched = {title: applied(title, folder) for title, folder in folders.items()}
    for title, folder in folders.items():
        ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *sorted(touched[title])]
        done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    jobs = [(str(folders[title]), commands_of(title), check) for title, check in CHECKS.items()]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], input=json.dumps(jobs), env=environment, capture_output=True, text=True, timeout=480
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = map(int, done.stdout.split())
    of_src = {title: {name for name in names if name.startswith("src/")} for title, names in touched.items()}
    return {
        title: Followed(folder, of_src[title], code, (folder / "output").read_text())
        for (title, folder), code in zip(folders.items(), codes, strict=True)
    }


CHECKS = {
    "Add a message": """
import msgspec
from atoll.config import load
from atoll.protocol.causality import Mailbox
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.syncer import SyncerMachine
from atoll.protocol.vocabulary import Envelope, Hello, Received, Refuse, Slowed, Started

machine, mailbox = SyncerMachine(load(preset_name="decoupled")), Mailbox(0, 0)
machine.on(Started(0), 0)
held = (-1,) * machine.config.protocol.fragments
for body in (Hello(held, 0, 0, True, (), 0, Reason(Why.JOINS)), Slowed(7, 10**9)):
    sent = mailbox.seal(-1, body)
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(sent), type=Envelope) == sent
    assert not [effect for effect in machine.on(Received(sent, 0), 1) if isinstance(effect, Refuse)]
assert machine.slowed == {0: 1}
impossible = mailbox.seal(-1, Slowed(-1, 0))
assert [effect for effect in machine.on(Received(impossible, 0), 2) if isinstance(effect, Refuse)]
assert machine.slowed == {0: 1}
""",
    "Add a codec": """
import torch
from atoll.codecs import codec
from atoll.config.codecs import wire_bits

half, x = codec("fp16"), torch.tensor([0.0, -1.5, 2.0**-14, 1e9, -3.14159])
packet = half.encode(x)
assert packet.nbytes == half.nbytes(5) == 10 and wire_bits("fp16") == 16
assert half.decode(packet).tolist() == [0.0, -1.5, 2.0**-14, 65504.0, -3.140625]
""",
    "Add a preset": "from atoll.config import PRESETS; assert 'local_sgd' in PRESETS",
}
"""What must hold after each recipe's own commands."""


def test_a_message_touches_four_files_and_the_machine_handles_it(followed: dict[str, Followed]) -> None:
    done = followed["Add a message"]
    assert done.code == 0, done.output
    assert len(done.touched) <= 4
    assert "> syncer slowed" in done.output and "< learner1 slowed" in done.output


def test_a_codec_touches_two_files_and_a_run_uses_it(followed: dict[str, Followed]) -> None:
    done = followed["Add a codec"]
    assert done.code == 0, done.output
    assert len(done.touched) <= 2
    learnt(done.folder / "runs" / "fp16")


def test_a_preset_touches_one_file_and_trains(followed: dict[str, Followed]) -> None:
    done = followed["Add a preset"]
    assert done.code == 0, done.output
    assert done.touched == {"src/atoll/config/presets.py"}
    assert 'preset = "local_sgd"' in done.output
    learnt(done.folder / "runs" / "local_sgd")


def learnt(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
    assert summary["loss_final"] < summary["loss_first"]
