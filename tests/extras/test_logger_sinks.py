"""TensorBoard, W&B (offline) and MLflow (a folder): each read back by its own means has the tape's curve, also after a kill of
the logger in the middle and after a resume of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import atoll

from atoll.chaos import ChaosPlan
from atoll.config import load
from atoll.runtime.loggers import process
from atoll.runtime.loggers.sinks import LogTarget
from atoll.runtime.loggers.wandb import log_records
from atoll.sim.run import run_virtual
from atoll.tape.folder import find_run
from atoll.tape.format import Tape
from atoll.tape.heldout import points_in
from atoll.views.log_points import LogFold, identity_of

pytestmark = pytest.mark.extras
Curve = dict[tuple[str, int], float]
"""By name and step."""
SMALL = {"batch_size": 2, "seq_len": 16, "max_bytes": 400_000, "heldout_batches": 2, "heldout_every": 10}


def curve_of(run: Path) -> Curve:
    """From the tape, as one reader that reads it all has it."""
    found = find_run(run)
    tape = Tape(found.tape)
    fold = LogFold(tape.header)
    points = [point for record in tape.records() for point in fold.feed(record)]
    points += fold.heldout(points_in(found.folder))
    return {(name, point.step): value for point in points for name, value in point.values.items()}


def once(values: Iterator[tuple[str, int, float]]) -> Curve:
    listed = list(values)
    assert max(Counter((name, step) for name, step, _ in listed).values(), default=1) == 1, "a value is logged twice"
    return {(name, step): value for name, step, value in listed}


def from_tensorboard(place: Path, key: str) -> Curve:
    """By TensorBoard's own accumulator, as its web page reads them."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard")
    (folder,) = place.glob(f"tb/*-{key}")
    scalars = reading.EventAccumulator(str(folder), size_guidance={reading.SCALARS: 0, reading.TENSORS: 0})
    scalars.Reload()
    tags = scalars.Tags()
    named = [(tag, event.step, event.value) for tag in tags["scalars"] for event in scalars.Scalars(tag)]
    util = pytest.importorskip("tensorboard.util.tensor_util", reason="needs the extra tensorboard")
    named += [(tag, e.step, float(util.make_ndarray(e.tensor_proto))) for tag in tags["tensors"] for e in scalars.Tensors(tag)]
    return once(iter(named))


def from_wandb(place: Path, key: str) -> Curve:
    """From the log that `wandb sync` uploads."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs the extra wandb")

    def rows() -> Iterator[tuple[str, int, float]]:
        for path in sorted(place.glob(f"wandb/offline-run-*-{key}/*.wandb")):
            for body in log_records(path.read_bytes()):
                record = records.Record()
                record.ParseFromString(body)
                if record.WhichOneof("record_type") == "history":
                    row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                    yield from ((name, row["outer_step"], row[name]) for name in row if "/" in name)

    return once(rows())


def from_mlflow(place: Path, key: str) -> Curve:
    tracking = pytest.importorskip("mlflow.tracking", reason="needs the extra mlflow")
    client = tracking.MlflowClient(tracking_uri=f"file:{place / 'mlruns'}")
    experiment = client.get_experiment_by_name("atoll")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`atoll.run` = '{key}'")
    named = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    return once((metric.key, metric.step, metric.value) for metric in named)


Reader = Callable[[Path, str], Curve]
SINKS: dict[str, tuple[str, str, Reader]] = {
    "tensorboard": ("tensorboard", "tensorboard:tb", from_tensorboard),
    "wandb": ("wandb", "wandb:atoll", from_wandb),
    "mlflow": ("mlflow", "mlflow:file:mlruns", from_mlflow),
}
each_sink = pytest.mark.parametrize("kind", SINKS)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("MLFLOW_ALLOW_FILE_STORE", "true")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_DIR", raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"learners": 2, "total_steps": 60, "protocol": {"fragments": 4, "local_steps_per_round": 8}}
    small = {"data": SMALL, "model": {"numbers": {"width": 16}}}
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_virtual(load(overrides=overrides | small), ChaosPlan(), folder, tensors=True)
    return folder


def key_of(run: Path) -> str:
    found = find_run(run)
    return identity_of(Tape(found.tape).header, found.folder.resolve().name).key


@each_sink
def test_logger_that_is_killed_and_started_again_logs_the_curve_once(kind: str, trained: Path, tmp_path: Path) -> None:
    module, target, read = SINKS[kind]
    pytest.importorskip(module, reason=f"needs the extra {kind}")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "heldout.jsonl"):
        (run / name).write_bytes((trained / name).read_bytes())
    lines = (trained / "run.tape").read_bytes().splitlines(keepends=True)
    (run / "run.tape").write_bytes(b"".join(lines[: len(lines) // 2]))
    words = [sys.executable, "-m", "atoll", "log", "run", "--to", target]
    with subprocess.Popen([*words, "--follow"], cwd=tmp_path, start_new_session=True) as logger:
        key, until = key_of(run), time.monotonic() + 120
        while len(_seen(read, tmp_path, key)) < 20:
            assert time.monotonic() < until and logger.poll() is None
            threading.Event().wait(0.2)
        with (run / "run.tape").open("ab") as file:
            file.writelines(lines[len(lines) // 2 : 3 * len(lines) // 4])
        os.killpg(logger.pid, signal.SIGKILL)  # W&B's service too
    assert 0 < len(read(tmp_path, key)) < len(curve_of(trained))
    (run / "run.tape").write_bytes(b"".join(lines))
    for _ in range(2):  # the second finds nothing to do
        subprocess.run(words, cwd=tmp_path, check=True, timeout=120)
    logged, expected = read(tmp_path, key), curve_of(run)
    assert logged == {at: pytest.approx(value, rel=1e-6) for at, value in expected.items()}
    assert {name for name, _ in logged} == {"train/loss", "heldout/loss", "round/participants", "tokens/trained"}


def _seen(read: Reader, place: Path, key: str) -> Curve:
    """While it is being written."""
    try:
        return read(place, key)
    except Exception:
        return {}


def test_resumed_run_has_its_own_curve_in_every_sink_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FINISH_SECONDS", 200.0)  # a busy machine imports their packages for as long as the run lasts
    for module, _, _ in SINKS.values():
        pytest.importorskip(module, reason="needs the extras tensorboard, wandb and mlflow")
    to = [word for _, target, _ in SINKS.values() for word in ("--log-to", target)]
    keys = (
        "total_steps=24", "learners=2", "protocol.fragments=4", "protocol.local_steps_per_round=4", "protocol.quorum=2",
        "data.seq_len=16", "data.batch_size=2", "data.max_bytes=200000", "data.heldout_batches=2", "data.heldout_every=4",
        "model.numbers={width=16, layers=2, heads=2, mlp=24}", "protocol.snapshot_interval=12", "limits.silence_steps=1000",
    )  # fmt: skip
    sets = [word for key in keys for word in ("--set", key)]
    slow = "\n".join(f'[[faults]]\nfault = "slow"\nat = 0.0\nlearner = {m}\nfactor = 8.0\nlasts = 1000.0' for m in (0, 1))
    (tmp_path / "slow.toml").write_text(slow)
    done = atoll("train", *sets, "--chaos", "slow.toml", "--out", "first", *to, cwd=tmp_path)
    assert done.returncode == 0 and "warning: the logger" not in done.stdout + done.stderr, done.stdout + done.stderr
    done = atoll("train", "--resume", "first", "--chaos", "slow.toml", "--out", "second", *to, cwd=tmp_path)
    assert done.returncode == 0 and "warning: the logger" not in done.stdout + done.stderr, done.stdout + done.stderr
    for run in ("first", "second"):
        expected = curve_of(tmp_path / run)
        assert max(step for _, step in expected) == 24 and min(step for _, step in expected) == (1 if run == "first" else 13)
        for _, _, read in SINKS.values():
            logged = read(tmp_path, key_of(tmp_path / run))
            assert logged == {at: pytest.approx(value, rel=1e-6) for at, value in expected.items()}


def test_sink_that_is_dead_does_not_hold_the_run_and_the_rest_can_be_logged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    sets = [word for key in ("total_steps=24", "data.max_bytes=200000") for word in ("--set", key)]
    dead = "mlflow:http://127.0.0.1:9"
    done = atoll("train", "--preset", "ddp", "--learners", "2", *sets, "--out", "run", "--log-to", dead, cwd=tmp_path)
    assert done.returncode == 0
    assert f"the logger for {dead} ended with exit code 1" in done.stdout
    assert f"atoll log run --to {dead} logs the rest" in " ".join(done.stdout.split())
    done = atoll("log", "run", "--to", "mlflow:file:mlruns", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    curve = from_mlflow(tmp_path, key_of(tmp_path / "run"))
    assert len([at for at in curve if at[0] == "train/loss"]) == 24, "torch's ranks too"


def test_logger_that_hangs_is_left_behind_after_its_time(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    monkeypatch.setattr(process, "FINISH_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    os.mkfifo(tmp_path / "endless")
    (run / "run.tape").symlink_to(trained / "run.tape")
    (run / "heldout.jsonl").symlink_to(tmp_path / "endless")  # reading it never ends
    began = time.monotonic()
    with process.LoggerProcesses(run, [LogTarget("tensorboard", "tb")], said.append):
        pass
    assert time.monotonic() - began < 20
    assert said == [
        "warning: the logger for tensorboard:tb was not done 1 s after the run; "
        f"atoll log {run} --to tensorboard:tb logs the rest"
    ]
