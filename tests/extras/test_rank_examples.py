"""The examples of several ranks, as a user starts them: two learners of two ranks each under torchrun, on gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from thread_syncer import UNHURRIED, Syncer, custom

from atoll.protocol.vocabulary import FixParticipants, StepDone
from atoll.tape.format import Tape

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
SECONDS = 900.0
ON_CPU = str(ROOT / "tests" / "helpers" / "titan_on_cpu.py")
EXAMPLES: dict[str, tuple[str, list[str], int]] = {
    "examples/fsdp2_loop.py": ("torch", [], 2 * 4 * 64),
    "examples/accelerate_fsdp2.py": ("accelerate", [], 2 * 4 * 64),
    "examples/lightning_fsdp2.py": ("lightning", [], 2 * 4 * 64),
    "examples/torchtitan/train.py": ("torchtitan", ["--batch-size=2", "--seq-len=64", "--precision=float32"], 2 * 2 * 64),
}
"""By file what it needs, further words, and the tokens of a step of a learner."""


def learner(example: str, words: list[str], syncer: Syncer, number: int) -> subprocess.Popen[str]:
    script = [ON_CPU, str(ROOT / example)] if "torchtitan" in example else [str(ROOT / example)]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    argv += ["--syncer", syncer.address, "--token", str(syncer.home.token_file), "--out", str(syncer.directory / str(number))]
    seeded = ["--seed", str(number)] if "lightning" in example or "titan" in example else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [*argv, *words, *seeded], env=environment, cwd=syncer.directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_learners_of_two_ranks_train_one_model(tmp_path: Path, example: str) -> None:
    package, words, tokens = EXAMPLES[example]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    protocol = {"fragments": 4, "local_steps_per_round": 8, "fragmentation": "sub_tensor"}
    syncer = Syncer(tmp_path / "syncer", custom(total_steps=16, limits=UNHURRIED, protocol=protocol))
    try:
        processes = [learner(example, words, syncer, number) for number in range(2)]
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        syncer.end()
    finally:
        syncer.stop()
    merged = [effect for record in syncer.tape() for effect in record.effects if isinstance(effect, FixParticipants)]
    assert any(set(effect.participants) == {0, 1} for effect in merged), "both were merged into one outer step"
    for number in range(2):
        (path,) = (syncer.directory / str(number)).glob("*.tape")
        steps = [record.event for record in Tape(path).records() if isinstance(record.event, StepDone)]
        losses = [step.loss for step in steps if step.loss is not None]
        assert {step.tokens for step in steps} == {tokens} and len(losses) == len(steps) > 8
        assert mean(losses[-3:]) < 0.9 * losses[0], losses
