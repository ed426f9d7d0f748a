"""Experts, and questions about images: decoupled against data-parallel at equal tokens, in virtual time on one core.

    python bench/quality/experts_and_images.py moe            # the runs of its table that are missing, then the tables
    python bench/quality/experts_and_images.py vqa --show     # the tables alone
    python bench/quality/experts_and_images.py moe --name ddp_rate_6 --preset ddp --set inner.learning_rate=0.006

The last command makes a run of the sweep. Settings were chosen on seed 0 and then written into the recipe; the table has the
recipe on other seeds. A run appends a line of JSON to results/: the keys of `atoll train --json`, its name, and the differences
from its preset's settings, so that the line stays true when the recipe changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from atoll.chaos import ChaosPlan
from atoll.cli.runs import run_virtually
from atoll.config import Config, load, preset
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task
from atoll.workload.models.moe import ExpertMlp, route

HERE: Final = Path(__file__).resolve().parent
RECIPES: Final = {"moe": "moe_tiny", "vqa": "digits_vqa"}
PRESETS: Final = ("ddp", "decoupled")
TUNED_ON: Final = 0
SEEDS: Final = (1, 2)
TABLE: Final = "table"
"""Name of the compared runs; all other names belong to the sweep."""
SAME_IN_ALL: Final = ("learners", "model.", "data.")
"""Keys that all runs of a recipe share; a sweep's table leaves them out."""

Line = dict[str, Any]


def settings(what: str, preset_name: str, seed: int, assignments: Sequence[str] = ()) -> Config:
    recipe = HERE.parents[1] / "recipes" / f"{RECIPES[what]}.toml"
    return load(recipe, preset_name=preset_name, assignments=[f"seed={seed}", *assignments])


def differences(config: Config) -> dict[str, Any]:
    """Settings that differ from the preset's, by dotted key, except how often Theta is evaluated."""
    usual = by_key(preset(config.preset))
    own = {key: value for key, value in by_key(config).items() if key not in usual or usual[key] != value}
    return {key: value for key, value in own.items() if key != "data.heldout_every"}


def by_key(config: Config) -> dict[str, Any]:
    return dict(_flat(msgspec.to_builtins(config), ""))


