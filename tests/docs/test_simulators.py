"""The numbers of docs/planning/simulators.md are those that its commands print, and every command on it runs."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, tables_of
from tiers import mostly_soak
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.sim.estimates import measured
from atoll.sim.estimates.published import BANDWIDTH, GOODPUT, TARGETS, UPTIME, grid_points_apart

TEXT = (DOCS / "planning" / "simulators.md").read_text(encoding="utf8")
TABLES = tables_of(TEXT)
SHARES = [f"{target} %" for target in TARGETS]


def table(*columns: str) -> list[dict[str, str]]:
    """The one table with these columns, and no others."""
    (found,) = [rows for rows in TABLES if tuple(rows[0]) == columns]
    return found


@cache
def printed(words: str) -> Any:
    done = CliRunner().invoke(app, ["simulate", *words.split(), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def said(words: str) -> bool:
    """Whether the page says so, wherever its lines break."""
    return " ".join(words.split()) in " ".join(TEXT.split())


def bandwidths() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The published table, and that of the methods without one."""
    published, decoupled = [rows for rows in TABLES if tuple(rows[0]) == ("model", "method", *SHARES)]
    return published, decoupled


# ---------------------------------------------------------------- bandwidth


def test_the_bandwidth_table_is_what_the_command_prints() -> None:
    found = {(c["model"], c["method"], c["utilisation"]): c["gbit_per_s"] for c in printed("bandwidth")}
    differing, shown = [], bandwidths()[0]
    assert len(shown) == len(BANDWIDTH)
    for row in shown:
        model, method = row["model"], row["method"]
        for target, share, cell in zip(TARGETS, SHARES, BANDWIDTH[model, method], strict=True):
            ours = found[model, method, target]
            assert row[share] == (f"{ours:.1f}" if ours == cell else f"{ours:.1f} ({cell:.1f})"), (model, method, target)
            if ours != cell:
                differing.append([model, method, share, f"{cell:.1f}", f"{ours:.1f}"])
    assert differing == [list(row.values()) for row in table("model", "method", "utilisation", "published", "ours")]
    assert said(f"{75 - len(differing)} of 75 cells are exact; the other four are one grid point off") and len(differing) == 4


def test_the_plain_calibration_meets_as_many_cells_as_the_page_says() -> None:
    apart = [
        grid_points_apart(cell["gbit_per_s"], BANDWIDTH[cell["model"], cell["method"]][TARGETS.index(cell["utilisation"])])
        for cell in printed("bandwidth --calibration plain")
    ]
    near = sum(d <= 1 for d in apart)
    assert said(f"`plain` meets {apart.count(0)}, {near} within one grid point and all within two") and max(apart) == 2


@pytest.mark.parametrize("model", ["1B", "10B", "100B"])
@pytest.mark.parametrize(
    "method", mostly_soak(["async_diloco", "decoupled", "decoupled_ramp"], keep=["async_diloco"])
)  # fmt: skip
def test_the_decoupled_table_is_what_the_command_prints(method: str, model: str) -> None:
    (row,) = [row for row in bandwidths()[1] if (row["model"], row["method"]) == (model, method)]
    found = [f"{cell['gbit_per_s']:.3g}" for cell in printed(f"bandwidth {model} --method {method}")]
    assert [row[share] for share in SHARES] == found


@pytest.mark.soak
def test_a_smaller_codec_on_the_way_down_gives_what_the_page_says() -> None:
    def needed(model: str, *words: str) -> str:
        (cell,) = printed(" ".join(["bandwidth", model, "--method decoupled --targets 99", *words]))
        return f"{cell['gbit_per_s']:.3g}"

    assert said(f"the 100B model needs {needed('100B', '--codec-down int4')} instead of {needed('100B')} Gbit/s for 99 %")
    assert said(f"The 1B model still needs {needed('1B', '--codec-down int4')},")


# ---------------------------------------------------------------- goodput, uneven learners, scavenging


