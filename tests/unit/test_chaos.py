"""Fault plans: they print themselves, are read from files, refuse nonsense in one sentence, and are functions of a seed."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.chaos import (
    KINDS,
    ChaosPlan,
    Clog,
    Corrupt,
    Fault,
    Kill,
    KillSyncer,
    Partition,
    Pause,
    Slow,
    check_plan,
    load_plan,
    random_plan,
    swizzle_clog,
)
from atoll.errors import PlanError
from atoll.ids import SYNCER

# ---------------------------------------------------------------- printing


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Kill(12.5, 3, 20.0), "    12.500 s  kill       learner3, back after 20.000 s"),
        (Pause(1.0, 0, 2.5), "     1.000 s  pause      learner0 for 2.500 s"),
        (Slow(1.0, 2, 1.5, 30.0), "     1.000 s  slow       learner2 by 1.50 for 30.000 s"),
        (Partition(1.0, 2), "     1.000 s  partition  learner2 <-> syncer for 10.000 s"),
        (Partition(1.0, SYNCER, 2, 3.0, True), "     1.000 s  partition  syncer -> learner2 for 3.000 s"),
        (Clog(0.0, 1, 2, 4.0), "     0.000 s  clog       learner1 <-> learner2 for 4.000 s"),
        (Corrupt(7.0, 1), "     7.000 s  corrupt    next frame learner1 -> syncer"),
        (KillSyncer(9.0, 5.0), "     9.000 s  kill       syncer, back after 5.000 s"),
    ],
)
def test_fault_prints_when_what_whom_and_how_long(fault: Fault, line: str) -> None:
    assert str(ChaosPlan((fault,))) == line


def test_plan_prints_one_line_a_fault_and_says_when_there_is_none() -> None:
    assert str(ChaosPlan((Kill(1.0, 0), Corrupt(2.0, 0)))).count("\n") == 1
    assert str(ChaosPlan()) == "no faults"


def test_plan_is_healed_when_its_last_fault_is_over() -> None:
    assert ChaosPlan((Kill(5.0, 0, 20.0), Corrupt(24.0, 1), Clog(3.0, 1, lasts=2.0))).healed_at() == 25.0
    assert ChaosPlan().healed_at() == 0.0


# ---------------------------------------------------------------- files


def plan_file(folder: Path, text: str) -> str:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf8")
    return str(path)


def test_plan_file_with_every_kind_of_fault_is_read(tmp_path: Path) -> None:
    text = """
    faults = [
      {fault = "kill", at = 1.0, learner = 2, lasts = 3.0}, {fault = "pause", at = 2, learner = 0},
      {fault = "slow", at = 3.0, learner = 1, factor = 1.5}, {fault = "partition", at = 4.0, a = 1, one_way = true},
      {fault = "clog", at = 5.0, a = 0, b = 1}, {fault = "corrupt", at = 6.0, a = -1, b = 2},
      {fault = "kill_syncer", at = 7.0},
    ]
    """
    assert load_plan(plan_file(tmp_path, text), learners=3).faults == (
        Kill(1.0, 2, 3.0), Pause(2.0, 0, 10.0), Slow(3.0, 1, 1.5, 30.0), Partition(4.0, 1, SYNCER, 10.0, True),
        Clog(5.0, 0, 1, 5.0), Corrupt(6.0, SYNCER, 2), KillSyncer(7.0, 5.0),
    )  # fmt: skip


def test_plan_written_as_toml_tables_is_read(tmp_path: Path) -> None:
    text = '[[faults]]\nfault = "kill"\nat = 1.0\nlearner = 0\n\n[[faults]]\nfault = "corrupt"\nat = 2.0\na = 1\n'
    assert load_plan(plan_file(tmp_path, text), 2).faults == (Kill(1.0, 0), Corrupt(2.0, 1))


def test_plan_that_was_written_is_read_back_exactly(tmp_path: Path) -> None:
    for plan in (ChaosPlan(), random_plan(random.Random(3), 4, count=20)):
        assert load_plan(plan_file(tmp_path, plan.to_toml()), learners=4) == plan


def test_plan_survives_builtins_as_the_tapes_header_keeps_it() -> None:
    plan = random_plan(random.Random(3), 4, count=20)
    assert msgspec.convert(msgspec.to_builtins(plan), ChaosPlan) == plan


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('faults = [{fault = "melt", at = 1.0}]', "melt"),
        ('faults = [{fault = "kill", at = 1.0}]', "learner"),
        ('faults = [{fault = "kill", learner = 1}]', "at"),
        ('faults = [{at = 1.0, learner = 1}]', "fault"),
        ('faults = [{fault = "kill", at = "soon", learner = 1}]', "float"),
        ('faults = [{fault = "kill", at = 1.0, learner = 1, victim = 2}]', "victim"),
        ('fault = "kill"', "fault"),
        ("faults = 3", "array"),
        ("not toml at all", "plan.toml"),
    ],
)
def test_plan_file_that_makes_no_sense_is_refused_in_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_plan(plan_file(tmp_path, text), 3)
    sentence = str(caught.value)
    assert word in sentence and "\n" not in sentence
    assert "one of kill, pause, slow, partition, clog, corrupt, kill_syncer" in sentence


def test_plan_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no such file; give a TOML file or random:SEED:COUNT:SECONDS"):
        load_plan(str(tmp_path / "gone.toml"), 3)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"bad\.toml"):
        load_plan(str(tmp_path / "bad.toml"), 3)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Kill(1.0, 3), "learners are 0 to 2"),
        (Kill(1.0, SYNCER), "learners are 0 to 2"),
        (Pause(1.0, -2), "learners are 0 to 2"),
        (Partition(1.0, 0, 7), "learners are 0 to 2"),
        (Kill(-1.0, 0), "at must be 0 or more"),
        (Kill(1.0, 0, 0.0), "lasts above 0"),
        (Slow(1.0, 0, 0.5), "factor at least 1"),
        (Clog(1.0, 1, 1), "a link needs two ends, a and b are both 1"),
        (Corrupt(1.0, SYNCER, SYNCER), "a link needs two ends"),
        (Kill(float("nan"), 0), "at must be 0 or more"),
        (Kill(float("inf"), 0), "at must be 0 or more"),
        (Pause(1.0, 0, float("inf")), "lasts above 0"),
        (Slow(1.0, 0, float("nan")), "factor at least 1"),
        (Kill(1e300, 0), "and none of them above 1e+09"),
    ],
)
def test_fault_that_makes_no_sense_is_refused_by_number_in_one_sentence(fault: Fault, what: str) -> None:
    with pytest.raises(PlanError, match="fault 2") as caught:
        check_plan(ChaosPlan((Kill(1.0, 0), fault)), 3)
    assert what in str(caught.value) and "\n" not in str(caught.value)


# ---------------------------------------------------------------- generators


def test_random_plan_is_a_function_of_its_seed() -> None:
    assert load_plan("random:7:10:200", 4) == load_plan("random:7:10:200", 4)
    assert load_plan("random:7:10:200", 4) != load_plan("random:8:10:200", 4)


def test_random_plan_by_word_has_as_many_faults_as_asked() -> None:
    assert len(load_plan("random:1:25:100", 4).faults) == 25
    assert load_plan("random:1:0:100", 4) == ChaosPlan()


@pytest.mark.parametrize("text", ["random:", "random:1", "random:1:2", "random:x:2:3", "random:1:2:3:4", "random:1:-2:3",
                                  "random:1:2:0", "random:1:2:nan", "random:1:2:inf"])  # fmt: skip
def test_random_plan_by_a_malformed_word_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="random:") as caught:
        load_plan(text, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("random:1:100001:3", "COUNT must be 0 to 100,000"),
        ("random:1:-1:3", "COUNT must be 0 to 100,000"),
        ("random:1:2:1e300", "SECONDS must be above 0 and at most 1e+09"),
        ("", "--chaos '': names no plan"),
        (" ", "--chaos ' ': names no plan"),
    ],
)
def test_bound_that_was_broken_is_the_one_that_is_named(text: str, bound: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_plan(text, 4)
    assert bound in str(caught.value)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 40))
def test_random_plans_make_sense_are_sorted_and_as_long_as_asked(seed: int, learners: int, count: int) -> None:
    plan = random_plan(random.Random(seed), learners, count=count)
    check_plan(plan, learners)
    assert len(plan.faults) == count
    assert [f.at for f in plan.faults] == sorted(f.at for f in plan.faults)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(KINDS))
def test_random_plan_of_one_kind_has_that_kind_only(seed: int, kind: str) -> None:
    plan = random_plan(random.Random(seed), 3, count=8, kinds=(kind,))  # type: ignore[arg-type]
    assert {f["fault"] for f in msgspec.to_builtins(plan)["faults"]} == {kind}


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_swizzle_clogs_one_link_after_the_other_and_lets_all_go_after_the_last(seed: int, learners: int) -> None:
    plan = swizzle_clog(random.Random(seed), learners)
    check_plan(plan, learners)
    faults = [f for f in plan.faults if isinstance(f, Clog)]
    assert len(faults) == len(plan.faults) >= 1
    assert len({f.a for f in faults}) == len(faults)
    assert [f.at for f in faults] == [5.0 + i for i in range(len(faults))]
    assert sorted(round(f.at + f.lasts, 6) for f in faults) == [5.0 + len(faults) + i + 1 for i in range(len(faults))]
