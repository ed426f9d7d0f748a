"""How fast is the page of a long run, how large is its index, and what does the index cost the syncer?

    python bench/watch.py [--learners 64] [--rounds 100000] [--out FOLDER]

The long run is made row by row (tests/helpers/made_run.py); nobody trains it. `atoll watch` serves it, and Debian's Chromium
opens it (apt install chromium chromium-driver, pip install selenium). Measured are the time until the last round, all lanes and
the loss are drawn, the slowest of 20 jumps to a round by its number, the peak memory of the server's process (VmHWM) and the
memory of the browser's process that has the page (Pss).

What the index costs: a simulated run of eight learners is fed to the syncer's machine and to a tape's encoder, without and with
the fold and its files, in alternating blocks. The ratio is of the syncer's own work for an event, on a loaded machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

import browser as chrome
import msgspec
from made_run import bytes_of, make_run
from provenance import commit

from atoll.chaos import ChaosPlan
from atoll.config import from_builtins, load
from atoll.ids import SYNCER
from atoll.protocol.syncer import SyncerMachine
from atoll.sim.run import run_virtual
from atoll.tape.format import Record, Tape, TapeWriter
from atoll.views.index.files import IndexWriter
from atoll.views.index.fold import IndexFold

RESULTS = Path(__file__).parent / "results" / "watch.jsonl"
LANES = "return document.querySelectorAll('.lanes .now').length"


def page(directory: Path, learners: int, rounds: int) -> dict[str, Any]:
    with chrome.page_of("watch", directory) as (url, process), chrome.chromium() as browser:
        began = time.monotonic()
        browser.get(url)
        chrome.until(lambda: browser.execute_script(chrome.READY) == str(rounds))
        opened = time.monotonic() - began
        assert browser.execute_script(LANES) == learners
        jumps = [jump(browser, number) for number in random.Random(1).sample(range(1, rounds), 20)]
        return {
            "open_seconds": round(opened, 3), "round_seconds_most": round(max(jumps), 3),
            "round_seconds_median": round(statistics.median(jumps), 3), "server_bytes": chrome.peak_bytes(process.pid),
            "page_bytes": chrome.renderer_bytes(browser),
        }  # fmt: skip


def jump(browser: Any, number: int) -> float:
    box = browser.find_element("id", "goto")
    box.clear()
    began = time.monotonic()
    box.send_keys(f"{number}\n")
    chrome.until(lambda: chrome.text(browser, "h-round") == f"Round {number:,}", 20)
    return time.monotonic() - began


def index_cost(directory: Path, blocks: int = 6) -> dict[str, Any]:
    settings = load(preset_name="decoupled", overrides={"learners": 8, "total_steps": 400})
    run_virtual(settings, ChaosPlan(), directory / "sim", tensors=False)
    tape = Tape(directory / "sim" / "run.tape")
    records = [record for record in tape.records() if record.worker == SYNCER]
    times: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * blocks):
        times[bool(block % 2)].append(worked(tape, records, directory / f"block{block}", indexed=bool(block % 2)))
    without, with_it = (statistics.median(times[indexed]) for indexed in (False, True))
    return {
        "events": len(records), "event_micros_without": round(1e6 * without / len(records), 1),
        "event_micros_with": round(1e6 * with_it / len(records), 1), "ratio": round(with_it / without, 3),
    }  # fmt: skip


def worked(tape: Tape, records: list[Record], directory: Path, *, indexed: bool) -> float:
    """Seconds of this process for what a syncer does with each event before it carries the effects out."""
    directory.mkdir()
    machine = SyncerMachine(from_builtins(tape.header.config))
    writer = TapeWriter.create(directory / "run.tape", tape.header, flush_each=True)
    fold = IndexFold(machine, IndexWriter(directory / "index", tape.header)) if indexed else None
    began = time.process_time()
    for record in records:
        effects = machine.on(record.event, record.now)
        writer.append(record.now, SYNCER, record.event, effects)
        if fold is not None:
            fold(record.now, SYNCER, record.event, effects)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="where to keep the made run; default: a temporary folder")
    words = parser.parse_args()
    if why := chrome.missing():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as temporary:
        directory = words.out or Path(temporary) / "run"
        began = time.monotonic()
        if not (directory / "index" / "complete.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            make_run(directory, learners=words.learners, rounds=words.rounds)
        result = {
            "learners": words.learners, "rounds": words.rounds, "made_seconds": round(time.monotonic() - began, 1),
            "index_bytes": bytes_of(directory), **page(directory, words.learners, words.rounds),
            "index_cost": index_cost(Path(temporary)), "load": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            "machine": platform.machine(), "commit": commit(),
        }  # fmt: skip
    line = msgspec.json.encode(result).decode()
    with RESULTS.open("a", encoding="utf8") as file:
        file.write(line + "\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
