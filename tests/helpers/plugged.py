"""A plugin in this process's tables for a while: what it registers is gone afterwards, as from a process without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from command import atoll

from atoll import extend
from atoll.config.codecs import CODECS
from atoll.config.merges import MERGES

SIGN_PLUGIN = Path(__file__).with_name("sign_plugin.py")
SIGN_RECIPE = """
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


@contextmanager
def plugged(*files: Path) -> Iterator[list[str]]:
    """The words that a command loads these files by."""
    try:
        with patch.dict(CODECS), patch.dict(MERGES), patch.object(extend, "_loaded", []):
            yield [word for file in files for word in ("--allow-plugin", str(file))]
    finally:
        for file in files:
            sys.modules.pop(f"atoll_plugin_{file.stem}", None)


def ran(*words: object, cwd: Path) -> str:
    """What a command printed that ended well."""
    done = atoll(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout
