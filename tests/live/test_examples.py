"""The examples as users run them: two processes each against a real syncer. Those that need other people's trainers are
marked `extras`: `make test-extras` installs these and runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.protocol.vocabulary import FixParticipants, StepDone
from atoll.tape.format import Tape

REPOSITORY = Path(__file__).parent.parent.parent
PATIENCE_SECONDS = 180.0

EXAMPLES = {
    "plain_loop": ("torch", 16 * 64),
    "hf_trainer": ("transformers", 2 * 8 * 65),
    "lightning_module": ("lightning", 2 * 8 * 64),
}
"""What each needs, and the tokens of one optimiser step: two of them accumulate two batches."""



@pytest.mark.parametrize("example", [
    "plain_loop",
    pytest.param("hf_trainer", marks=pytest.mark.extras),
    pytest.param("lightning_module", marks=pytest.mark.extras),
])  # fmt: skip
def test_two_learners_of_the_example_train_one_model(example: str, tmp_path: Path) -> None:
    package, tokens = EXAMPLES[example]
    assert importlib.util.find_spec(package) is not None, f"{package} is not installed: `make test-extras` does it"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "atoll", "syncer", REPOSITORY / "recipes" / "custom.toml", "--dir", tmp_path / "s"]
    words += ["--listen", "127.0.0.1:0", "--set", "total_steps=16", "--set", "limits.start_wait_seconds=120"]
    words += ["--set", "protocol.quorum=2"]  # else one of them may take all steps while the other stalls
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as syncer:
        assert syncer.stderr is not None
        line = next(line for line in syncer.stderr if "listens on" in line)
        address = line.split("listens on ")[1].split(",")[0]
        loop = [sys.executable, REPOSITORY / "examples" / f"{example}.py", "--syncer", address, "--token", tmp_path / "s/token"]
        learners = [
            subprocess.Popen([*loop, "--out", tmp_path / f"l{i}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env=environment)
            for i in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in learners]
        syncer.stderr.read()
    assert [process.returncode for process in learners] == [0, 0], "\n".join(said)
    assert syncer.returncode == 0
    rounds = [e for r in Tape(tmp_path / "s" / "run.tape").records() for e in r.effects if isinstance(e, FixParticipants)]
    assert max(len(e.participants) for e in rounds if e.fragments) == 2, "nothing of both was ever merged"
    tape = Tape(tmp_path / "l0" / "0.tape")
    assert not tape.header.tensors, "a loop of the user's own replays its decisions only"
    steps = [r.event for r in tape.records() if isinstance(r.event, StepDone)]
    assert {step.tokens for step in steps} == {tokens}, "an optimiser step of all its micro-batches, and nothing else"
    if steps[0].loss is not None and steps[-1].loss is not None:
        assert steps[-1].loss < steps[0].loss - 0.5
