"""bench/quality: a tiny study on CPU, what becomes of runs that fail or take too long, and the tables' arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from tiers import mostly_soak

from atoll.config import load
from atoll.views.run import Summary

WORDS = "the quick brown fox jumps over the lazy dog and goes home again before the sun is down"


@pytest.fixture
def study(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/study")


@pytest.fixture
def train(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/train")


@pytest.fixture
def tables(bench_script: Callable[[str], ModuleType]) -> Any:
    return bench_script("quality/tables")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


# ---------------------------------------------------------------- studies


def line_of(study: Any, train: Any, name: str, words: list[str], out: Path) -> dict[str, Any]:
    """What the study's process of this run would leave, from this one: a start costs more than the run."""
    (run,) = (run for run in study.GROUPS["main"]() if run.name == name)
    line: dict[str, Any] = train.train(train.options().parse_args([*run.arguments, *words, "--name", name, "--out", str(out)]))
    return json.loads(json.dumps(line))


@pytest.mark.parametrize("scavenged", mostly_soak([False, True], keep=[False]))
def test_study_leaves_the_keys_of_train_json_at_equal_tokens(
    study: Any, train: Any, tables: Any, tmp_path: Path, scavenged: bool
) -> None:
    text = [json.dumps({"text": f"{n} {WORDS} {n * n}"}) for n in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(text), encoding="utf8")
    out = tmp_path / "found.jsonl"
    scale = ["--size", "width=16,layers=2,heads=2,mlp=16,tied=1", "--tokens", "3072", "--step-tokens", "128"]
    text_words = ["--corpus", "te*.jsonl", "--heldout", "", "--tokenizer", "bytes", "--seq-len", "16", "--heldout-batches", "2"]
    machine = ["--device", "cpu", "--threads", "1", "--set", "protocol.fragments=4", "--set", "data.cache=off"]
    machine += ["--set", "data.heldout_every=10"]
    names = ["decoupled_m2", *(["decoupled_m8_scavenged"] if scavenged else [])]
    words = ["main", "--only", ",".join(names), "--data", str(tmp_path), "--out", str(out), "--jobs", "2", *scale]
    assert study.main([*words, "--", *text_words, *machine]) == 0
    assert {line["name"] for line in lines_of(out)} == set(names)
    here = line_of(study, train, "data_parallel_failures", ["--data", str(tmp_path), *scale, *text_words, *machine], out)
    lines = {line["name"]: line for line in [*lines_of(out), here]}
    for line in lines.values():
        assert line.keys() >= set(Summary.__struct_fields__)
        assert line["loss_final"] < line["loss_first"] and line["loss_replica"] < line["loss_first"]
        assert line["trained_tokens"] == pytest.approx(3072, abs=128)
        assert sum(line["fragment_sizes"]) == line["parameters"]
        assert str(tmp_path) not in json.dumps(line), "where the files lay is left out"
        assert line["corpus_files"] == ["text.jsonl"] and line["data_fingerprint"] == lines["decoupled_m2"]["data_fingerprint"]
        assert line["heldout"] and all(10 <= point["outer_step"] < line["total_steps"] for point in line["heldout"])
    assert lines["decoupled_m2"]["method"] == "decoupled" and lines["decoupled_m2"]["inner_steps"] == 2 * 24
    assert lines["data_parallel_failures"]["smallest_inner_step"] < 128, "slices fail and take their part of the batch along"
    assert study.main([*words, "--skip-done", "--list"]) == 0
    assert tables.table(tables.rows([out], 0.1)).count("\n") == 1 + len(names)


FAKE = """
import json, signal, sys
name, seed, out = (sys.argv[sys.argv.index(key) + 1] for key in ("--name", "--seed", "--out"))
if name == "decoupled_m4":
    sys.exit("this one cannot")
if name == "decoupled_m8":
    print(f"{name}: begun", flush=True)
    signal.pause()
open(out, "a").write(json.dumps({"name": name, "seed": int(seed)}) + chr(10))
"""


