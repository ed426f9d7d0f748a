"""A codec and a merge from a researcher's own file, through everything that reads the tables; nothing in src is touched."""

from __future__ import annotations

import json
from pathlib import Path

from command import atoll
from plugged import SIGN_PLUGIN, SIGN_RECIPE, plugged, ran


def test_virtual_run_simulators_and_planner_read_the_same_row(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(SIGN_RECIPE)
    plans = Path(__file__).parents[2] / "examples" / "plans" / "one_datacentre.toml"
    (tmp_path / "site.toml").write_text(plans.read_text() + '\n[fixed]\npreset = "decoupled"\ncodec_up = "sign64"\n')
    bandwidth = ("bandwidth", "10B", "--method", "diloco", "--codec", "sign64", "--calibration", "plain")
    with plugged(SIGN_PLUGIN) as allow:
        virtual = ran("train", "own.toml", "--virtual", *allow, "--json", "--out", "virtual", cwd=tmp_path)
        replayed = ran("replay", "virtual", "--weights", *allow, cwd=tmp_path)
        ours = ran("sim", "own.toml", *allow, "--json", "--out", "sim", cwd=tmp_path)
        wider = ran("sim", "own.toml", "--set", "protocol.codec_up=fp32", *allow, "--json", "--out", "wide", cwd=tmp_path)
        table = ran("simulate", *bandwidth, *allow, "--json", cwd=tmp_path)
        planned = ran("plan", "site.toml", *allow, "--json", cwd=tmp_path)
    assert json.loads(virtual)["theta_sha256"] in replayed
    assert json.loads(ours)["bytes_up"] < json.loads(wider)["bytes_up"] / 10, "1.5 bits a parameter against 32"
    assert json.loads(table)
    assert json.loads(planned)["codec_up"] == "sign64"


def test_process_without_the_plugin_is_refused_with_the_known_names_and_the_option(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(SIGN_RECIPE)
    refused = atoll("config", "own.toml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "sign64" in refused.stderr and "int4" in refused.stderr and "--allow-plugin" in refused.stderr
