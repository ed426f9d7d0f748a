"""The examples as users run them: two processes each against a real syncer. One of the two is started as a user starts it; the
other and the syncer are forked, since importing torch takes seconds of a core. Those that need other people's trainers are
marked `extras`: `make test-extras` installs these and runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import SharedForkServer

from atoll.protocol.vocabulary import FixParticipants, StepDone
from atoll.runtime.local.forkserver import Child
from atoll.tape.format import Tape

REPOSITORY = Path(__file__).parent.parent.parent
PATIENCE_SECONDS = 180.0

EXAMPLES = {
    "plain_loop": ("torch", 16 * 64),
    "hf_trainer": ("transformers", 2 * 8 * 65),
    "lightning_module": ("lightning", 2 * 8 * 64),
}
"""What each needs, and the tokens of one optimiser step: two of them accumulate two batches."""


def address_of(directory: Path, syncer: Child) -> str:
    path, pause = directory / "address", threading.Event()
    while not path.exists():
        assert syncer.poll() is None, "the syncer did not start"
        pause.wait(0.05)
    return path.read_text()


@pytest.mark.parametrize("example", [
    "plain_loop",
    pytest.param("hf_trainer", marks=pytest.mark.extras),
    pytest.param("lightning_module", marks=pytest.mark.extras),
])  # fmt: skip
def test_two_learners_of_the_example_train_one_model(example: str, tmp_path: Path) -> None:
    package, tokens = EXAMPLES[example]
    assert importlib.util.find_spec(package) is not None, f"{package} is not installed: `make test-extras` does it"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = ["total_steps=16", "limits.start_wait_seconds=120", "protocol.quorum=2"]  # else one may take all steps alone
    words = ["syncer", str(REPOSITORY / "recipes" / "custom.toml"), "--dir", str(tmp_path / "s"), "--listen", "127.0.0.1:0"]
    fork_server = SharedForkServer()
    try:
        syncer = fork_server.spawn([*words, *(word for option in options for word in ("--set", option))], tmp_path / "syncer.log")
        script = [str(REPOSITORY / "examples" / f"{example}.py"), "--syncer", address_of(tmp_path / "s", syncer)]
        learner = [*script, "--token", str(tmp_path / "s" / "token"), "--out"]
        forked = fork_server.spawn(["python", *learner, str(tmp_path / "l1")], tmp_path / "l1.log")
        ours = subprocess.run(
            [sys.executable, *learner, tmp_path / "l0"], env=environment, capture_output=True, text=True, check=False,
            timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        for child in (forked, syncer):
            child.wait(PATIENCE_SECONDS)
        ended = ours.returncode, forked.poll(), syncer.poll()
    finally:
        fork_server.close()
    assert ended == (0, 0, 0), ours.stderr + (tmp_path / "l1.log").read_text()
    rounds = [e for r in Tape(tmp_path / "s" / "run.tape").records() for e in r.effects if isinstance(e, FixParticipants)]
    assert max(len(e.participants) for e in rounds if e.fragments) == 2, "nothing of both was ever merged"
    tape = Tape(tmp_path / "l0" / "0.tape")
    assert not tape.header.tensors, "a loop of the user's own replays its decisions only"
    steps = [r.event for r in tape.records() if isinstance(r.event, StepDone)]
    assert {step.tokens for step in steps} == {tokens}, "an optimiser step of all its micro-batches, and nothing else"
    if steps[0].loss is not None and steps[-1].loss is not None:
        assert steps[-1].loss < steps[0].loss - 0.5
