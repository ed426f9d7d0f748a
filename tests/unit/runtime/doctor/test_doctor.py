"""`atoll doctor` finds every kind of damage by the file's name, repairs what it is asked to, and leaves a sound run alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.config import Config, load, to_toml
from atoll.errors import UserError
from atoll.ids import SYNCER, WorkerId
from atoll.protocol.vocabulary import Started, StepDone
from atoll.runtime.doctor.examine import examine, repair
from atoll.runtime.doctor.health import HealthReport
from atoll.store.durable import DurableVersions
from atoll.store.lock import lock_directory
from atoll.store.snapshots import begin_syncer, learner_root, seal_syncer, write_learner
from atoll.store.version_file import FOLDER, file_name
from atoll.store.versions import Version
from atoll.store.weights import save_weights
from atoll.tape.format import Gap, Header, Tape, TapeWriter
from atoll.transport.keys import make_keys

CONFIG: Config = load(preset_name="decoupled", overrides={
    "learners": 2, "protocol": {"fragments": 2, "local_steps_per_round": 4},
})  # fmt: skip


def header(worker: WorkerId) -> Header:
    return Header(
        config=msgspec.to_builtins(CONFIG), code_version="0", data_fingerprint="none", threads=1,
        torch_version="none", cpu_capability="none", tensors=True, run="a7", worker=worker,
    )  # fmt: skip


def write_tape(path: Path, worker: WorkerId, steps: int = 0, *, ended: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tape = TapeWriter.create(path, header(worker), flush_each=True)
    tape.append(0, worker, Started(0), ())
    for _ in range(steps):
        tape.append(1, worker, StepDone(1, 1, 1, None), ())
    if ended:
        tape.close()
    else:
        tape.__exit__(KeyboardInterrupt, None, None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A live run's folder, as it lies there after a syncer was stopped."""
    folder = tmp_path / "run"
    home = folder / "syncer"
    theta = torch.zeros(50)
    disk = DurableVersions.create(home, [Version(theta, torch.zeros(2), None, None, theta, None)] * 2)
    write_tape(home / "run.tape", SYNCER)
    for learner in (0, 1):
        write_tape(folder / "learners" / str(learner) / "0.tape", learner, 4, ended=True)
    begin_syncer(home, 10, disk, b"{}")
    for learner in (0, 1):
        write_learner(learner_root(folder, learner), 10, {"x": theta}, b"{}", 2)
    seal_syncer(home, 10, (0, 1), True, 2, run="a7")
    (home / "places.jsonl").write_bytes(b'{"learner":0,"incarnation":0}\n{"learner":1,"incarnation":0}\n')
    (home / "config.toml").write_text(to_toml(CONFIG), encoding="utf8")
    save_weights(home / "theta.safetensors", {"w": theta})
    for name in ("run.secret", "token.key", "token"):
        (home / name).write_bytes(b"s" * 32)
        (home / name).chmod(0o600)
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # a snapshot has the same file by another name
    path.write_bytes(data)


def parts(report: HealthReport) -> list[str]:
    assert report.healthy == (not report.problems)
    return [problem.part for problem in report.problems]


