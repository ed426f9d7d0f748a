"""The cost of failures in quality: a model trained on a synthetic 1.2-million-chip history, and without failures at equal tokens.

Both runs have the same config on the real machines in virtual time; each is recorded first and then trained (`atoll simulate
tape`, `atoll train --tape`). The run without failures trains more tokens per outer step and gets fewer outer steps, so that
both see the same number of tokens and the whole learning-rate schedule.

    python bench/synthetic_tape.py --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from atoll.chaos import ChaosPlan
from atoll.config import Config, load
from atoll.protocol.vocabulary import StepDone
from atoll.sim.estimates.failures import FailureModel
from atoll.sim.run import run_virtual, train_on_tape
from atoll.sim.slices import SliceHardware
from atoll.tape.format import Tape

NEVER = 1e15


def settings(recipe: Path, learners: int, total_steps: int, seed: int, model: FailureModel) -> Config:
    cluster = {"step_seconds": model.step_seconds, "step_noise": model.step_noise}
    overrides = {"learners": learners, "total_steps": total_steps, "seed": seed, "cluster": cluster}
    return load(recipe, preset_name="decoupled", overrides=overrides)


def record(config: Config, chips: int, model: FailureModel, directory: Path) -> tuple[Tape, int]:
    run_virtual(config, ChaosPlan(), directory, tensors=False, slices=SliceHardware(config, chips, model, config.seed))
    tape = Tape(directory / "run.tape")
    return tape, sum(r.event.tokens for r in tape.records() if isinstance(r.event, StepDone))


def pair(recipe: Path, chips: int, learners: int, total_steps: int, seed: int, directory: Path) -> tuple[float, float]:
    """(loss with failures, loss without) at equal tokens."""
    failing, sound = FailureModel(), FailureModel(mtbi_seconds=NEVER)
    with_failures, tokens = record(settings(recipe, learners, total_steps, seed, failing), chips, failing, directory / "failing")
    _, most = record(settings(recipe, learners, total_steps, seed, sound), chips, sound, directory / "whole")
    fewer = settings(recipe, learners, round(total_steps * tokens / most), seed, sound)
    without, equal = record(fewer, chips, sound, directory / "sound")
    losses = []
    for name, tape in (("with", with_failures), ("without", without)):
        config = settings(recipe, learners, int(tape.header.config["total_steps"]), seed, failing)
        done = train_on_tape(tape, config, directory / name)
        assert done.loss_final is not None
        losses.append(done.loss_final)
    print(f"seed {seed}: {tokens:,} tokens in {total_steps} outer steps with failures, {equal:,} in {fewer.total_steps} without")
    return losses[0], losses[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parent.parent / "recipes" / "tiny.toml")
    parser.add_argument("--chips", type=int, default=1_200_000)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--total-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    costs = []
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            failing, sound = pair(chosen.recipe, chosen.chips, chosen.learners, chosen.total_steps, seed, Path(scratch))
        costs.append(failing / sound - 1)
        print(f"seed {seed}: held-out loss {failing:.4f} with failures, {sound:.4f} without: {costs[-1]:+.2%}", flush=True)
    mean = statistics.mean(costs)
    verdict = "PASS" if max(map(abs, costs)) <= 0.02 else "FAIL"
    print(f"failures cost {mean:+.2%} on average over {len(costs)} seeds; wanted within 2 % for each: {verdict}")


if __name__ == "__main__":
    main()
