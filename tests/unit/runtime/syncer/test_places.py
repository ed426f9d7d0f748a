"""places.jsonl: half a last line is a killed writer's and is cut off; any other line that says nothing is somebody's mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import DataError
from atoll.runtime.syncer.places import Places
from atoll.transport.keys import JoinTokens, random_token_secret

GIVEN = b'{"learner":0,"incarnation":2}\n'


def places(directory: Path) -> Places:
    return Places(directory, "run", JoinTokens(random_token_secret()), 4, lambda _: False)


@pytest.mark.parametrize("line", [b"garb", b"[1,2]", b"", b'{"learner":0}', b'{"learner":"\xff","incarnation":0}', b"[" * 9999])
def test_whole_line_that_is_no_place_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "places.jsonl"
    content = GIVEN + line + b"\n" + b'{"learner":1,"inc'
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        places(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{file}, line 2: is not a place") and "\n" not in said
    assert file.read_bytes() == content, "the file is left as it was"


@pytest.mark.parametrize(("content", "given"), [(b"", 0), (b"{", 0), (GIVEN, 3), (GIVEN + b'{"learner":0,"inc', 3)])
def test_half_a_last_line_is_cut_off_and_places_go_on(tmp_path: Path, content: bytes, given: int) -> None:
    file = tmp_path / "places.jsonl"
    file.write_bytes(content)
    placed, _ = places(tmp_path).place(0, 100.0)
    assert (placed.learner, placed.incarnation) == (0, given)
    assert file.read_bytes() == (GIVEN if given else b"") + b'{"learner":0,"incarnation":%d}\n' % given
