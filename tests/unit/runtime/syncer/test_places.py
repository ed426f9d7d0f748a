"""Places of learners: how long one is reserved, what opens one, and places.jsonl, where half a last line is a killed writer's and
is cut off, and any other line without a place is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import DataError
from atoll.runtime.syncer.places import RESERVED_SECONDS, Places
from atoll.transport import Refused
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


def test_places_that_were_given_to_nobody_are_free_again_soon(tmp_path: Path) -> None:
    made = Places(tmp_path, "run", JoinTokens(b"s" * 32), 3, lambda learner: learner == 0)
    for learner in (1, 2):
        assert made.place(-1, 100.0)[0].learner == learner
    with pytest.raises(Refused, match="all 3 places") as no:
        made.place(-1, 101.0)
    assert no.value.retry, "the learner asks again"
    assert made.place(-1, 100.0 + RESERVED_SECONDS)[0].learner == 1


def test_key_of_a_ticket_is_no_key_of_a_place(tmp_path: Path) -> None:
    made = Places(tmp_path, "run", JoinTokens(b"s" * 32), 8, lambda learner: False)
    shown = {"run": "run", "learner": str(-2 - 7), "incarnation": "3", "key": made.ticket_key(7, 3)}
    with pytest.raises(Refused, match="a learner from 0 to"):
        made.admit(shown)
