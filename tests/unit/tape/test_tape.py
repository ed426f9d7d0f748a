"""The tape: what was written comes back, what was damaged is refused by number, what was decided is re-derived."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.chaos import ChaosPlan, Clog, Corrupt, Kill, KillSyncer, Partition, Pause, Slow
from atoll.config import PRESETS, Config, load
from atoll.errors import ReplayDiverged, TapeError
from atoll.ids import SYNCER
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import FixParticipants, InnerStep, Started, StepDone, Stored, Wait
from atoll.sim.cluster import VirtualCluster
from atoll.tape.format import Header, Record, Tape, TapeWriter
from atoll.tape.replay import replay
from atoll.tape.tail import Tail
from atoll.tape.weave import open_run


def header(config: Config, **changes: object) -> Header:
    numbers = {"code_version": "0", "data_fingerprint": "none", "threads": 1, "torch_version": "none",
               "cpu_capability": "none", "tensors": False}  # fmt: skip
    return Header(config=msgspec.to_builtins(config), **(numbers | changes))  # type: ignore[arg-type]


def config_of(preset: str, total_steps: int = 24) -> Config:
    protocol = {"local_steps_per_round": 4, "fragments": 4}
    protocol |= {"overlap": 4} if preset in ("async_diloco", "eager") else {}
    protocol |= {"fragmentation": "balanced"} if preset == "streaming" else {}
    protocol |= {"local_steps_per_round": 1} if preset == "ddp" else {}
    return load(preset_name=preset, overrides={"learners": 3, "total_steps": total_steps, "protocol": protocol})


PLAN = ChaosPlan((
    Clog(3.0, 1, SYNCER, 2.0), Kill(5.0, 2, 4.0), Slow(6.0, 0, 2.0, 5.0), KillSyncer(8.0, 2.0), Pause(12.0, 1, 3.0),
    Corrupt(14.0, 0, SYNCER), Partition(16.0, 2, SYNCER, 6.0, True),
))  # fmt: skip


def taped(path: Path, config: Config, plan: ChaosPlan | None = None) -> Path:
    with TapeWriter.create(path, header(config)) as writer:
        VirtualCluster(config, plan=plan, observers=[writer.append]).run(until_seconds=4000)
    return path


class Content(bytes):
    """A tape's bytes, that do not fill the screen when a test fails."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes of tape>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """A short tape's bytes, to damage."""
    return Content(taped(tmp_path_factory.mktemp("tape") / "run.tape", config_of("decoupled", 2)).read_bytes())


def read(path: Path, content: bytes) -> tuple[Tape, list[Record]]:
    path.write_bytes(content)
    tape = Tape(path)
    return tape, list(tape.records())


def resealed(bodies: list[bytes]) -> bytes:
    """Lines with a valid chain, whatever they say."""
    chain, lines = 0, []
    for body in bodies:
        chain = zlib.crc32(body, chain)
        lines.append(b'{"c":"%08x",' % chain + body[1:] + b"\n")
    return b"".join(lines)


def bodies_of(content: bytes) -> list[bytes]:
    return [b"{" + line[len(b'{"c":"00000000",') :] for line in content.splitlines()]


# ---------------------------------------------------------------- round trip


def test_header_records_and_footer_come_back_as_they_were_written(tmp_path: Path) -> None:
    path, head = tmp_path / "a.tape", header(config_of("diloco"), plan=[{"fault": "kill", "at": 3.0}])
    written = [
        Record(1, 0, SYNCER, Started(0), ()),
        Record(2, 17, 1, StepDone(100, 2, 99, 0.5), (InnerStep(2, 1, 3, 4), Wait(Reason(Why.VERSION_AWAITED, "because")))),
        Record(3, 18, SYNCER, Stored(1, "äö"), (FixParticipants(2, (0,), (0, 1), Reason(Why.ALL_REPORTED, "äö")),)),
    ]
    with TapeWriter.create(path, head) as writer:
        for r in written:
            writer.append(r.now, r.worker, r.event, r.effects)
    tape = Tape(path)
    assert msgspec.json.encode(tape.header) == msgspec.json.encode(head)
    assert list(tape.records()) == written
    assert (tape.cut, tape.whole_records) == (False, 3)


def test_every_record_of_a_run_comes_back_equal(tmp_path: Path) -> None:
    config, seen = config_of("decoupled", 8), []
    with TapeWriter.create(tmp_path / "a.tape", header(config)) as writer:

        def watch(now, worker, event, effects):  # type: ignore[no-untyped-def]
            seen.append((now, worker, event, tuple(effects)))

        VirtualCluster(config, observers=[writer.append, watch], plan=ChaosPlan((Kill(4.0, 1, 2.0),))).run(until_seconds=1000)
    records = list(Tape(tmp_path / "a.tape").records())
    assert [(r.now, r.worker, r.event, r.effects) for r in records] == seen
    assert [r.number for r in records] == list(range(1, len(seen) + 1))


def test_writer_that_failed_leaves_no_footer(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    with pytest.raises(RuntimeError), TapeWriter.create(path, header(config_of("diloco"))) as writer:
        writer.append(0, SYNCER, Started(0), ())
        raise RuntimeError
    tape = Tape(path)
    assert len(list(tape.records())) == 1
    assert tape.cut


def test_tape_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    path.write_bytes(b"precious")
    with pytest.raises(TapeError, match="exists already; a tape is never overwritten"):
        TapeWriter.create(path, header(config_of("diloco")))
    assert path.read_bytes() == b"precious"


def test_tape_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="no such file"):
        Tape(tmp_path / "gone.tape")
    with pytest.raises(TapeError, match="cannot be read"):
        Tape(tmp_path)


def test_tape_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    with TapeWriter.create(path, header(config_of("diloco"), format=99)):
        pass
    with pytest.raises(TapeError, match="recorded in format 99, and this atoll reads format 5"):
        Tape(path)


# ---------------------------------------------------------------- damage


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_byte_changed_is_refused_naming_its_record(tmp_path: Path, whole: bytes, position: int, flip: int) -> None:
    at = position % (len(whole) - 1)  # the last newline apart: without it the footer reads as cut off by a crash
    line = whole[:at].count(b"\n")
    damaged = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
    with pytest.raises(TapeError) as caught:
        read(tmp_path / "x.tape", damaged)
    assert ("the header" if line == 0 else f"record {line} ") in str(caught.value)


@pytest.mark.parametrize("column", range(17))
def test_any_byte_of_a_records_seal_changed_is_refused(tmp_path: Path, whole: bytes, column: int) -> None:
    start = whole.index(b"\n") + 1
    at = start + column
    with pytest.raises(TapeError, match="record 1 "):
        read(tmp_path / "x.tape", whole[:at] + b"#" + whole[at + 1 :])


def test_removed_line_is_refused(tmp_path: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for gone in range(1, len(lines) - 1):
        with pytest.raises(TapeError, match=f"record {gone} is damaged, or a record before it is missing"):
            read(tmp_path / "x.tape", b"".join(lines[:gone] + lines[gone + 1 :]))


def test_removed_header_is_refused(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(TapeError, match="header"):
        read(tmp_path / "x.tape", whole[whole.index(b"\n") + 1 :])


def test_swapped_lines_are_refused(tmp_path: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for at in range(1, len(lines) - 1):
        swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        with pytest.raises(TapeError, match=f"record {at} "):
            read(tmp_path / "x.tape", b"".join(swapped))


def test_duplicated_line_is_refused(tmp_path: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for at in range(1, len(lines) - 1):
        with pytest.raises(TapeError, match=f"record {at + 1} "):
            read(tmp_path / "x.tape", b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]]))


def test_anything_after_the_footer_is_refused(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(TapeError, match="the footer after record"):
        read(tmp_path / "x.tape", whole + b"x")
    with pytest.raises(TapeError, match="the footer after record"):
        read(tmp_path / "x.tape", whole + whole.splitlines(keepends=True)[-1])


def test_footer_that_counts_otherwise_is_refused(tmp_path: Path, whole: bytes) -> None:
    bodies = bodies_of(whole)
    with pytest.raises(TapeError, match="the footer after record"):
        read(tmp_path / "x.tape", resealed([*bodies[:-1], b'{"end":1}']))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="the header is damaged or truncated"):
        read(tmp_path / "x.tape", b"")


READERS: dict[str, Callable[[Path], object]] = {
    "records": lambda path: list(Tape(path).records()), "tail": lambda path: list(Tail(Tape(path)).more()), "run": open_run,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("lines", [0, 1, 3])
def test_tape_without_line_ends_is_refused_and_not_read_whole(
    tmp_path: Path, whole: bytes, lines: int, reader: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lines and reader is open_run:
        pytest.skip("it reads the headers only")
    monkeypatch.setattr("atoll.tape.format.LINE_MAX", 1 << 20)
    path = tmp_path / "a.tape"
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]) + b'{"c":"00000000",')
    os.truncate(path, 1 << 32)  # four gigabytes, of which the disk holds none
    tracemalloc.start()
    try:
        with pytest.raises(TapeError, match=r"a line of more than 1 MiB"):
            reader(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_record_nested_too_deeply_is_refused_by_number(tmp_path: Path, whole: bytes) -> None:
    head, *_ = whole.splitlines(keepends=True)
    chain = zlib.crc32(b"{" + head[16:-1])
    body = b'{"n":1,"t":0,"w":0,"e":' + b"[" * 100_000 + b"]" * 100_000 + b',"f":[]}'
    line = b'{"c":"%08x",' % zlib.crc32(body, chain) + body[1:] + b"\n"
    (tmp_path / "a.tape").write_bytes(head + line)
    for reader in (READERS["records"], READERS["tail"]):
        with pytest.raises(TapeError, match="record 1 cannot be decoded"):
            reader(tmp_path / "a.tape")


def test_record_that_is_no_record_is_refused_by_number(tmp_path: Path, whole: bytes) -> None:
    bodies = bodies_of(whole)
    bodies[2] = b'{"n":2,"t":0,"w":-1,"e":{"type":"Nonsense"},"f":[]}'
    with pytest.raises(TapeError, match="record 2 cannot be decoded"):
        read(tmp_path / "x.tape", resealed(bodies))


def test_cut_at_any_byte_of_the_last_record_reads_up_to_the_last_whole_one(tmp_path: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)[:-1]  # a crash leaves no footer
    before, last = b"".join(lines[:-1]), lines[-1]
    for kept in range(len(last) + 1):
        tape, records = read(tmp_path / "x.tape", before + last[:kept])
        expected = len(lines) - 1 if kept == len(last) else len(lines) - 2
        assert (len(records), tape.whole_records, tape.cut) == (expected, expected, True)


# ---------------------------------------------------------------- replay


@pytest.mark.parametrize("preset", list(PRESETS))
def test_replay_re_derives_every_decision_of_a_run_under_faults(tmp_path: Path, preset: str) -> None:
    config = config_of(preset, 40)
    tape = Tape(taped(tmp_path / "a.tape", config, PLAN))
    outcome = replay(tape)
    assert (outcome.outer_step, outcome.cut) == (40, False)
    assert outcome.records == len(list(tape.records())) > 500


def test_replay_of_a_cut_tape_goes_as_far_as_it_goes(tmp_path: Path) -> None:
    content = taped(tmp_path / "a.tape", config_of("decoupled")).read_bytes()
    (tmp_path / "b.tape").write_bytes(content[: len(content) // 2])
    outcome = replay(Tape(tmp_path / "b.tape"))
    assert outcome.cut and 0 < outcome.outer_step < 24


def altered(content: bytes, number: int, record: Record) -> bytes:
    bodies = bodies_of(content)
    bodies[number] = msgspec.json.encode(record)
    return resealed(bodies)


def test_replay_of_one_altered_decision_stops_there_and_tells_the_story(tmp_path: Path) -> None:
    path = taped(tmp_path / "a.tape", config_of("decoupled"))
    records = list(Tape(path).records())
    (chosen,) = [r for r in records for f in r.effects if isinstance(f, FixParticipants) and f.outer_step == 12]
    lie = tuple(
        msgspec.structs.replace(f, participants=(9,)) if isinstance(f, FixParticipants) else f for f in chosen.effects
    )
    (tmp_path / "b.tape").write_bytes(altered(path.read_bytes(), chosen.number, msgspec.structs.replace(chosen, effects=lie)))
    with pytest.raises(ReplayDiverged) as caught:
        replay(Tape(tmp_path / "b.tape"))
    story = str(caught.value)
    taped_effect = next(f for f in lie if isinstance(f, FixParticipants))
    derived = next(f for f in chosen.effects if isinstance(f, FixParticipants))
    assert story.startswith(f"record {chosen.number}: syncer at ")
    assert f"tape:    {taped_effect}" in story and f"machine: {derived}" in story
    assert str(chosen.event) in story and f"{chosen.number - 3:>8} " in story


@pytest.mark.parametrize("what", ["missing", "extra"])
def test_replay_of_a_missing_or_an_extra_effect_is_told_as_such(tmp_path: Path, what: str) -> None:
    path = taped(tmp_path / "a.tape", config_of("decoupled", 4))
    records = list(Tape(path).records())
    chosen = next(r for r in records if r.worker == 1 and isinstance(r.event, StepDone))
    effects = chosen.effects[:-1] if what == "missing" else (*chosen.effects, Wait(Reason(Why.VERSION_AWAITED, "made up")))
    (tmp_path / "b.tape").write_bytes(
        altered(path.read_bytes(), chosen.number, msgspec.structs.replace(chosen, effects=effects))
    )
    with pytest.raises(ReplayDiverged, match=f"record {chosen.number}: learner1 at ") as caught:
        replay(Tape(tmp_path / "b.tape"))
    assert ("tape:    (nothing)" if what == "missing" else "machine: (nothing)") in str(caught.value)


def test_replay_of_an_altered_event_diverges_too(tmp_path: Path) -> None:
    path = taped(tmp_path / "a.tape", config_of("decoupled", 4))
    records = list(Tape(path).records())
    chosen = next(r for r in records if isinstance(r.event, StepDone))
    assert isinstance(chosen.event, StepDone)
    lie = msgspec.structs.replace(chosen, event=msgspec.structs.replace(chosen.event, tokens=chosen.event.tokens + 1))
    (tmp_path / "b.tape").write_bytes(altered(path.read_bytes(), chosen.number, lie))
    with pytest.raises(ReplayDiverged, match=f"record {chosen.number}: "):
        replay(Tape(tmp_path / "b.tape"))


def test_replay_of_a_worker_that_acts_before_it_started_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    with TapeWriter.create(path, header(config_of("diloco"))) as writer:
        writer.append(0, 1, StepDone(1, 1, 1, None), ())
    with pytest.raises(TapeError, match="record 1: learner1 acts before it starts"):
        replay(Tape(path))


def test_replay_of_a_header_whose_config_is_refused_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    head = header(config_of("diloco"))
    head.config["learners"] = 0
    with TapeWriter.create(path, head):
        pass
    with pytest.raises(TapeError, match="the config in its header is refused: key learners = 0"):
        replay(Tape(path))


def test_replay_reports_records_and_steps_that_never_go_back(tmp_path: Path) -> None:
    path, told = taped(tmp_path / "a.tape", config_of("decoupled", 2)), []
    outcome = replay(Tape(path), progress=lambda records, step: told.append((records, step)))
    assert [records for records, _ in told] == list(range(1, outcome.records + 1))
    steps = [step for _, step in told]
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (0, outcome.outer_step)


def test_same_config_and_plan_give_the_same_tape_to_the_byte(tmp_path: Path) -> None:
    first, second = (taped(tmp_path / name, config_of("decoupled"), PLAN).read_bytes() for name in ("a.tape", "b.tape"))
    assert first == second