def _flat(tables: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield where + key, value


def train(name: str, config: Config) -> Line:
    begun, task = time.time(), task_for(config)
    model = task.build()
    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtually(config, ChaosPlan(), Path(folder), tensors=True, threads=1, quiet=True)
        load_model(model, Path(folder) / "theta.safetensors")
    keys: Line = msgspec.to_builtins(summary)
    more = {
        "name": name, "wall_seconds": round(time.time() - begun, 1), "differs": differences(config),
        "parameters": sum(p.numel() for p in model.parameters()), "trained_tokens": summary.tokens.trained // summary.fragments,
        "expert_load": expert_load(task, model),
    }  # fmt: skip
    return more | keys | {"tape": None, "run_dir": None}


def expert_load(task: Task, model: nn.Module) -> list[list[float]]:
    """For each block with experts, each expert's share of the choices on the held-out text; 1 / experts is even."""
    routed = [module for module in model.modules() if isinstance(module, ExpertMlp)]
    if not routed:
        return []
    counts = {module: torch.zeros(module.router.weight.shape[0], dtype=torch.long) for module in routed}

    def listen(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, ExpertMlp)
        chosen = route(inputs[0].flatten(0, 1), module.router.weight, module.top_k)[1]
        counts[module] += chosen.flatten().bincount(minlength=len(counts[module]))

    hooks = [module.register_forward_pre_hook(listen) for module in routed]
    task.evaluate(model)
    for hook in hooks:
        hook.remove()
    return [[round(share, 4) for share in (count / count.sum()).tolist()] for count in counts.values()]


# ---------------------------------------------------------------- tables


def byte_share(line: Line) -> float:
    """Bytes up and down as a share of bf16 data-parallel: 2 bytes per parameter up and down, per learner and step."""
    usual = 2 * 2 * line["parameters"] * line["learners"] * line["total_steps"]
    return float((line["bytes_up"] + line["bytes_down"]) / usual)


def load_range(line: Line) -> str:
    shares = [share for block in line["expert_load"] for share in block]
    return f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"


def percent(line: Line) -> float:
    """Right answers in per cent; 0 for a task without answers."""
    return 100 * float(line["accuracy"] or 0.0)


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, and the distance of the furthest seed from it."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ± {max(abs(v - mean) for v in values):.{digits}f}"


def comparison(lines: Sequence[Line]) -> str:
    """The table of the compared runs, by preset."""
    found = [line for line in lines if line["name"] == TABLE]
    answers, experts = any(line["accuracy"] is not None for line in found), any(line["expert_load"] for line in found)
    columns = ["preset", "seeds", "held-out loss", *(["answers right, %"] if answers else []),
               *(["tokens of an expert"] if experts else []), "trained tokens", "bytes of bf16 data-parallel"]  # fmt: skip
    rows = []
    for name in PRESETS:
        runs = sorted((line for line in found if line["preset"] == name), key=lambda line: int(line["seed"]))
        if runs:
            rows.append([
                name, ", ".join(str(line["seed"]) for line in runs), spread([line["loss_final"] for line in runs], 4),
                *([spread([percent(line) for line in runs], 1)] if answers else []),
                *(["; ".join(map(load_range, runs))] if experts else []),
                ", ".join(f"{line['trained_tokens']:,}" for line in runs),
                f"{statistics.fmean(map(byte_share, runs)):.1%}",
            ])  # fmt: skip
    return markdown(columns, rows)


def sweep(lines: Sequence[Line], preset_name: str) -> str:
    """All other runs of one preset, best first, with the settings in which they differ."""
    runs = [line for line in lines if line["name"] != TABLE and line["preset"] == preset_name]
    keys = sorted({key for line in runs for key in line["differs"] if not key.startswith(SAME_IN_ALL)} - {"seed"})
    usual = by_key(preset(preset_name))
    keys = [key for key in keys if len({json.dumps(line["differs"].get(key, usual[key])) for line in runs}) > 1]
    rows = [
        [line["name"], str(line["seed"]), *(json.dumps(line["differs"].get(key, usual[key])).strip('"') for key in keys),
         f"{line['loss_final']:.4f}", *([f"{percent(line):.1f}"] if line["accuracy"] is not None else [])]
        for line in sorted(runs, key=lambda line: float(line["loss_final"]))
    ]  # fmt: skip
    answers = ["answers right, %"] if any(line["accuracy"] is not None for line in runs) else []
    return markdown(["run", "seed", *(key.rpartition(".")[2] for key in keys), "held-out loss", *answers], rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


# ---------------------------------------------------------------- command line


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=RECIPES)
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--name", default=TABLE, help="name of one run on the seed used for tuning; without it, the table")
    parser.add_argument("--preset", choices=PRESETS, action="append", help="by default both")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path, help="results/WHAT.jsonl beside this script")
    chosen = parser.parse_args()
    if chosen.name == TABLE and chosen.set:
        parser.error("--set: the table takes the recipe unchanged; give the run a --name")
    out = chosen.out or HERE / "results" / f"{chosen.what}.jsonl"
    for seed in SEEDS if chosen.name == TABLE else (TUNED_ON,):
        for name in chosen.preset or PRESETS:
            known = any((line["name"], line["preset"], line["seed"]) == (chosen.name, name, seed) for line in read(out))
            if not chosen.show and not known:
                line = train(chosen.name, settings(chosen.what, name, seed, chosen.set))
                with out.open("a", encoding="utf8") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{chosen.name} {name} seed {seed}: {line['loss_final']:.4f} in {line['wall_seconds']} s", flush=True)
    lines = read(out)
    print("\n\n".join([comparison(lines), *(sweep(lines, name) for name in PRESETS)]))


if __name__ == "__main__":
    main()
