"""The same parsers under atheris, which is guided by coverage and has no wheel for aarch64: `pip install atheris`, then

    PYTHONPATH=src python tests/fuzz/guided.py frame -max_total_time=600

The options are libFuzzer's. A failing input is written to a file `crash-...`; with its name as argument it is run again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["atoll"]):
    from parsers import parsers

NAME, *OPTIONS = sys.argv[1:]
PARSER = parsers()[NAME]


def one_input(data: bytes) -> None:
    try:
        PARSER.parse(data)
    except PARSER.refusals:
        return


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{NAME}-"))
    for number, seed in enumerate([*PARSER.seeds, *(PARSER.build(tree) for tree in PARSER.trees)]):
        (corpus / f"seed{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *OPTIONS], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
