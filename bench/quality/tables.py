"""Tables and a figure from the lines of train.py and study.py.

    python bench/quality/tables.py main.jsonl [more.jsonl ...] [--only NAME,...] [--reference NAME] [--figure out.svg]
    python bench/quality/tables.py gap_200M.jsonl --points 500 [--only NAME,...]
    python bench/quality/tables.py --page docs/research/results.md

One row per name; the newest line of a name and seed counts. With --page, every table of the page that stands under a comment
`<!-- tables.py FILE ... -->` is made anew by the arguments in the comment, whose files lie in bench/quality/results. With
--points the table has the held-out losses on the way instead, of the runs that were asked for them (`data.heldout_every`).

* loss: held-out, of Theta; mean and sample standard deviation over the seeds. "over data-parallel" compares with the mean of
  the run named data_parallel, or --reference; "replica" is the loss of learner 0's own weights. Data-parallel has one learner:
  both columns use its weights, because Theta is some steps older.
* tokens: trained by all learners together; decoupled learners do not stop at an exact step.
* bytes: sent and received by a learner per inner step, peers' states included; 100 % is data-parallel in bf16, which sends and
  receives 2 bytes per parameter in every step. Data-parallel runs are 100 % by definition: they have one learner.
* peak: the highest load on a learner's link in its busier direction, if each exchange is spread evenly over the time that its
  method allows: tau steps from the pull to the adoption (H in Async DiLoCo), and one step where tau is 0. Up and down each have
  all of that time. Every learner takes part in every round.
* hours at 1 Gbit/s: steps times step time over the simulated utilisation (docs/planning/simulators.md) on links of 1 Gbit/s.
  The graph: a reduction takes as long as the larger of its two directions, with the codecs' bits. For decoupled presets the
  machines: the smaller of compute time and schedule kept. Without failures and latency.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.codecs import codec
from atoll.config import Config, from_builtins
from atoll.config.codecs import wire_bits
from atoll.config.merges import MERGES
from atoll.rules import Schedule
from atoll.sim.estimates.decoupled import measure_decoupled, settings_for
from atoll.sim.estimates.utilisation import Compute, Exchange, utilisation
from atoll.views.figures import GOOD, INK, OTHER, REFERENCE, empty_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA_PARALLEL = "data_parallel"
BF16_BYTES, BF16_BITS = 2, 16.0
Line = Mapping[str, Any]
LINES = Path(__file__).parent / "results"
MARKED = re.compile(r"<!-- tables\.py (?P<arguments>.*?) -->\n\n(?P<table>(?:\|.*\n)*)")
"""A table of a page, with the arguments that made it."""

# ---------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Row:
    name: str
    losses: tuple[float, ...]
    tokens: float
    replicas: tuple[float, ...]
    excess: float | None
    """Mean loss over data-parallel's, less 1; None: there is no data-parallel run."""
    excess_deviation: float
    share: float
    """Of data-parallel's bytes."""
    peak_gbit: float
    hours: float
    failing: bool

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def newest(paths: Sequence[Path]) -> dict[str, list[Line]]:
    """By name, in order of first occurrence; of each seed the last line."""
    found: dict[str, dict[int, Line]] = {}
    for path in paths:
        for text in path.read_text(encoding="utf8").splitlines():
            line = json.loads(text)
            if missing := sorted({"loss_replica", "config", "inner_steps", "parameters", "trained_tokens"} - line.keys()):
                raise SystemExit(f"{path}: a line of {line.get('name')!r} has no {', '.join(missing)}; use lines of train.py")
            if line.get("recoveries") and "bytes_between_learners" not in line:
                raise SystemExit(f"{path}: a line of {line['name']!r} has recoveries but no bytes_between_learners; run it again")
            found.setdefault(line["name"], {})[line["seed"]] = line
    return {name: list(by_seed.values()) for name, by_seed in found.items()}


MERGE_KEYS = ("merge", "embedding_merge")