@pytest.mark.soak
def test_the_goodput_tables_are_what_the_command_prints() -> None:
    cells, apart = printed("goodput"), []
    goodput, uptime = [rows for rows in TABLES if list(rows[0])[:2] == ["learners", "150,000"]]
    for name, shown, published in (("goodput", goodput, GOODPUT), ("uptime", uptime, UPTIME)):
        assert len(shown) * 5 == len(cells) == 30
        for cell in cells:
            m, elastic, chips = cell["learners"], cell["elastic"], cell["chips"]
            (row,) = [r for r in shown if r["learners"] == (f"{m}" if m > 1 else "1, elastic" if elastic else "1, not elastic")]
            assert row[f"{chips:,}"] == f"{cell[name]:.1f} ({published[m, elastic][chips]})", (name, cell)
            apart.append(abs(cell[name] - published[m, elastic][chips]))
    near = sum(d <= 3 for d in apart)
    assert said(f"{near} of 60 cells lie within 3 points of the published ones, the last is {max(apart):.1f} apart")


def test_the_table_of_uneven_learners_is_what_the_command_prints() -> None:
    shown = table("rule", "learners merged", "fast learners", "slow learners", "step times a round")
    for row, a in zip(shown, printed("uneven"), strict=True):
        figures = [f"{a['merged']:.2f}", f"{a['fast']:.1%}", f"{a['slow']:.1%}", f"{a['seconds_a_round']:.2f}"]
        assert list(row.values()) == [a["rule"], *figures]
    assert said(f"rounds merge {shown[-1]['learners merged']} of 8 learners")


@pytest.mark.parametrize("share", mostly_soak(["0.25", "0.5", "1", "3"], keep=[]))
def test_the_scavenge_table_is_what_the_command_prints(share: str) -> None:
    (row,) = [row for row in table("f", "ideal", "decoupled", "elastic data-parallel") if row["f"] == share]
    (a,) = printed(f"scavenge --extra {share}")
    assert list(row.values()) == [share, *(f"{a[key]:.4f}" for key in ("ideal", "decoupled", "data_parallel"))]
    assert abs(a["decoupled"] - a["ideal"]) < 0.001
    assert 0.0035 < a["data_parallel"] - a["ideal"] < 0.0095


@pytest.mark.soak
def test_data_parallel_does_without_scavenged_chips_on_a_slow_link() -> None:
    (a,) = printed("scavenge --extra 1 --gbit 1 --day 0.5 --cycles 1")
    assert a["data_parallel"] == 1.0


# ---------------------------------------------------------------- every command

BLOCKS = re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    " ".join(shlex.split(line, comments=True))
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("atoll simulate")
]
QUICK = [command for command in COMMANDS if command.split()[2] in ("bandwidth", "tape")]


@pytest.mark.parametrize("command", mostly_soak(COMMANDS, keep=QUICK))
def test_every_command_on_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = DOCS.parent
    words = [str(root / word) if word.startswith("recipes/") else word for word in command.split()[1:]]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--out" or (word in ("--csv", "--figure", "--pattern") and "." in after):
            assert Path(after).exists(), after


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 12 and len({command.split()[2] for command in COMMANDS}) >= 3


# ---------------------------------------------------------------- measured costs


def test_the_table_of_measured_costs_is_that_of_the_code() -> None:
    units = {"BYTE_SECONDS": 1e9, "CONTRIBUTION_SECONDS": 1e9, "ROUND_SECONDS": 1e9, "MESSAGES_SECONDS": 1e3}
    rows = table("constant", "value", "rests on")
    commits = {row.commit for row in (*measured.ROUNDS, *measured.RANKS, measured.PAYLOADS, measured.LOAD)}
    for row in rows:
        name = row["constant"].strip("`")
        assert float(row["value"].split()[0]) == pytest.approx(units.get(name, 1.0) * getattr(measured, name), abs=0.005), name
    assert {row["constant"].strip("`") for row in rows} == {
        name for name in vars(measured) if name.endswith("_SECONDS") or name.startswith("SHARDED_") or name == "RANK_STEP"
    }
    assert commits == {commit for row in rows for commit in re.findall(r"\b[0-9a-f]{7}\b", row["rests on"])}
    one, eight = (
        measured.round_cost(measured.FRAGMENT, m, measured.UP_BITS, measured.DOWN_BITS).total for m in (1, 8)
    )  # fmt: skip
    assert said(f"It says {one:.2f} s and {eight:.2f} s of a core")
    first, second = (row.joined_seconds / row.alone_seconds for row in measured.RANKS)
    assert said(f"{first:.2f} and {second:.2f} on two cores")