@pytest.fixture
def fake(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In train.py's place: one run that fails, one that never ends, the others are done at once."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf8")
    monkeypatch.setattr(study, "TRAIN", script)
    return tmp_path / "found.jsonl"


def test_run_that_fails_is_told_and_does_not_stop_the_others(study: Any, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["main", "--out", str(fake), "--only", "decoupled_m4,data_parallel,decoupled_m2", "--seeds", "0,1", "--jobs", "2"]
    assert study.main(words) == 1
    told = capsys.readouterr().out
    assert "4 of 6 runs are done" in told and told.count("failed: decoupled_m4") == 2 and "this one cannot" in told
    found = {(line["name"], line["seed"]) for line in lines_of(fake)}
    assert found == {(name, seed) for name in ("data_parallel", "decoupled_m2") for seed in (0, 1)}
    assert study.main([*words, "--skip-done"]) == 1
    assert len(lines_of(fake)) == 4, "only what failed was tried again"
    study.main([*words, "--skip-done", "--tokens", "1000"])
    assert len(lines_of(fake)) == 8, "under other settings nothing was done yet"
    study.main([*words, "--skip-done", "--", "--corpus", "stdlib", "--device", "cpu"])
    assert len(lines_of(fake)) == 12, "nor on other text"
    study.main([*words, "--skip-done", "--", "--corpus", "stdlib", "--device", "cuda"])
    assert len(lines_of(fake)) == 12, "but where it runs makes no other run of it"


def test_time_limit_ends_what_runs_and_starts_no_more(study: Any, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["main", "--out", str(fake), "--only", "decoupled_m8,decoupled_m8_failures", "--time-limit", "1"]
    assert study.main(words) == 1
    told = capsys.readouterr().out
    assert "decoupled_m8.s0: ended, the time is up" in told
    assert "decoupled_m8_failures.s0: not started" in told


@pytest.mark.parametrize("group", ["main", "rates", "outer", "sweep", "ablations", "merges"])
def test_every_run_has_a_name_of_its_own_and_settings_that_atoll_takes(study: Any, train: Any, group: str) -> None:
    runs = study.GROUPS[group]()
    assert len({run.name for run in runs}) == len(runs)
    seen = set()
    for run in runs:
        chosen = train.options().parse_args([*run.arguments, "--name", run.name, "--out", "x"])
        config = train.settings(chosen, 100)
        seen.add((msgspec.json.encode(config), chosen.chips, chosen.scavenge))
    assert len(seen) == len(runs), "no two of them are the same run"


def test_with_failures_a_run_goes_on_until_its_tokens_are_spent(train: Any) -> None:
    words = ["--name", "x", "--out", "x", "--learners", "4", "--tokens", "128000", "--step-tokens", "640", "--seq-len", "16"]
    chosen = train.options().parse_args([*words, "--chips", "1200000"])
    config = train.at_equal_tokens(chosen)
    assert config.total_steps > 200
    cluster = train.cluster_for(chosen, config, None, ())
    train.run(cluster)
    assert train.trained_tokens(cluster) == pytest.approx(128_000, rel=0.005)


# ---------------------------------------------------------------- tables


def line(name: str, seed: int, loss: float, preset: str = "decoupled", **more: Any) -> dict[str, Any]:
    overrides = {"learners": 2, "total_steps": 100, "model": {"numbers": {"layers": 4}}, "cluster": {"step_seconds": 5.0}}
    config = msgspec.to_builtins(load(preset_name="fedavg" if preset == "data_parallel" else preset, overrides=overrides))
    return {
        "name": name, "seed": seed, "method": preset, "loss_final": loss, "loss_replica": loss + 1, "parameters": 24_000_000,
        "fragment_sizes": [1_000_000] * 24, "bytes_up": 0, "bytes_down": 0, "inner_steps": 200, "steps": 100, "chips": 0,
        "total_steps": 100, "seconds": 500.0, "trained_tokens": 2_000_000, "recoveries": [], "config": config,
    } | more  # fmt: skip


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf8")
    return path


def test_line_of_another_script_is_refused_with_what_it_lacks(tables: Any, tmp_path: Path) -> None:
    path = tmp_path / "older.jsonl"
    path.write_text(json.dumps({"name": "dp", "seed": 0, "loss_final": 3.0, "config": {}, "parameters": 1}) + "\n")
    with pytest.raises(SystemExit, match=r"older.jsonl: a line of 'dp' has no inner_steps, loss_replica"):
        tables.rows([path], 0.1)


def test_rows_hold_mean_deviation_and_excess_over_seeds_and_the_newest_line_counts(tables: Any, tmp_path: Path) -> None:
    """Data-parallel's loss is that of its one learner's weights: Theta has not got its last steps."""
    lines = [line("data_parallel", seed, loss - 1, "data_parallel") for seed, loss in enumerate((3.9, 4.1))]
    lines += [line("m2", seed, loss) for seed, loss in ((0, 9.0), (1, 4.2), (2, 4.6), (0, 4.4))]
    reference, row = tables.rows([write(tmp_path / "a.jsonl", lines)], 0.1)
    assert reference.loss == pytest.approx(4.0) and reference.excess == pytest.approx(0.0)
    assert row.loss == pytest.approx(4.4) and len(row.losses) == 3
    assert tables.deviation(row.losses) == pytest.approx(0.2)
    assert row.excess == pytest.approx(0.1) and row.excess_deviation == pytest.approx(0.05)
    told = tables.table([reference, row]).splitlines()
    assert told[3].startswith("| m2 | 4.4000 ± 0.2000 | +10.00 ± 5.00 | 3 | 5.4000 | 2.0 M |")


def test_bytes_are_a_share_of_bf16_both_ways_in_every_step(tables: Any) -> None:
    assert tables.bytes_share(line("dp", 0, 4.0, "data_parallel", bytes_up=123)) == 1.0
    each = 24_000_000 * 4 * 200  # what data-parallel would have moved in as many inner steps
    assert tables.bytes_share(line("m2", 0, 4.0, bytes_up=each // 100, bytes_down=each // 50)) == pytest.approx(0.03)
    joined = line("m2", 0, 4.0, bytes_up=each // 100, bytes_between_learners=each // 200)
    assert tables.bytes_share(joined) == pytest.approx(0.02), "what one learner sends, another gets"


def test_line_with_recoveries_whose_bytes_were_not_told_is_refused(tables: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [line("m2", 0, 4.0, recoveries=[{"learner": 1}])])
    with pytest.raises(SystemExit, match="has recoveries but no bytes_between_learners"):
        tables.rows([path], 0.1)


def test_peak_spreads_an_exchange_over_its_overlap(tables: Any) -> None:
    """24 fragments of 1M, one a step over tau = 2 steps: bf16 down is the busier way, 2 MB a step."""
    assert tables.peak_gbit(line("m2", 0, 4.0), 0.1) == pytest.approx(2e6 * 8 / 0.1 / 1e9)
    assert tables.peak_gbit(line("dp", 0, 4.0, "data_parallel"), 0.1) == pytest.approx(24e6 * 16 / 0.1 / 1e9)
    whole = {"fragment_sizes": [24_000_000]}
    assert tables.peak_gbit(line("d", 0, 4.0, "fedavg", **whole), 0.1) == pytest.approx(24e6 * 32 / 0.1 / 1e9)
    spinning = line("bad", 0, 4.0, seconds=500.0 / 8)
    assert tables.peak_gbit(spinning, 0.1) == pytest.approx(8 * 2e6 * 8 / 0.1 / 1e9), "eight rounds in the time of a step"


def test_hours_are_the_simulators(tables: Any) -> None:
    """24M parameters by bf16 are 0.384 Gbit: 0.384 s on 1 Gbit/s against a step of 0.1 s, which the graph overlaps in part."""
    alone = 100 * 0.1 / 3600
    assert 3.84 * alone < tables.hours(line("dp", 0, 4.0, "data_parallel"), 0.1) < 4.84 * alone
    assert tables.hours(line("m2", 0, 4.0), 0.1) == pytest.approx(alone, rel=0.01)
    assert tables.hours(line("dp", 0, 4.0, "data_parallel"), 0.1, gbit=1e6) == pytest.approx(alone, rel=1e-3)
    assert alone < tables.hours(line("s", 0, 4.0, "streaming"), 0.1) < tables.hours(line("d", 0, 4.0, "fedavg"), 0.1)


def test_figure_is_drawn(tables: Any, tmp_path: Path) -> None:
    lines = [line("data_parallel", 0, 4.0, "data_parallel"), *(line("m2", n, 4.2 + n, bytes_up=10**9) for n in range(2))]
    found = tables.rows([write(tmp_path / "a.jsonl", lines)], 0.1)
    assert {text.get_text() for text in tables.draw(found).axes[0].texts} == {"data_parallel", "m2"}
    tables.save(tmp_path / "out.svg", lambda: tables.draw(found))
    assert "<svg" in (tmp_path / "out.svg").read_text(encoding="utf8")