def config_of(line: Line) -> Config:
    """Without the keys that older lines have and no config has any more, and with a mean for merges of tried.py: nothing here
    depends on them."""
    known = msgspec.to_builtins(Config())
    raw = {name: value for name, value in line["config"].items() if name in known}
    for name, value in raw.items():
        if isinstance(value, dict):
            raw[name] = {key: each for key, each in value.items() if key in known[name]}
    protocol = raw["protocol"]
    raw["protocol"] = protocol | {key: "mean" for key in MERGE_KEYS if protocol.get(key, "mean") not in MERGES}
    return from_builtins(raw)


def loss_of(line: Line) -> float:
    return float(line["loss_replica" if line["method"] == DATA_PARALLEL else "loss_final"])


def bytes_share(line: Line) -> float:
    if line["method"] == DATA_PARALLEL:
        return 1.0
    between = 2 * line.get("bytes_between_learners", 0)  # one learner sends, another receives
    each = (line["bytes_up"] + line["bytes_down"] + between) / line["inner_steps"]
    return float(each / (2 * BF16_BYTES * line["parameters"]))


def peak_gbit(line: Line, step_seconds: float) -> float:
    if line["method"] == DATA_PARALLEL:
        return float(line["parameters"]) * BF16_BITS / step_seconds / 1e9
    config = config_of(line)
    ways = codec(config.protocol.codec_up), codec(config.protocol.codec_down)
    sizes = [max(way.nbytes(numel) for way in ways) for numel in line["fragment_sizes"]]
    rounds_a_step = line["total_steps"] * config.cluster.step_seconds / line["seconds"]
    return 8 * _busiest(config, sizes, max(1.0, rounds_a_step)) / step_seconds / 1e9


def _busiest(config: Config, sizes: Sequence[int], rounds_a_step: float) -> float:
    """Bytes in the busiest step. `rounds_a_step` is 1, except with K = 1 and no pace."""
    schedule = Schedule(config)
    load = [0.0] * (config.total_steps + 1)
    for t in range(1, config.total_steps + 1):
        window = max(1, min((schedule.policy(t).overlap, *config.protocol.overlap_by_learner)))
        rounds = max(1, round(window * rounds_a_step))
        for later in range(t, min(t + rounds, config.total_steps + 1)):
            load[later] += sum(sizes[p] for p in schedule.due(t)) / window
    return max(load)


def hours(line: Line, step_seconds: float, gbit: float = 1.0) -> float:
    config = config_of(line)
    if config.preset.startswith("decoupled"):
        used = _by_the_machines(config, line["parameters"], step_seconds, gbit)
    else:
        compute = Compute(int(config.model.numbers["layers"]), line["parameters"], step_seconds)
        used = float(utilisation(compute, exchange_for(line["method"], config), [gbit], line["steps"])[0])
    return float(line["steps"]) * step_seconds / used / 3600


def exchange_for(method: str, config: Config) -> Exchange:
    """Through a syncer, which is like a reduction between two: each learner sends its bits once and gets the result once."""
    p = config.protocol
    bits = max(wire_bits(p.codec_up), wire_bits(p.codec_down))
    if method == DATA_PARALLEL:
        return Exchange("data_parallel", bits=BF16_BITS)
    if method == "async_diloco":
        return Exchange("async_diloco", p.local_steps_per_round, bits=bits)
    if method == "streaming":
        return Exchange("streaming", p.local_steps_per_round, p.overlap, p.layers_per_fragment, None, p.layer_order, bits)
    return Exchange("diloco", p.local_steps_per_round, bits=bits)


def _by_the_machines(config: Config, parameters: int, step_seconds: float, gbit: float) -> float:
    links = {"up_gbit": gbit, "down_gbit": gbit, "latency_seconds": 0.0}
    cluster = {"step_seconds": step_seconds, "parameters": parameters, **links}
    layers = {"learners": config.learners, "protocol": msgspec.to_builtins(config.protocol), "cluster": cluster}
    return measure_decoupled(settings_for(config.preset, layers)).utilisation


def rows(
    paths: Sequence[Path], step_seconds: float, reference: str = DATA_PARALLEL, only: Sequence[str] = ()
) -> list[Row]:
    """`only`: these, in this order; the reference need not be one of them."""
    runs = newest(paths)
    base = statistics.mean(map(loss_of, runs[reference])) if reference in runs else None
    return [_row(name, runs[name], step_seconds, base) for name in only or runs]


