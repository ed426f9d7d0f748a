"""A codec and a merge from a researcher's own file, through everything that reads the tables; nothing in src is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "helpers" / "sign_plugin.py"
RECIPE = """
preset = "decoupled"
learners = 2
total_steps = 23
[protocol]
local_steps_per_round = 4
fragments = 4
quorum = 2
codec_up = "sign64"
merge = "median"
snapshot_interval = 12
[limits]
silence_steps = 1000.0
[data]
seq_len = 16
batch_size = 4
heldout_batches = 2
max_bytes = 200000
[model.numbers]
width = 16
layers = 2
heads = 2
"""
SLOW = "\n".join(f'[[faults]]\nfault = "slow"\nat = 0.0\nlearner = {m}\nfactor = 8.0\nlasts = 1000.0' for m in (0, 1))
"""One snapshot, which must be written before the run is over: so its eleven last steps are slow, and none is without both."""
ALLOW = ("--allow-plugin", str(PLUGIN))


SEVERAL = """
import json, sys
from pathlib import Path
from command import atoll
done = [atoll(*words, cwd=Path.cwd()) for words in json.loads(sys.argv[1])]
print(json.dumps([(each.returncode, each.stdout, each.stderr) for each in done]))
"""


def atoll(*commands: tuple[object, ...], cwd: Path, code: int = 0) -> list[str]:
    """One process for all of them, for its imports, and not the test's own, whose tables the plugin would stay in."""
    words = json.dumps([list(map(str, command)) for command in commands])
    path = os.pathsep.join([str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, words], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = []
    for returncode, stdout, stderr in json.loads(done.stdout):
        assert returncode == code, stderr
        said.append(stdout if code == 0 else stderr)
    return said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "own.toml").write_text(RECIPE)
    (folder / "slow.toml").write_text(SLOW)
    return folder


@pytest.mark.live
def test_processes_train_with_a_registered_codec_replay_bit_for_bit_and_go_on(home: Path) -> None:
    trained, replayed, resumed, _ = atoll(
        ("train", "own.toml", *ALLOW, "--chaos", "slow.toml", "--json", "--out", "live"),
        ("replay", "live", "--weights", *ALLOW),
        ("train", "--resume", "live", *ALLOW, "--set", "total_steps=32", "--json", "--out", "resumed"),
        ("export", "live", "--hf", "exported", *ALLOW),
        cwd=home,
    )
    summary = json.loads(trained)
    assert summary["loss_final"] < summary["loss_first"]
    assert summary["theta_sha256"] in replayed
    assert json.loads(resumed)["loss_final"] is not None
    assert (home / "exported" / "model.safetensors").is_file()


def test_virtual_run_simulators_and_planner_read_the_same_row(home: Path) -> None:
    plans = Path(__file__).parents[2] / "examples" / "plans" / "one_datacentre.toml"
    (home / "site.toml").write_text(plans.read_text() + '\n[fixed]\npreset = "decoupled"\ncodec_up = "sign64"\n')
    virtual, replayed, ours, wider, table, planned = atoll(
        ("train", "own.toml", "--virtual", *ALLOW, "--json", "--out", "virtual"),
        ("replay", "virtual", "--weights", *ALLOW),
        ("sim", "own.toml", *ALLOW, "--json", "--out", "sim"),
        ("sim", "own.toml", "--set", "protocol.codec_up=fp32", *ALLOW, "--json", "--out", "wide"),
        ("simulate", "bandwidth", "10B", "--method", "diloco", "--codec", "sign64", "--calibration", "plain", *ALLOW, "--json"),
        ("plan", "site.toml", *ALLOW, "--json"),
        cwd=home,
    )
    assert json.loads(virtual)["theta_sha256"] in replayed
    assert json.loads(ours)["bytes_up"] < json.loads(wider)["bytes_up"] / 10, "1.5 bits a parameter against 32"
    assert json.loads(table)
    assert json.loads(planned)["codec_up"] == "sign64"


def test_process_without_the_plugin_is_refused_with_the_known_names_and_the_option(home: Path) -> None:
    (refusal,) = atoll(("config", "own.toml"), cwd=home, code=2)
    assert "sign64" in refusal and "int4" in refusal and "--allow-plugin" in refusal
