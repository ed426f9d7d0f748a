"""A live local cluster against the simulators: utilisation on limited links, goodput under kills.

    python bench/agreement.py [--json FILE] [--keep DIR] [--only blocking|schedule|kills] [--quick]

Real processes, real sockets, two learners of one thread each; no root. Part 1 limits each learner's link to the syncer, both
ways: `diloco`, which blocks, is compared with the graph and with the machines in virtual time; `decoupled`, which never
waits, by the schedule it keeps. Part 2 kills learners by plans drawn from the failure model, and compares goodput with the
machines under the same plan, the failure model's own count of that history, and its expectation. The simulators get only what
unlimited runs on the same machine show. A step is mostly a wait (`agreement_model.py`), so that learners do not
compete for cores. Prints a Markdown table. About 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from agreement_live import MODEL_NAME, Calibration, Seen, calibrated, comebacks, run_live
from agreement_predict import (
    AdoptionWatch,
    Comeback,
    blocking_graph,
    blocking_machines,
    blocking_rates,
    decoupled_machines,
    decoupled_rates,
    expected_goodput,
    failure_model,
    histories,
    history_goodput,
    kill_plan,
    killed_machines,
    schedule_kept,
)

from atoll.chaos import ChaosPlan, Kill
from atoll.config import Config, load
from atoll.tape.format import Record

LEARNERS = 2
MODEL = {"width": 256, "layers": 2, "heads": 4, "mlp": 256, "tied": True}
"""0.99 million parameters, 3.9 MB as fp32, in 15 matrices of nearly the same size, because the simulators' fragments are equal:
on a full link a large one is late, and pace does not let a small one win that back."""
FRAGMENTS = 15
DATA = {"batch_size": 2, "seq_len": 16, "max_bytes": 500_000, "heldout_batches": 1}
WARM_UP, MEASURED = 1, 3
"""Blocking intervals. One more follows, whose first step ends the last wait."""
SCHEDULE_WARM_UP, SCHEDULE_MEASURED = 4, 10
"""Shorter intervals, and more of them than in `sim/estimates/decoupled.py`: a live run has noise."""
UTILISATIONS = (0.45, 0.7, 0.9)
"""Target utilisations on the graph, from which the rates follow."""
LOADS = (0.45, 0.7, 0.95)
"""Rates of `decoupled`, as shares of what the schedule needs."""
MTBI_SECONDS, AWAY_SECONDS = 25.0, 4.0
SEEDS = (1, 2, 3)
REHEARSAL = ChaosPlan((Kill(5.0, 0, 2.0), Kill(11.0, 1, 2.0), Kill(17.0, 0, 1.0), Kill(22.0, 1, 1.0)))
"""The kills of the calibration run, on which restart times are measured."""
REHEARSAL_SECONDS = 27.0
POINTS = 5.0


@dataclass(frozen=True)
class Prediction:
    by: str
    share: float


@dataclass(frozen=True)
class Row:
    """Shares are between 0 and 1; the table has percentage points."""

    run: str
    quantity: str
    measured: float
    predictions: tuple[Prediction, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    """Further figures, for --json."""

    def off(self, prediction: Prediction) -> float:
        return 100 * (self.measured - prediction.share)


# ---------------------------------------------------------------- settings


def settings_for(preset: str, interval: int, total_steps: int, **protocol: Any) -> Config:
    overrides = {
        "learners": LEARNERS, "total_steps": total_steps, "protocol": {"local_steps_per_round": interval, **protocol},
        "model": {"name": MODEL_NAME, "numbers": MODEL}, "data": DATA,
    }  # fmt: skip
    return load(preset_name=preset, overrides=overrides)


def blocking_settings(interval: int) -> Config:
    return settings_for("diloco", interval, (WARM_UP + MEASURED + 1) * interval)


def schedule_settings(interval: int) -> Config:
    """fp32 both ways: a link that is too slow for it is still fast enough for a ping behind a full buffer."""
    steps = (SCHEDULE_WARM_UP + SCHEDULE_MEASURED) * interval
    return settings_for("decoupled", interval, steps, fragments=FRAGMENTS, codec_up="fp32", codec_down="fp32")


def killed_settings(window: float, step_seconds: float) -> Config:
    """Long enough that the window ends before the run does."""
    return settings_for("decoupled", 24, round(1.2 * window / step_seconds), fragments=FRAGMENTS)


def parameters_of(settings: Config) -> int:
    from atoll.tasks.task import language_task

    return sum(fragment.numel for fragment in language_task(settings, [MODEL_NAME]).layout.fragments)


# ---------------------------------------------------------------- part 1: links


class Bench:
    def __init__(self, folder: Path, quick: bool) -> None:
        self._folder = folder
        self._quick = quick
        self.interval, self.schedule_interval = (10 if quick else 40), FRAGMENTS
        self.window = 30.0 if quick else 60.0
        self.parameters = parameters_of(blocking_settings(self.interval))
        self.calibrations: dict[str, Any] = {}

    def live(self, name: str, settings: Config, plan: ChaosPlan | None = None, mbit: float | None = None) -> list[Record]:
        began = time.monotonic()
        records = run_live(settings, self._folder / name, plan, mbit)
        print(f"{name}: {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        return records

    def calibrate(self, name: str, settings: Config) -> Calibration:
        free = calibrated(Seen().feed(self.live(name, settings)), settings.protocol.local_steps_per_round)
        self.calibrations[name] = asdict(free)
        return free

    def blocking(self) -> list[Row]:
        settings = blocking_settings(self.interval)
        free = self.calibrate("diloco-free", settings)
        return [
            self._blocking_row(settings, free, mbit)
            for mbit in blocking_rates(settings, free, self.parameters, UTILISATIONS)
        ]  # fmt: skip

    def _blocking_row(self, settings: Config, free: Calibration, mbit: float) -> Row:
        seen = Seen().feed(self.live(f"diloco-{mbit:g}", settings, mbit=mbit))
        machines = blocking_machines(settings, free, self.parameters, mbit, WARM_UP)
        graph = blocking_graph(settings, free, self.parameters, mbit)
        return Row(
            f"`diloco`, {mbit:g} Mbit/s", "utilisation", seen.utilisation(self.interval, WARM_UP),
            (Prediction("machines", machines), Prediction("graph", graph)),
            {"mbit": mbit, "as_seen": asdict(calibrated(seen, self.interval))},
        )  # fmt: skip

    def schedule(self) -> list[Row]:
        settings = schedule_settings(self.schedule_interval)
        free = self.calibrate("decoupled-free", settings)
        rates = decoupled_rates(settings, free, self.parameters, LOADS)
        return [self._schedule_row(settings, free, mbit) for mbit in rates]

    def _schedule_row(self, settings: Config, free: Calibration, mbit: float) -> Row:
        since = SCHEDULE_WARM_UP * self.schedule_interval
        records = self.live(f"decoupled-{mbit:g}", settings, mbit=mbit)
        watch = AdoptionWatch(since)
        for r in records:
            watch(r.now, r.worker, r.event, r.effects)
        machines = decoupled_machines(settings, free, self.parameters, mbit, since)
        return Row(
            f"`decoupled`, {mbit:g} Mbit/s", "schedule kept", schedule_kept(watch, settings), (Prediction("machines", machines),),
            {"mbit": mbit, "as_seen": asdict(calibrated(Seen().feed(records), self.schedule_interval))},
        )  # fmt: skip

    # ------------------------------------------------------------ part 2: kills

    def kills(self) -> list[Row]:
        free, comeback = self._rehearse()
        model = failure_model(free, comeback, MTBI_SECONDS, AWAY_SECONDS)
        expectation = expected_goodput(model, LEARNERS, self.window)
        settings = killed_settings(self.window, free.period_seconds)
        rows = []
        for seed in SEEDS:
            drawn = histories(model, LEARNERS, seed, 2 * self.window)
            plan = kill_plan(drawn, model)
            seen = Seen().feed(self.live(f"kills-{seed}", settings, plan))
            window = min(self.window, seen.lasted())
            struck = [asdict_kill(f) for f in plan.faults if f.at < window]
            machines = killed_machines(settings, free, self.parameters, plan, comeback, window)
            history = free.busy * history_goodput(drawn, window)
            rows.append(Row(
                f"`decoupled`, plan {seed}, {len(struck)} kills", "goodput", seen.goodput(window, LEARNERS),
                (Prediction("machines", machines), Prediction("failure model, this plan", history),
                 Prediction("failure model, expected", free.busy * expectation[0])),
                {"plan": struck, "window": window, "expected_spread": expectation[1], "comebacks": comebacks(seen, plan)},
            ))  # fmt: skip
        return rows

    def _rehearse(self) -> tuple[Calibration, Comeback]:
        """In a run with kills the medians are those of its undisturbed steps."""
        guess = schedule_settings(self.schedule_interval)
        step = self.calibrations.get("decoupled-free") or asdict(self.calibrate("decoupled-free", guess))
        seen = Seen().feed(self.live("kills-rehearsal", killed_settings(REHEARSAL_SECONDS, step["period_seconds"]), REHEARSAL))
        free = calibrated(seen, self.schedule_interval)
        found = comebacks(seen, REHEARSAL)
        comeback = Comeback(median(boot for boot, _ in found), median(step for _, step in found))
        self.calibrations["kills-rehearsal"] = asdict(free) | asdict(comeback) | {"comebacks": found}
        return free, comeback


def asdict_kill(kill: Any) -> dict[str, float]:
    return {"at": kill.at, "learner": kill.learner, "lasts": kill.lasts}


# ---------------------------------------------------------------- output


def table(rows: Sequence[Row]) -> str:
    """Per cent; in brackets measured less predicted, in points."""
    names = list(dict.fromkeys(p.by for row in rows for p in row.predictions))
    lines = [["run", "of", "measured", *names], ["---"] * (3 + len(names))]
    for row in rows:
        by = {p.by: f"{100 * p.share:.1f} ({row.off(p):+.1f})" for p in row.predictions}
        lines.append([row.run, row.quantity, f"{100 * row.measured:.1f}", *(by.get(name, "") for name in names)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def off_rows(rows: Sequence[Row]) -> list[str]:
    """Runs that differ from the prediction by more than the tolerance."""
    return [
        f"{row.run}: {row.off(p):+.1f} points against the {p.by}"
        for row in rows
        for p in row.predictions
        if abs(row.off(p)) > POINTS
    ]


def as_json(rows: Sequence[Row], bench: Bench) -> dict[str, Any]:
    return {
        "bench": "agreement", "parameters": bench.parameters, "calibrations": bench.calibrations,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and tapes; by default they are deleted")
    parser.add_argument("--only", choices=("blocking", "schedule", "kills"))
    parser.add_argument("--quick", action="store_true", help="short runs, to check that it works; figures mean little")
    options = parser.parse_args()
    if options.keep is not None and options.keep.exists():
        print(f"--keep {options.keep}: exists already; name a new folder", file=sys.stderr)
        raise SystemExit(2)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="atoll-agreement-") as scratch:
        bench = Bench(options.keep or Path(scratch), options.quick)
        parts: dict[str, Callable[[], list[Row]]] = {
            "blocking": bench.blocking, "schedule": bench.schedule, "kills": bench.kills,
        }  # fmt: skip
        rows = [row for name, part in parts.items() if options.only in (None, name) for row in part()]
    print(f"load average before: {load_before:.2f} on {os.cpu_count()} cores\n")
    print(table(rows))
    print("\n" + ("\n".join(off_rows(rows)) or f"all within {POINTS:g} points"))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(rows, bench), indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
