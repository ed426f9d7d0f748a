"""Images: DiLoCo against FedAvg with the same rounds, and data-parallel, in virtual time on one core; seed 0, one run each.

    python bench/quality/vision.py                                  # the runs on digits that are missing, then the tables
    python bench/quality/vision.py --data data                      # those on data/mnist and data/cifar10 too
    python bench/quality/vision.py --data data --only 'resnet_cifar10_*' --list
    python bench/quality/vision.py --show                           # the tables alone

`--data` has the folders `mnist` and `cifar10`, filled as the recipes say. A run appends a line of JSON to results/vision.jsonl:
the keys of `atoll train --json`, its name, and the differences from its preset's settings. A run with a tuned outer step names
its outer settings, so that no line depends on the present recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from experts_and_images import HERE, Line, differences, markdown, percent, read, train
from msgspec.structs import replace

from atoll.config import Config, load

LENET: Final = "mnist_lenet5_diloco"
RESNET: Final = "cifar10_resnet18_diloco"
DIGITS: Final = ("data.corpus=digits", "data.batch_size=16")
SMALL_RESNET: Final = (*DIGITS, "data.augment=crop", "learners=4", "model.numbers={width = 8, depth = 1}", "total_steps=100")
CIFAR10: Final = (
    "model.numbers={width = 16}", "data.batch_size=16", "data.heldout_batches=625", "total_steps=500",
    "inner.learning_rate=0.003",
)  # fmt: skip

Outer = tuple[float, float]
"""Rate and momentum of the outer Nesterov."""
PUBLISHED: Final[Outer] = (0.7, 0.9)
COOLER: Final[Outer] = (1.0, 0.5)
TRIES: Final[tuple[Outer, ...]] = tuple((rate, momentum) for rate in (0.7, 1.0) for momentum in (0.3, 0.5, 0.9))
SWEPT: Final = "lenet_digits_200"
"""The row by whose DiLoCo runs the outer settings of the LeNet-5 recipes were chosen."""


class Row(NamedTuple):
    label: str
    """In the table: the differences from the recipe."""
    recipe: str
    sets: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    """Steps between merges. Not for data-parallel, whose rounds are single steps."""
    outers: tuple[Outer, ...] = (COOLER,)


ROWS: Final[dict[str, Row]] = {
    "lenet_mnist": Row("LeNet-5, `mnist`: the recipes as they are, 400 steps, 20 rounds", LENET),
    "lenet_digits": Row("LeNet-5, `digits`: batch 16, else the recipes as they are", LENET, DIGITS),
    SWEPT: Row("LeNet-5, `digits`: batch 16, 200 steps, 10 rounds", LENET, (*DIGITS, "total_steps=200")),
    "lenet_mnist_200": Row("LeNet-5, `mnist`: 200 steps, 10 rounds", LENET, ("total_steps=200",)),
    "resnet_digits": Row(
        "ResNet of width 8 and depth 1, `digits`, crop: 4 learners, batch 16, 100 steps, 10 rounds, inner rate 0.005",
        RESNET, (*SMALL_RESNET, "inner.learning_rate=0.005"), ("protocol.local_steps_per_round=10",), (PUBLISHED, COOLER),
    ),
    "resnet_digits_slow": Row(
        "the same, inner rate 0.001", RESNET, (*SMALL_RESNET, "inner.learning_rate=0.001"),
        ("protocol.local_steps_per_round=10",), (PUBLISHED, COOLER),
    ),
    "resnet_cifar10": Row(
        "ResNet-18 of width 16 (0.7 M parameters), `cifar10`, crop and mirror: 8 learners, batch 16, 500 steps, 20 rounds, "
        "inner rate 0.003",
        RESNET, CIFAR10, ("protocol.local_steps_per_round=25",), (PUBLISHED, COOLER),
    ),
}  # fmt: skip


class Run(NamedTuple):
    row: str
    preset: str
    outer: Outer | None = None

    @property
    def name(self) -> str:
        return "_".join([self.row, self.preset, *map(str, self.outer or ())])


def runs() -> dict[str, Run]:
    """All runs by name; those that need no file come first."""
    compared = [run for key, row in ROWS.items() for run in of_row(key, row.outers)]
    found = {run.name: run for run in [*compared, *of_row(SWEPT, TRIES)]}
    return dict(sorted(found.items(), key=lambda item: needs_files(settings(item[1]))))


def of_row(key: str, outers: Sequence[Outer]) -> list[Run]:
    return [Run(key, "fedavg"), *(Run(key, "diloco", outer) for outer in outers), Run(key, "ddp")]


def settings(run: Run) -> Config:
    row = ROWS[run.row]
    lines = ["seed=0", *row.sets, *(row.rounds if run.preset != "ddp" else ())]
    if run.outer is not None:
        lines += [f"outer.outer_learning_rate={run.outer[0]}", f"outer.outer_momentum={run.outer[1]}"]
    return load(HERE.parents[1] / "recipes" / f"{row.recipe}.toml", preset_name=run.preset, assignments=lines)


def needs_files(config: Config) -> bool:
    return ":" in config.data.corpus


def carry_out(run: Run, data: Path | None) -> Line:
    """The line names the corpus as the recipe does, without the folder of this machine."""
    named = there = settings(run)
    if data is not None and needs_files(named):
        kind = named.data.corpus.partition(":")[0]
        there = replace(named, data=replace(named.data, corpus=f"{kind}:{data / kind}"))
    return train(run.name, there) | {"differs": differences(named)}


# ---------------------------------------------------------------- tables


def comparison(lines: Mapping[str, Line]) -> str:
    """Held-out loss of Theta and accuracy; a dash for a run that is missing."""
    columns = ["run", "FedAvg", "DiLoCo", "data-parallel", "seconds a run"]
    return markdown(columns, [
        [row.label, cell(lines, [Run(key, "fedavg")]), cell(lines, [Run(key, "diloco", outer) for outer in row.outers]),
         cell(lines, [Run(key, "ddp")]), seconds(lines, of_row(key, row.outers))]
        for key, row in ROWS.items()
    ])  # fmt: skip


def cell(lines: Mapping[str, Line], tried: Sequence[Run]) -> str:
    """Several runs are labelled by their outer settings."""
    cells = []
    for run in tried:
        line = lines.get(run.name)
        figures = f"{line['loss_final']:.3f}, {percent(line):.1f}%" if line is not None else "-"
        cells.append(f"{figures} ({run.outer[0]} / {run.outer[1]})" if run.outer and len(tried) > 1 else figures)
    return "; ".join(cells)


def seconds(lines: Mapping[str, Line], tried: Sequence[Run]) -> str:
    took = [round(lines[run.name]["wall_seconds"]) for run in tried if run.name in lines]
    return f"{min(took):,} to {max(took):,}" if took else "-"


def sweep(lines: Mapping[str, Line]) -> str:
    """DiLoCo's tries on one row: outer rates down, momenta across."""
    momenta = sorted({momentum for _, momentum in TRIES})
    return markdown(["outer rate", *(f"momentum {momentum}" for momentum in momenta)], [
        [str(rate), *(cell(lines, [Run(SWEPT, "diloco", (rate, momentum))]) for momentum in momenta)]
        for rate in sorted({rate for rate, _ in TRIES})
    ])  # fmt: skip


# ---------------------------------------------------------------- command line


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of mnist/ and cifar10/; without it, the runs on digits alone")
    parser.add_argument("--only", default="*", help="names, separated by commas; * matches anything")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "vision.jsonl")
    chosen = parser.parse_args(words)
    wanted = [run for name, run in runs().items() if any(fnmatchcase(name, each) for each in chosen.only.split(","))]
    if not wanted:
        parser.error(f"--only {chosen.only}: no such run; --list names them")
    if chosen.list:
        print("\n".join(run.name for run in wanted))
        return
    for run in wanted if not chosen.show else ():
        if any(line["name"] == run.name for line in read(chosen.out)):
            continue
        if chosen.data is None and needs_files(settings(run)):
            print(f"{run.name}: left out, it needs --data", file=sys.stderr)
            continue
        line = carry_out(run, chosen.data)
        with chosen.out.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run.name}: {line['loss_final']:.4f}, {percent(line):.1f}% in {line['wall_seconds']} s", flush=True)
    lines = {line["name"]: line for line in read(chosen.out)}
    print(f"{comparison(lines)}\n\n{sweep(lines)}")


if __name__ == "__main__":
    main()
