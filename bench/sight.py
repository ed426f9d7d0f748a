"""What does it cost a learner to be looked at?

    python bench/sight.py [--sight all|metrics|pages|remote] [--runs 5] [--pairs 8] [--block 40] [--milliseconds 50]
                          [--out bench/results/sight.jsonl]

A run has a syncer, a learner in this process, built as `atoll learner` builds it, and a scripted learner (bench/scripted.py).
Blocks of steps with sight on and off alternate within the run, in the other order every second pair, so that other work on the
machine meets both alike.

* `metrics`: when on, the learner folds its events into metrics and serves them, and a process scrapes the learner and the syncer
  every second; when off, nothing is folded here and nobody scrapes. (The syncer, another process, folds all the time; `fold`
  says what that costs it: the time of its fold over the time of its machine, on the run's tape.)
* `pages`: `atoll watch` serves the run's page from a process of its own, as the launcher of `--dashboard` does. When on, three
  windows of Debian's Chromium on this machine have it open; when off they are empty. The browser runs at the lowest priority
  (niceness 19): a user's is on another machine, and drawing is not what the run pays. The index is appended by the syncer all
  the time.
* `all`: both.
* `remote`: metrics, and three readers in place of the browser, at the same priority: each holds the page's stream of news and
  asks at every word of it what the page asks. It is what a page on another machine costs the run's machine, which draws nothing.

The first steps of each block do not count. A run's ratios are of the mean CPU time of the training thread, at most 1.01, and of
the median duration of a step, at most 1.02; the verdict is on the median of the runs. On a machine that others use, only the
ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

import browser as chrome
import torch
from provenance import commit
from scripted import Cluster, load_average
from step_overhead import SETTLING, WARM_UP, Bench, Costs, cost_of, fitting_batch, settings

from atoll.config import from_builtins
from atoll.executor.environment import use_threads
from atoll.ids import SYNCER
from atoll.protocol.syncer import SyncerMachine
from atoll.runtime.metrics import MetricsAt, MetricsServer
from atoll.tape.format import Tape
from atoll.views.worker_metrics import LearnerMetrics, LinkTotals, SyncerMetrics

CPU_MOST, CLOCK_MOST = 1.01, 1.02
PAGES = 3
SCRAPER = """
import sys, threading, urllib.request
on = threading.Event()
def scrape():
    while True:
        on.wait()
        for address in sys.argv[1:]:
            urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()
        threading.Event().wait(1.0)
threading.Thread(target=scrape, daemon=True).start()
for line in sys.stdin:
    (on.set if line.strip() == "on" else on.clear)()
"""

READER = """
import json, os, sys, threading, urllib.parse, urllib.request
os.nice(19)
on, url = threading.Event(), urllib.parse.urlsplit(sys.argv[1])
root = f"http://{url.netloc}"
auth = {"Authorization": "Bearer " + urllib.parse.parse_qs(url.query).get("token", [""])[0]}
def ask(path):
    return urllib.request.urlopen(urllib.request.Request(root + path, headers=auth), timeout=60)
def read():
    while True:
        on.wait()
        with ask("/api/news") as news:
            for line in news:
                if not on.is_set():
                    break
                if line.startswith(b"data: "):
                    ends = json.loads(line[6:])["ends"]
                    whole = f"?from=0&to={ends}&most=200"
                    for path in ("bins" + whole, "events" + whole, "bins?from=0&to=1e9&most=150", f"round_at?at={ends}"):
                        json.loads(ask("/api/" + path).read())
for _ in range(int(sys.argv[2])):
    threading.Thread(target=read, daemon=True).start()
for line in sys.stdin:
    (on.set if line.strip() == "on" else on.clear)()
"""


class Sight(Protocol):
    """Something that looks at the run, and can be told to look away."""

    def on(self) -> None: ...
    def off(self) -> None: ...
    def close(self) -> None: ...


class SwitchedMetrics(LearnerMetrics):
    """Folds only while it is on."""

    counts = False

    def __call__(self, *event: Any) -> None:
        if self.counts:
            super().__call__(*event)


class Told:
    """A process that looks or not, as it is told."""

    def __init__(self, script: str, *words: object) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", script, *map(str, words)], stdin=subprocess.PIPE, text=True)

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        assert self._process.poll() is None, "what looks at the run has ended"
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class ScrapedMetrics:
    def __init__(self, cluster: Cluster, metrics: SwitchedMetrics) -> None:
        self._metrics = metrics
        self._server = MetricsServer(MetricsAt("127.0.0.1:0"), metrics.page)
        self._scraper = Told(SCRAPER, self._server.address, (cluster.directory / "metrics.address").read_text().strip())

    def on(self) -> None:
        self._metrics.counts = True
        self._scraper.say("on")

    def off(self) -> None:
        self._metrics.counts = False
        self._scraper.say("off")

    def close(self) -> None:
        self._scraper.close()
        self._server.close()


class ReadPages:
    """Three readers of what the page reads, which draw nothing."""

    def __init__(self, cluster: Cluster, metrics: SwitchedMetrics) -> None:
        self._closing = ExitStack()
        url, _ = self._closing.enter_context(chrome.page_of("watch", cluster.folder))
        self._readers = Told(READER, url, PAGES)
        self._closing.callback(self._readers.close)

    def on(self) -> None:
        self._readers.say("on")

    def off(self) -> None:
        self._readers.say("off")

    def close(self) -> None:
        self._closing.close()


class OpenPages:
    """Three windows of a browser, with the run's page in each while it is on."""

    def __init__(self, cluster: Cluster, metrics: SwitchedMetrics) -> None:
        if why := chrome.missing():
            raise SystemExit(f"--sight pages: {why}")
        self._closing = ExitStack()
        self._url, _ = self._closing.enter_context(chrome.page_of("watch", cluster.folder))
        self._browser = self._closing.enter_context(chrome.chromium())
        for _ in range(PAGES - 1):
            self._browser.switch_to.new_window("window")

    def on(self) -> None:
        self._show(self._url)
        for window in self._browser.window_handles:
            self._browser.switch_to.window(window)
            chrome.until(lambda: self._browser.execute_script(chrome.READY))
        chrome.step_back(self._browser)

    def off(self) -> None:
        self._show("about:blank")

    def _show(self, url: str) -> None:
        for window in self._browser.window_handles:
            self._browser.switch_to.window(window)
            self._browser.get(url)

    def close(self) -> None:
        self._closing.close()


