"""`/metrics` of a live run: scraped while it trains, read by Prometheus's own parser, and held against its tape."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from command import atoll
from harness import LONG, PATIENT, STEADY, run, small

from atoll.ids import SYNCER
from atoll.protocol.vocabulary import Stored
from atoll.runtime.local.cluster import LocalCluster
from atoll.runtime.metrics import MetricsAt
from atoll.tape.format import Record, Tape
from atoll.views.metrics import METRICS

pytestmark = pytest.mark.live

ROUNDS = 40


def scraped(folder: Path) -> str:
    address = (folder / "metrics.address").read_text().strip()
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page: str = answer.read().decode()
    return page


class Pages:
    """Scrapes everybody once enough rounds are stored, and a few more: a syncer counts what it has taped already."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.stored = directory, 0
        self.syncer, self.learners = "", list[str]()

    def __call__(self, cluster: LocalCluster, record: Record) -> None:
        self.stored += record.worker == SYNCER and isinstance(record.event, Stored)
        if self.stored < ROUNDS + 10 or self.syncer:
            return
        self.syncer = scraped(self._directory / "syncer")
        self.learners = [scraped(self._directory / "learners" / str(m)) for m in range(2)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pages]:
    directory = tmp_path_factory.mktemp("scraped") / "run"
    seen = Pages(directory)
    config = small(2, total_steps=LONG, limits=PATIENT, inner=STEADY)
    run(directory, config, watch=seen, until=lambda: bool(seen.syncer), metrics=MetricsAt("127.0.0.1:0"))
    return directory, seen


def test_every_metric_is_served_by_whoever_the_docs_say(pages: tuple[Path, Pages]) -> None:
    _, seen = pages
    for page, role in ((seen.syncer, "syncer"), *((page, "learner") for page in seen.learners)):
        typed = {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE ")}
        assert typed == {metric.name: metric.kind.value for metric in METRICS if metric.on in (role, "both")}


def test_prometheus_reads_the_pages_and_finds_what_the_tape_has(pages: tuple[Path, Pages]) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client (extra test)")
    directory, seen = pages
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for page in (seen.syncer, *seen.learners)
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
    }
    stored = [record for record in Tape(directory / "syncer" / "run.tape").records() if isinstance(record.event, Stored)]
    assert ROUNDS <= found["atoll_round_seconds_count",] <= len(stored)
    assert found["atoll_outer_step",] >= 30 and found["atoll_total_steps",] == LONG
    assert 0 < found["atoll_goodput_ratio",] <= 1.05
    for learner in ("0", "1"):
        up = ("atoll_link_bytes_total", ("direction", "up"), ("learner", learner))
        assert found[up] > 10_000
        assert found["atoll_learner_step_seconds_count", ("learner", learner)] > 10
        assert 0 < found["atoll_learner_loss", ("learner", learner)] < 10
        assert found["atoll_learner_connected", ("learner", learner)] == 1
    assert found["atoll_learners", ("standing", "in_sync")] == 2
    assert time.time() - 300 < found["atoll_last_stored_timestamp_seconds",] <= time.time()


def test_endpoint_ends_with_its_worker(pages: tuple[Path, Pages]) -> None:
    with pytest.raises(URLError):
        scraped(pages[0] / "syncer")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "--metrics-at", "0.0.0.0:9100"), "0.0.0.0:9100: other machines can reach it; give --metrics-token"),
        (("train", "--virtual", "--metrics-at", "127.0.0.1:0"), "--metrics-at: a virtual run has no clock"),
        (("train", "--preset", "ddp", "--metrics-at", "127.0.0.1:0"), "--metrics-at: torch's DDP has no syncer"),
        (("syncer", "--metrics-at", "0.0.0.0:9100"), "give --keys (see `atoll keys`) or --metrics-token"),
        (("learner", "--metrics-at", "nowhere"), "--metrics-at: address 'nowhere': must be host:port"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = atoll(*words, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
