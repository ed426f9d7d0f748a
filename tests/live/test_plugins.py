"""A codec and a merge from a researcher's own file in the processes of a live run; nothing in src is touched. What needs no
processes is in tests/cli/test_cli_plugins.py."""

from __future__ import annotations

import json
from pathlib import Path

from harness import forks_of
from plugged import SIGN_PLUGIN, SIGN_RECIPE, plugged, ran

SLOW = "\n".join(f'[[faults]]\nfault = "slow"\nat = 0.0\nlearner = {m}\nfactor = 8.0\nlasts = 1000.0' for m in (0, 1))
"""One snapshot, which must be written before the run is over: so its eleven last steps are slow, and none is without both."""


def test_processes_train_with_a_registered_codec_replay_bit_for_bit_and_go_on(tmp_path: Path) -> None:
    """The processes of both runs are forked from a server that knows no plugin: each loads it by its own command line."""
    (tmp_path / "own.toml").write_text(SIGN_RECIPE)
    (tmp_path / "slow.toml").write_text(SLOW)
    with plugged(SIGN_PLUGIN) as allow, forks_of():
        trained = ran("train", "own.toml", *allow, "--chaos", "slow.toml", "--json", "--out", "live", cwd=tmp_path)
        replayed = ran("replay", "live", "--weights", *allow, cwd=tmp_path)
        longer = ("--set", "total_steps=32", "--json", "--out", "resumed")
        resumed = ran("train", "--resume", "live", *allow, *longer, cwd=tmp_path)
        ran("export", "live", "--hf", "exported", *allow, cwd=tmp_path)
    summary = json.loads(trained)
    assert summary["loss_final"] < summary["loss_first"]
    assert summary["theta_sha256"] in replayed
    assert json.loads(resumed)["loss_final"] is not None
    assert (tmp_path / "exported" / "model.safetensors").is_file()