def test_sound_run_is_healthy_whatever_name_it_is_given(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for name in (run, run / "syncer", run / "syncer" / "run.tape"):
        report = examine(name)
        assert parts(report) == [] and report.checked["tapes"] == 3 and report.checked["versions"] == 2
        assert report.checked["snapshots"] == 1 and report.checked["secrets"] == 3 and report.checked["places"] == 2
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "reading changes nothing"


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "syncer/run.tape": ("tape", lambda path: flip(path, -30)),
    "learners/1/0.tape": ("tape", lambda path: flip(path, len(path.read_bytes()) // 2 + 200)),
    "syncer/versions/0001-000000000.safetensors": ("versions", lambda path: flip(path, -1)),
    "syncer/theta.safetensors": ("weights", lambda path: os.truncate(path, 40)),
    "syncer/snapshots/10/machine.json": ("snapshots", lambda path: path.write_bytes(b"[]")),
    "learners/0/snapshots/10/state.safetensors": ("snapshots", lambda path: flip(path, -1)),
    "learners/1/snapshots/10/manifest.json": ("snapshots", lambda path: path.write_bytes(b"{")),
    "syncer/places.jsonl": ("places", lambda path: path.write_bytes(b"nothing\n" + path.read_bytes())),
    "syncer/config.toml": ("config", lambda path: path.write_text("seed = -1\n")),
    "syncer/token": ("permissions", lambda path: path.chmod(0o644)),
    "syncer/run.secret": ("permissions", lambda path: path.write_bytes(b"")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_the_files_name_and_costs_the_exit_code(run: Path, name: str) -> None:
    part, damage = DAMAGE[name]
    damage(run / name)
    report = examine(run)
    assert parts(report) == [part]
    assert report.problems[0].path.startswith(str((run / name).parent))
    done = CliRunner().invoke(app, ["doctor", str(run), "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["problems"][0]["part"] == part


def test_command_prints_problems_and_ends_with_the_verdict(run: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(run)])
    assert done.exit_code == 0 and "healthy" in done.stdout.splitlines()[-1]
    (run / "syncer" / "token").chmod(0o644)
    done = CliRunner().invoke(app, ["doctor", str(run)])
    assert done.exit_code == 1 and "1 problem" in done.stdout.splitlines()[-1]
    done = CliRunner().invoke(app, ["doctor", str(run), "--repair"])
    assert done.exit_code == 0 and "repaired" in done.stdout


def test_folder_without_a_run_or_keys_is_bad_input(run: Path, tmp_path: Path) -> None:
    for words in ([str(tmp_path / "none")], [str(run), "--keys", str(tmp_path / "none")]):
        assert isinstance(CliRunner().invoke(app, ["doctor", *words]).exception, UserError)


def test_version_that_the_tape_keeps_and_the_disk_lacks_is_named(run: Path) -> None:
    (run / "syncer" / FOLDER / file_name(1, 0)).unlink()
    (problem,) = examine(run).problems
    assert problem.part == "versions" and "0001-000000000" in problem.what


def test_missing_tape_and_one_of_another_run_are_named(run: Path) -> None:
    (run / "learners" / "1" / "0.tape").rename(run / "learners" / "0" / "1.tape")
    (run / "syncer" / "run.tape").unlink()
    assert parts(examine(run)) == ["tape", "tape"]


def test_what_a_crash_leaves_is_a_note_and_no_problem(run: Path) -> None:
    with (run / "syncer" / "run.tape").open("ab") as tape:
        tape.write(b'{"c":"half a li')
    with (run / "syncer" / "places.jsonl").open("ab") as places:
        places.write(b'{"lear')
    (run / "syncer" / "versions" / "0000-000000004.safetensors.partial").write_bytes(b"")
    (run / "syncer" / "snapshots" / "20.open").mkdir()
    (run / "learners" / "1" / "1.tape").write_bytes(b"")
    report = examine(run)
    assert parts(report) == [] and len(report.notes) == 5


def test_gap_of_a_learners_tape_and_a_partial_snapshot_are_notes(run: Path) -> None:
    tape = TapeWriter.create(run / "learners" / "1" / "1.tape", header(1), flush_each=True)
    tape.append(0, 1, Started(1), ())
    tape.append_gap(Gap(2, 9, "No space left on device"))
    tape.count = 9
    tape.close()
    manifest = run / "syncer" / "snapshots" / "10" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"left_out": [2]}))
    report = examine(run)
    assert parts(report) == [] and any("8 records after record 1 are missing" in note for note in report.notes)


# ---------------------------------------------------------------- repairs


def test_damaged_tape_is_cut_after_its_last_good_record_and_the_rest_is_kept(run: Path) -> None:
    path = run / "learners" / "1" / "0.tape"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    damaged = b"".join([*lines[:3], b"x" + lines[3][1:], *lines[4:]])
    path.write_bytes(damaged)
    assert parts(repair(run, None, permissions=True, tapes=False)) == ["tape"], "only on request"
    assert path.read_bytes() == damaged
    report = repair(run, None, permissions=False, tapes=True)
    assert parts(report) == [] and len(report.repaired) == 1
    assert path.read_bytes() == b"".join(lines[:3]) and [r.number for r in Tape(path).records()] == [1, 2]
    assert path.read_bytes() + (run / "learners" / "1" / "0.tape.cut1").read_bytes() == damaged
    path.write_bytes(damaged)
    repair(run, None, permissions=False, tapes=True)
    assert (run / "learners" / "1" / "0.tape.cut2").exists(), "an earlier rest is never overwritten"


def test_damaged_syncers_tape_says_whether_a_syncer_can_go_on_from_the_cut(run: Path) -> None:
    path = run / "syncer" / "run.tape"
    with path.open("ab") as tape:
        tape.write(b'{"c":"00000000","n":2}\n')
    (problem,) = examine(run).problems
    assert "go on from outer step 0" in problem.advice
    (run / "syncer" / FOLDER / file_name(1, 0)).unlink()
    (problem,) = examine(run).problems
    assert "are gone" in problem.advice


def test_tape_with_a_damaged_header_has_nothing_to_keep(run: Path) -> None:
    flip(run / "syncer" / "run.tape", 40)
    report = repair(run, None, permissions=False, tapes=True)
    assert parts(report) == ["tape"] and report.repaired == []


def test_secrets_that_others_may_read_are_closed_on_request(run: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, learners=1)
    assert parts(examine(run, keys)) == []
    for path in (run / "syncer" / "token.key", keys / "syncer.key", keys / "token"):
        path.chmod(0o640)
    (run / "syncer").chmod(0o777)
    assert parts(examine(run, keys)) == ["permissions"] * 4
    report = repair(run, keys, permissions=True, tapes=False)
    assert parts(report) == [] and len(report.repaired) == 4
    assert (keys / "syncer.key").stat().st_mode & 0o777 == 0o600 and (run / "syncer").stat().st_mode & 0o777 == 0o775


def test_run_whose_syncer_is_running_is_read_and_not_repaired(run: Path) -> None:
    repair(run, None, permissions=True, tapes=True)
    assert not (run / "syncer" / "lock").exists(), "no syncer was ever there, and the doctor leaves no file behind"
    with lock_directory(run / "syncer"):
        assert any("is running" in note for note in examine(run).notes)
        with pytest.raises(UserError, match="another syncer"):
            repair(run, None, permissions=True, tapes=True)


def test_syncers_folder_alone_expects_no_parts_of_learners(run: Path) -> None:
    """The learners are on other machines."""
    for path in sorted((run / "learners").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (run / "learners").rmdir()
    assert parts(examine(run)) == []
