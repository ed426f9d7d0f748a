"""A codec and a merge from a researcher's own file, through everything that reads the tables; nothing in src is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).parents[1] / "helpers" / "sign_plugin.py"
RECIPE = """
preset = "decoupled"
learners = 2
total_steps = 24
[protocol]
local_steps_per_round = 4
fragments = 4
codec_up = "sign64"
merge = "median"
snapshot_interval = 8
[data]
seq_len = 16
batch_size = 4
heldout_batches = 2
[model.numbers]
width = 16
layers = 2
heads = 2
"""
ALLOW = ("--allow-plugin", str(PLUGIN))


def atoll(*words: object, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "atoll", *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "own.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def live_run(home: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(atoll("train", "own.toml", *ALLOW, "--json", "--out", "live", cwd=home))
    return summary


@pytest.mark.live
def test_processes_train_with_a_registered_codec_and_merge_and_replay_bit_for_bit(home: Path, live_run: dict[str, Any]) -> None:
    assert live_run["loss_final"] < live_run["loss_first"]
    assert live_run["theta_sha256"] in atoll("replay", "live", "--weights", *ALLOW, cwd=home)


@pytest.mark.live
def test_run_with_a_registered_codec_is_resumed_and_exported(home: Path, live_run: dict[str, Any]) -> None:
    more = ("--set", "total_steps=32", "--json", "--out", "resumed")
    resumed = json.loads(atoll("train", "--resume", "live", *ALLOW, *more, cwd=home))
    assert resumed["loss_final"] is not None
    atoll("export", "live", "--hf", "exported", *ALLOW, cwd=home)
    assert (home / "exported" / "model.safetensors").is_file()


def test_virtual_run_simulators_and_planner_read_the_same_row(home: Path) -> None:
    virtual = json.loads(atoll("train", "own.toml", "--virtual", *ALLOW, "--json", "--out", "virtual", cwd=home))
    assert virtual["theta_sha256"] in atoll("replay", "virtual", "--weights", *ALLOW, cwd=home)
    ours = json.loads(atoll("sim", "own.toml", *ALLOW, "--json", "--out", "sim", cwd=home))
    wider = json.loads(atoll("sim", "own.toml", "--set", "protocol.codec_up=fp32", *ALLOW, "--json", "--out", "wide", cwd=home))
    assert ours["bytes_up"] < wider["bytes_up"] / 10, "1.5 bits a parameter against 32"
    table = ("simulate", "bandwidth", "10B", "--method", "diloco", "--codec", "sign64", "--calibration", "plain")
    assert json.loads(atoll(*table, *ALLOW, "--json", cwd=home))
    plans = Path(__file__).parents[2] / "examples" / "plans" / "one_datacentre.toml"
    (home / "site.toml").write_text(plans.read_text() + '\n[fixed]\npreset = "decoupled"\ncodec_up = "sign64"\n')
    assert json.loads(atoll("plan", "site.toml", *ALLOW, "--json", cwd=home))["codec_up"] == "sign64"


def test_process_without_the_plugin_is_refused_with_the_known_names_and_the_option(home: Path) -> None:
    refusal = atoll("config", "own.toml", cwd=home, code=2)
    assert "sign64" in refusal and "int4" in refusal and "--allow-plugin" in refusal