def _row(name: str, lines: Sequence[Line], step_seconds: float, base: float | None) -> Row:
    """Peak and hours are those of the first seed, because seeds hardly change them."""
    losses = tuple(map(loss_of, lines))
    return Row(
        name, losses, statistics.mean(line["trained_tokens"] for line in lines), tuple(line["loss_replica"] for line in lines),
        statistics.mean(losses) / base - 1 if base else None,
        deviation(losses) / base if base else 0.0, statistics.mean(map(bytes_share, lines)),
        peak_gbit(lines[0], step_seconds), hours(lines[0], step_seconds), bool(lines[0]["chips"]),
    )  # fmt: skip


# ---------------------------------------------------------------- tables


def table(found: Sequence[Row], reference: str = DATA_PARALLEL) -> str:
    over = "data-parallel" if reference == DATA_PARALLEL else reference
    head = (
        "run", "held-out loss", f"over {over}, %", "seeds", "replica", "tokens", "bytes", "peak Gbit/s",
        "hours at 1 Gbit/s",
    )  # fmt: skip
    lines = [head, tuple("---" for _ in head), *map(_cells, found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    several = len(row.losses) > 1
    excess = "" if row.excess is None else f"{100 * row.excess:+.2f}"
    over = excess + (f" ± {100 * row.excess_deviation:.2f}" if excess and several else "")
    return (
        row.name, f"{row.loss:.4f}" + (f" ± {deviation(row.losses):.4f}" if several else ""), over, str(len(row.losses)),
        f"{statistics.mean(row.replicas):.4f}", f"{row.tokens / 1e6:.1f} M",
        f"{100 * row.share:.3g} %", f"{row.peak_gbit:.3g}", f"{row.hours:.3g}",
    )  # fmt: skip


def points_table(runs: Mapping[str, Sequence[Line]], every: int) -> str:
    """The held-out loss of Theta about every so many outer steps, and at the end. A point is that of the first version stored at
    or after its outer step, at most eight later. The first seed's."""
    first = {name: lines[0] for name, lines in runs.items() if lines[0].get("heldout_points")}
    if not first:
        raise SystemExit("--points: no run here has losses on the way; train it with --set data.heldout_every=N")
    last = min(line["total_steps"] for line in first.values())
    columns = range(every, last - every // 2, every)
    lines = [("outer step", *map(str, columns), str(last)), tuple("---" for _ in range(len(columns) + 2))]
    for name, line in first.items():
        points = dict(line["heldout_points"])
        found = [points[min(points, key=lambda step: abs(step - column))] for column in columns]
        lines.append((name, *(f"{loss:.4f}" for loss in (*found, loss_of(line)))))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---------------------------------------------------------------- the figure

LINE_POINTS = 11.0
"""Height of a label."""
LETTER_POINTS = 5.0


def draw(found: Sequence[Row]) -> Figure:
    figure = empty_figure(10.0, 6.0)
    axes = figure.subplots()
    shown = [row for row in found if row.excess is not None]
    for row in shown:
        color = REFERENCE if row.share == 1.0 else GOOD if row.failing else OTHER
        x, y = 100 * row.share, 100 * (row.excess or 0.0)
        axes.errorbar(x, y, yerr=100 * row.excess_deviation or None, fmt="o", color=color, capsize=3, markersize=6)
    axes.set_xscale("log")
    axes.margins(x=0.25, y=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %")
    axes.set_xlabel("bytes a learner moves in a step, of bf16 data-parallel's (log scale)")
    axes.set_ylabel("held-out loss over data-parallel, mean and deviation over seeds")
    axes.axhline(0.0, color=INK, linestyle=(0, (4, 3)), linewidth=1.0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.draw_without_rendering()  # positions of points are known only after this
    _label(axes, shown, figure.dpi / 72)
    return figure


def _label(axes: Any, shown: Sequence[Row], pixels: float) -> None:
    """Right or left of its point. A label that would overlap another, a point or the zero line moves up or down as little as
    possible, with a thin line to its point. Positions are in points."""

    def place(row: Row) -> tuple[float, float]:
        x, y = axes.transData.transform((100 * row.share, 100 * (row.excess or 0.0))) / pixels
        return float(x), float(y)

    zero = axes.transData.transform((1.0, 0.0))[1] / pixels
    taken = [(0.0, zero, math.inf), *((x - 4, y, x + 4) for x, y in map(place, shown))]
    for row in shown:
        x, y = place(row)
        width = LETTER_POINTS * len(row.name)
        for up, side in ((up, side) for n in range(100) for up in (2.0 * n, -2.0 * n) for side in (8, -8)):
            start = x + side - (width if side < 0 else 0.0)
            if not any(abs(y + up - b) < LINE_POINTS and start < right and left < start + width for left, b, right in taken):
                break
        taken.append((start, y + up, start + width))
        arrow = {"arrowstyle": "-", "color": INK, "linewidth": 0.4} if up else None
        axes.annotate(
            row.name, (100 * row.share, 100 * (row.excess or 0.0)), xytext=(side, up), textcoords="offset points", va="center",
            ha="right" if side < 0 else "left", fontsize=8, color=INK, arrowprops=arrow,
        )  # fmt: skip


# ---------------------------------------------------------------- pages


def blocks(page: str) -> list[tuple[str, str]]:
    """Of each marked table the arguments, and its lines."""
    return [(found["arguments"], found["table"]) for found in MARKED.finditer(page)]


def made(arguments: str) -> str:
    """The table that the arguments of a comment ask for."""
    asked = parser().parse_args(shlex.split(arguments))
    return text_for(asked, [LINES / file for file in asked.files]) + "\n"


def text_for(asked: argparse.Namespace, files: Sequence[Path]) -> str:
    if asked.points:
        runs = checked(files, [("--only", asked.only)])
        return points_table({name: runs[name] for name in asked.only or runs}, asked.points)
    return table(asked_for(asked, files), asked.reference)


def asked_for(asked: argparse.Namespace, files: Sequence[Path]) -> list[Row]:
    checked(files, [("--reference", [asked.reference]), ("--only", asked.only)])
    return rows(files, asked.step_seconds, asked.reference, asked.only)


def checked(files: Sequence[Path], named: Sequence[tuple[str, Sequence[str]]]) -> dict[str, list[Line]]:
    runs = newest(files)
    for option, names in named:
        if unknown := [name for name in names if name not in runs]:
            raise SystemExit(f"{option} {','.join(unknown)}: no such run in these files; there are {', '.join(runs)}")
    return runs


def renew(page: Path) -> int:
    """How many tables changed."""
    before = page.read_text(encoding="utf8")
    after = MARKED.sub(lambda found: f"<!-- tables.py {found['arguments']} -->\n\n{made(found['arguments'])}", before)
    page.write_text(after, encoding="utf8")
    return sum(old != new for old, new in zip(blocks(before), blocks(after), strict=True))


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("files", type=Path, nargs="*")
    words.add_argument("--step-seconds", type=float, default=0.1)
    words.add_argument("--reference", default=DATA_PARALLEL, help="the run that the others are compared with")
    words.add_argument("--only", type=lambda names: names.split(","), default=[], help="these runs, with commas between")
    words.add_argument("--points", type=int, default=0, metavar="N", help="held-out losses about every N outer steps instead")
    words.add_argument("--figure", type=Path)
    words.add_argument("--page", type=Path, help="make the marked tables of this page anew")
    return words


def main() -> None:
    words = parser()
    chosen = words.parse_args()
    if chosen.page is not None:
        print(f"{chosen.page}: {renew(chosen.page)} of {len(blocks(chosen.page.read_text(encoding='utf8')))} tables changed")
        return
    if not chosen.files:
        words.error("name files of lines, or a page with --page")
    print(text_for(chosen, chosen.files))
    if chosen.figure is not None:
        save(chosen.figure, lambda: draw(asked_for(chosen, chosen.files)))


if __name__ == "__main__":
    main()
