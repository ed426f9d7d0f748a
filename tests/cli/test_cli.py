"""The command line as a user meets it: by exit code and by what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import atoll

from atoll.cli.shared import new_directory

SMALL = ["--set", "total_steps=12", "--set", "data.seq_len=16", "--set", "data.max_bytes=400000", "--set", "data.batch_size=2"]
KEYS = {
    "preset", "learners", "seed", "total_steps", "goodput", "uptime", "waited_seconds", "participants", "tokens", "recoveries",
    "bytes_up", "bytes_down", "loss_first", "loss_final", "theta_sha256", "tape", "run_dir",
}  # fmt: skip


def test_train_with_json_ends_with_one_object_and_its_tape_replays(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[faults]]\nfault = "kill"\nat = 4.0\nlearner = 1\nlasts = 2.0\n')
    done = atoll("train", "--virtual", "--json", "--learners", "3", "--out", "run", "--chaos", str(plan), *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) >= KEYS
    assert (summary["preset"], summary["learners"], summary["total_steps"]) == ("decoupled", 3, 12)
    tokens = summary["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"] + tokens["in_flight"] > 0
    assert sum(summary["participants"].values()) == 12
    assert summary["waited_seconds"] == 0
    assert 0 < summary["goodput"] <= 1
    assert 0 < summary["uptime"] <= 1
    assert {r["learner"] for r in summary["recoveries"]} == {1}
    assert set(summary["recoveries"][0]) == {"learner", "seconds", "source", "bytes"}
    assert (tmp_path / "run" / "theta.safetensors").stat().st_size > 100_000
    replayed = atoll("replay", "run", "--weights", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert summary["theta_sha256"] in replayed.stdout
    again = atoll("train", "--virtual", "--out", "run", *SMALL, cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("atoll: --out run: ")


def test_sim_strip_and_damaged_tape(tmp_path: Path) -> None:
    done = atoll("sim", "--preset", "diloco", "--set", "protocol.local_steps_per_round=4", "--set", "total_steps=12",
                 "--out", "run", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 12 of 12" in done.stdout
    lines = atoll("strip", "run", cwd=tmp_path).stdout.splitlines()
    assert len(lines) > 100
    assert max(map(len, lines)) <= 160
    assert sum("merge 0@12 of 4" in line for line in lines) == 1
    refused = atoll("replay", "run", "--weights", cwd=tmp_path)
    assert (refused.returncode, "only its decisions can be replayed" in refused.stderr) == (2, True)
    tape = tmp_path / "run" / "run.tape"
    data = bytearray(tape.read_bytes())
    at = [i for i, byte in enumerate(data) if byte == 10][40] + 60
    data[at] ^= 1
    tape.write_bytes(data)
    refused = atoll("replay", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "record 41" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_config_printed_for_a_preset_is_a_recipe_that_loads_as_itself(tmp_path: Path) -> None:
    printed = atoll("config", "--preset", "streaming", "--set", "seed=5", cwd=tmp_path).stdout
    (tmp_path / "again.toml").write_text(printed)
    assert atoll("config", "again.toml", cwd=tmp_path).stdout == printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--preset", "dilocco"], "no such preset"),
        (["train", "missing.toml"], "missing.toml: no such file"),
        (["train", "--set", "protocol.overlap=30"], "must be below protocol.local_steps_per_round"),
        (["train", "--chaos", "missing.toml"], "no such file"),
        (["sim", "--chaos", "random:1:x:3"], "must be random:SEED:COUNT:SECONDS"),
        (["train", "--set", "data.corpus=missing.txt"], "missing.txt"),
        (["train", "--set", "protocol.fragments=4000"], "section protocol: fragments = 4000 is more than the 47"),
        (["replay", "missing"], "run missing: no run is there"),
        (["strip", "missing"], "run missing: no run is there"),
        (["compare", "nope"], "no such preset"),
        (["train", "--learners", "0"], "learners"),
        (["train", "--virtual", "--twin"], "--virtual: goes with neither"),
        (["train", "--snapshot", "4"], "--snapshot: says which snapshot --resume starts from"),
        (["train", "--resume", "missing"], "--resume missing: no run is there"),
        (["train", "--set", "model.name=custom"], "the learners have the code of that model"),
        (["train", "--set", "model.name=no.such:thing"], "allow it here with --allow-model no.such:thing"),
        (["compare", "ddp", "decoupled", "--chaos", "random:1:1:1"], "torch's DDP survives no faults"),
        (["snapshot", "ls", "missing"], "run missing: no run is there"),
        (["snapshot", "ls", "."], "run .: no run is there"),
        (["keys", "missing", "--add"], "missing"),
        (["keys", "missing", "--revoke", "learner-0"], "DIR missing: there is no such folder"),
        (["keys", ".", "--revoke", "no/such"], "--revoke no/such: is neither"),
        (["learner", "--syncer", "nonsense"], "must be host:port"),
        (["learner", "--syncer", "127.0.0.1:1", "--token", "missing"], "missing"),
        (["syncer", "--listen", "0.0.0.0:0"], "other machines can reach it"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = atoll(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_revoked_names_are_printed_and_listed_in_the_folder_of_the_keys(tmp_path: Path) -> None:
    done = atoll("keys", ".", "--revoke", "learner-0", "--revoke", "site", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["revoked: certificate learner-0", "revoked: certificate site"])
    assert (tmp_path / "revoked").read_text().splitlines() == ["certificate learner-0", "certificate site"]


def test_help_of_every_command_names_its_options(tmp_path: Path) -> None:
    assert "train" in atoll("--help", cwd=tmp_path).stdout
    for command in ("train", "sim", "compare", "replay", "strip", "config", "syncer", "learner", "keys", "snapshot"):
        done = atoll(command, "--help", cwd=tmp_path)
        assert done.returncode == 0
        assert len(done.stdout) > 100


def test_runs_that_start_together_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [new_directory("tiny", 0).name for _ in range(3)] == ["tiny-seed0-1", "tiny-seed0-2", "tiny-seed0-3"]