class Both:
    def __init__(self, pages: Callable[[Cluster, SwitchedMetrics], Sight], cluster: Cluster, metrics: SwitchedMetrics) -> None:
        self._parts: tuple[Sight, ...] = (pages(cluster, metrics), ScrapedMetrics(cluster, metrics))

    def on(self) -> None:
        for part in self._parts:
            part.on()

    def off(self) -> None:
        for part in self._parts:
            part.off()

    def close(self) -> None:
        for part in self._parts:
            part.close()


SERVED = ("--metrics-at", "127.0.0.1:0")
SIGHTS: dict[str, tuple[Sequence[str], Callable[[Cluster, SwitchedMetrics], Sight]]] = {
    "all": (SERVED, partial(Both, OpenPages)),
    "remote": (SERVED, partial(Both, ReadPages)),
    "metrics": (SERVED, ScrapedMetrics),
    "pages": ((), OpenPages),
}
"""What the syncer is started with, and what looks."""


def blocks(bench: Bench, sight: Sight, pairs: int, block: int) -> tuple[Costs, Costs]:
    """Wall and CPU seconds of each step, with sight on and off."""
    costs: dict[bool, Costs] = {True: [], False: []}
    for pair in range(pairs):
        for looked_at in (True, False) if pair % 2 == 0 else (False, True):
            (sight.on if looked_at else sight.off)()
            for turn in range(SETTLING + block):
                took = cost_of(bench.synchronising)
                bench.let_partner_step()
                if turn >= SETTLING:
                    costs[looked_at].append(took)
    return costs[True], costs[False]


def one_run(kind: str, batch_size: int, pairs: int, block: int) -> dict[str, float]:
    words, make = SIGHTS[kind]
    config = settings(batch_size)
    metrics = SwitchedMetrics(config, 0, str(torch.__version__))
    with Cluster(config, ("-m", "atoll", "syncer", *words)) as cluster:
        bench = Bench(cluster, cluster.folder, batch_size, metrics)
        sight = make(cluster, metrics)
        try:
            for _ in range(WARM_UP):
                bench.synchronising()
                bench.let_partner_step()
            on, off = blocks(bench, sight, pairs, block)
        finally:
            sight.close()
            bench.close()
        fold = fold_share(cluster.tape)
    cpu = [statistics.mean(busy for _, busy in costs) for costs in (on, off)]
    clock = [statistics.median(wall for wall, _ in costs) for costs in (on, off)]
    return {
        "cpu_ratio": round(cpu[0] / cpu[1], 5), "clock_ratio": round(clock[0] / clock[1], 5),
        "cpu_milliseconds": round(1e3 * cpu[1], 3), "steps": len(on), "fold": round(fold, 4),
    }  # fmt: skip


def fold_share(tape: Path) -> float:
    """Time of the syncer's fold over the time of its machine, fed with the same events. Writing the tape, merging and sending
    take most of a syncer's time and are left out, so the true share is smaller."""
    read = Tape(tape)
    records = [record for record in read.records() if record.worker == SYNCER]
    config = from_builtins(read.header.config)
    machine = SyncerMachine(config)
    metrics = SyncerMetrics(config, machine, read.header.epoch, "", LinkTotals())
    spent = [0.0, 0.0]
    for record in records:
        began = time.perf_counter()
        effects = machine.on(record.event, record.now)
        middle = time.perf_counter()
        metrics(record.now, SYNCER, record.event, effects)
        spent[0] += middle - began
        spent[1] += time.perf_counter() - middle
    return spent[1] / spent[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sight", choices=SIGHTS, default="all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--block", type=int, default=40)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    use_threads(1)
    batch_size, before = fitting_batch(options.milliseconds), load_average()
    runs = []
    for number in range(options.runs):
        runs.append(one_run(options.sight, batch_size, options.pairs, options.block))
        print(f"run {number + 1} of {options.runs}: {runs[-1]}", flush=True)
    cpu, clock = (statistics.median(run[key] for run in runs) for key in ("cpu_ratio", "clock_ratio"))
    passed = cpu <= CPU_MOST and clock <= CLOCK_MOST
    line = {
        "bench": "sight", "sight": options.sight, "cpu_ratio": cpu, "clock_ratio": clock, "passed": passed, "runs": runs,
        "block": options.block, "pairs": options.pairs, "load": [before, load_average()], "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    }  # fmt: skip
    print(f"{'PASS' if passed else 'FAIL'} CPU {cpu:.4f} (at most {CPU_MOST}), clock {clock:.4f} (at most {CLOCK_MOST})")
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
