"""`atoll plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import atoll

PLANS = Path(__file__).parents[2] / "examples" / "plans"


def test_a_plan_is_printed_with_reasons_and_what_would_change_it(tmp_path: Path) -> None:
    done = atoll("plan", str(PLANS / "one_datacentre.toml"), "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ddp: all 8 chips data-parallel")
    for word in ("why", "what would change the answer", "token efficiency", "runners-up", "residuals", "assumed"):
        assert word in done.stdout


def test_json_is_one_object_and_the_recipe_is_one_that_atoll_accepts(tmp_path: Path) -> None:
    plan = str(PLANS / "two_continents.toml")
    done = atoll("plan", plan, "--json", "--no-what-if", "--out", "recipe.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {
        "learners", "interval", "fragments", "overlap", "quorum", "codec_up", "codec_down", "score", "utilisation", "goodput",
        "token_efficiency", "staleness_steps", "staleness_seconds", "traffic", "memory", "syncer", "choices", "changes",
        "runners_up", "quality",
    } <= set(answer)  # fmt: skip
    shown = atoll("config", "recipe.toml", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f'preset = "{answer["preset"]}"' in shown.stdout
    assert f"local_steps_per_round = {answer['interval']}" in shown.stdout
    assert f"overlap = {answer['overlap']}" in shown.stdout


def test_a_recipe_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    done = atoll("plan", str(PLANS / "spot.toml"), "--out", "nowhere/recipe.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "atoll: --out nowhere/recipe.toml: nowhere is not a folder\n")
    done = atoll("plan", str(PLANS / "spot.toml"), "--out", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "atoll: --out .: is a folder; name a file\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_answer_is_told_though_its_recipe_cannot_be_written(tmp_path: Path, as_json: bool) -> None:
    words = ["plan", str(PLANS / "one_datacentre.toml"), "--no-what-if", "--out", "/dev/full"]
    done = atoll(*words, *(["--json"] if as_json else []), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "atoll: --out /dev/full: cannot be written (No space left on device)\n")
    assert json.loads(done.stdout)["preset"] if as_json else "token efficiency" in done.stdout
    assert "recipe:" not in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("gbit = 0.5", "gbit = 0", "links[0].gbit = 0"),
        ('["europe", "america"]', '["europe", "africa"]', "'africa': no such site"),
        ("inside_gbit", "inside_gbits", "did you mean sites[0].inside_gbit?"),
        ("layers = 48", "layers = 48\n[fixed]\noverlap = 30\ninterval = 24", "fixed.overlap = 30"),
    ],
)  # fmt: skip
def test_nonsense_ends_with_one_sentence_and_exit_code_2(old: str, new: str, says: str, tmp_path: Path) -> None:
    text = (PLANS / "two_continents.toml").read_text(encoding="utf8")
    assert old in text
    (tmp_path / "bad.toml").write_text(text.replace(old, new), encoding="utf8")
    done = atoll("plan", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("atoll: ")
