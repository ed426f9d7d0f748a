"""The table of measured costs is what the lines under bench/results/ say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.config.codecs import wire_bits
from atoll.sim.estimates import measured

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def lines(name: str, commit: str) -> list[dict[str, Any]]:
    found = map(json.loads, (RESULTS / f"{name}.jsonl").read_text(encoding="utf8").splitlines())
    return [line for line in found if line["commit"] == commit]


@pytest.mark.parametrize("row", measured.ROUNDS, ids=[f"{r.commit} {r.learners} {r.shards}" for r in measured.ROUNDS])
def test_a_round_is_a_line_of_its_bench(row: measured.MeasuredRound) -> None:
    wanted = (row.shards, row.threads, measured.FRAGMENT, row.cores, "x86_64")
    found = [
        line for line in lines("syncer_round", row.commit)
        if (line.get("shards", 1), line.get("threads", 0), line["numel"], line["cores"], line["machine"]) == wanted
        and str(row.learners) in line
    ]  # fmt: skip
    assert found
    for line in found:
        told = line[str(row.learners)]
        assert (told["cpu_ms"], told["commit_ms"]) == pytest.approx((1e3 * row.cpu_seconds, 1e3 * row.commit_seconds))
        assert told.get("shards_cpu_ms") == (None if row.shards_seconds is None else pytest.approx(1e3 * row.shards_seconds))
        assert told["verified"] and told["participants"] == row.learners


def test_payloads_load_and_ranks_are_lines_of_their_benches() -> None:
    (line,) = lines("wire", measured.PAYLOADS.commit)
    assert line["contributions_8"]["atoll_cpu_ms"] == pytest.approx(1e3 * measured.PAYLOADS.up_seconds)
    assert line["announcements_8"]["atoll_cpu_ms"] == pytest.approx(1e3 * measured.PAYLOADS.down_seconds)
    (line,) = lines("syncer_load", measured.LOAD.commit)
    assert (line["learners"], line["step"]) == (measured.LOAD.learners, measured.LOAD.step_seconds)
    assert line["burden"]["syncer_cores"] == measured.LOAD.cores and line["rounds"]["late"] == 0
    of_ranks = lines("ranks", measured.RANKS[0].commit)
    for row, line in zip(measured.RANKS, of_ranks, strict=True):
        assert row.commit == measured.RANKS[0].commit and line["machine"] == "x86_64"
        assert (line["ranks"], line["cores"], line["parameters"]) == (row.ranks, row.cores, row.parameters)
        found = (line["milliseconds"]["alone"], line["milliseconds"]["joined"])
        assert found == pytest.approx((1e3 * row.alone_seconds, 1e3 * row.joined_seconds))
        assert tuple(line["shares"]) == row.shares
        assert line["sent_bytes"] == [round(share * sum(line["sent_bytes"])) for share in row.shares], "counted bytes"


def test_bits_are_those_of_the_codecs_that_the_bench_uses() -> None:
    assert (wire_bits("int4"), wire_bits("int8")) == (measured.UP_BITS, measured.DOWN_BITS)


def test_what_learners_exchange_is_paid_by_the_shards() -> None:
    """The coordinator of the measured round took a twentieth: messages, tape and what is the same for every learner."""
    (row,) = (row for row in measured.ROUNDS if row.shards_seconds is not None)
    cost = measured.round_cost(measured.FRAGMENT, row.learners, measured.UP_BITS, measured.DOWN_BITS)
    assert row.shards_seconds == pytest.approx(cost.shards, rel=0.13)
    assert cost.coordinator < row.cpu_seconds - row.shards_seconds < 0.06 * row.cpu_seconds


def test_the_constants_give_the_rounds_back() -> None:
    """They are fitted to the first two rounds; the others are of a later commit, and of shards."""
    for row in measured.ROUNDS:
        cost = measured.round_cost(measured.FRAGMENT, row.learners, measured.UP_BITS, measured.DOWN_BITS)
        assert cost.total == pytest.approx(row.cpu_seconds, rel=0.13)
        assert min(cost.coordinator, cost.shards, measured.CONTRIBUTION_SECONDS, measured.ROUND_SECONDS) > 0
