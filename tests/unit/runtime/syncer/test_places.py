"""Places of learners: how long one is reserved, what opens one, and places.jsonl, where half a last line is a killed writer's and
is cut off, and any other line without a place is refused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from atoll.config import load
from atoll.errors import DataError
from atoll.runtime.syncer.places import RESERVED_SECONDS, RETAKE_SECONDS, Caller, Placed, PlaceLimits, Places
from atoll.transport import CERTIFICATE_KEY, Refused
from atoll.transport.keys import JoinTokens
from atoll.transport.revoked import Revoked, revoke, token_id

GIVEN = b'{"learner":0,"incarnation":2}\n'
ANYONE = Caller()
LATER = RETAKE_SECONDS
TOKENS = JoinTokens(b"s" * 32)


def places(
    directory: Path, members: int = 4, connected: Collection[int] = (), expelled: Collection[int] = (), **limits: int
) -> Places:
    """Of a run without learners, except those that `connected` and `expelled` hold at any time."""
    here, out = connected.__contains__, expelled.__contains__
    return Places(directory, "run", TOKENS, PlaceLimits(members, **limits), here, out, Revoked(directory))


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
    placed = places(tmp_path).place(0, 100.0, ANYONE)[0]
    assert (placed.learner, placed.incarnation) == (0, given)
    since = b',"since":%d' % given if given else b""
    assert file.read_bytes() == (GIVEN if given else b"") + b'{"learner":0,"incarnation":%d%s}\n' % (given, since)


def test_places_that_were_given_to_nobody_are_free_again_soon(tmp_path: Path) -> None:
    made = places(tmp_path, 3, {0})
    for learner in (1, 2):
        assert made.place(-1, 100.0, ANYONE)[0].learner == learner
    with pytest.raises(Refused, match="all 3 places") as no:
        made.place(-1, 101.0, ANYONE)
    assert no.value.retry, "the learner asks again"
    assert made.place(-1, 100.0 + RESERVED_SECONDS, ANYONE)[0].learner == 1


def test_key_of_a_ticket_is_no_key_of_a_place(tmp_path: Path) -> None:
    made = places(tmp_path, 8)
    shown = {"run": "run", "learner": str(-2 - 7), "incarnation": "3", "key": made.ticket_key(7, 3)}
    with pytest.raises(Refused, match="a learner from 0 to"):
        made.admit(shown)


# ---------------------------------------------------------------- whose a place is


def refused(made: Places, wants: int, now: float, caller: Caller) -> Refused:
    with pytest.raises(Refused) as no:
        made.place(wants, now, caller)
    return no.value


def test_place_belongs_to_the_certificate_that_first_took_it_also_after_a_restart(tmp_path: Path) -> None:
    first = places(tmp_path)
    assert first.place(0, 100.0, Caller("learner-0"))[0] == Placed(0, 0, "learner-0")
    for made in (first, places(tmp_path)):
        no = refused(made, 0, 1000.0, Caller("learner-1"))
        assert not no.retry and "certificate learner-0" in no.reason
        assert refused(made, 0, 1000.0, Caller("learner-1", place=0, key="x")).reason == no.reason
    assert first.place(0, 101.0 + LATER, Caller("learner-0"))[0].incarnation == 1, "at once, though it is reserved"


def test_session_key_is_worth_nothing_with_another_certificate(tmp_path: Path) -> None:
    made = places(tmp_path)
    placed, key, again = made.place(-1, 100.0, Caller("learner-0"))
    shown = {"run": "run", "learner": "0", "incarnation": "0", "key": key}
    assert made.admit(shown | {CERTIFICATE_KEY: "learner-0"}) == Placed(0, 0) and again == "", placed
    with pytest.raises(Refused, match="certificate") as no:
        made.admit(shown | {CERTIFICATE_KEY: "learner-1"})
    assert not no.value.retry and not no.value.rejoin
    made.certified = True
    with pytest.raises(Refused, match="common name"):
        made.admit(shown)


def test_certificate_gets_its_own_place_back_and_no_second_one(tmp_path: Path) -> None:
    connected = {3}
    made = places(tmp_path, 8, connected)
    assert made.place(2, 100.0, Caller("a"))[0].learner == 2
    assert made.place(-1, 102.0, Caller("a"))[0] == Placed(2, 1, "a")
    assert not refused(made, 5, 104.0, Caller("a")).retry
    connected.add(2)
    no = refused(made, -1, 106.0, Caller("a"))
    assert no.retry and "learners_per_certificate" in no.reason, "the old connection may be dead and not noticed yet"
    assert made.place(-1, 106.0, Caller("b"))[0].learner == 0


def test_certificate_of_a_site_has_as_many_places_as_the_key_allows(tmp_path: Path) -> None:
    made = places(tmp_path, 8, per_certificate=3)
    assert [made.place(-1, 100.0 + n, Caller("site"))[0].learner for n in range(3)] == [0, 1, 2]
    assert refused(made, -1, 104.0, Caller("site")).retry and not refused(made, 7, 104.0, Caller("site")).retry
    assert made.place(-1, 104.0, Caller("other"))[0].learner == 3
    assert made.place(-1, 103.0 + RESERVED_SECONDS, Caller("site"))[0] == Placed(0, 1, "site", "", 0)


def test_process_with_the_place_key_comes_back_at_once_and_one_without_it_waits(tmp_path: Path) -> None:
    connected: set[int] = set()
    made = places(tmp_path, 8, connected)
    _, _, key = made.place(-1, 100.0, ANYONE)
    assert refused(made, 0, 102.0, ANYONE).retry and refused(made, 0, 102.0, Caller(place=0, key="0" * 64)).retry
    assert made.place(-1, 102.0, Caller(place=0, key=key))[0] == Placed(0, 1), "the same place, with the same key"
    assert places(tmp_path).place(0, 104.0, Caller(place=0, key=key))[2] == key, "also by a restarted syncer"
    connected.add(0)
    assert refused(made, -1, 200.0, Caller(place=0, key=key)).retry, "its old connection will be noticed to be dead"


def test_place_of_a_process_that_is_away_for_long_is_free_and_its_key_too_old(tmp_path: Path) -> None:
    made = places(tmp_path, 8)
    _, session, key = made.place(0, 100.0, ANYONE)
    _, _, other = made.place(0, 100.0 + RESERVED_SECONDS, ANYONE)
    assert other != key
    with pytest.raises(Refused) as no:
        made.admit({"run": "run", "learner": "0", "incarnation": "0", "key": session})
    assert no.value.rejoin and not no.value.retry, "it may ask for another place"
    assert made.place(-1, 101.0 + RESERVED_SECONDS, Caller(place=0, key=key))[0].learner == 1


def test_one_token_takes_no_more_places_than_the_key_allows(tmp_path: Path) -> None:
    made = places(tmp_path, 300, per_token=5)
    given = 0
    for wants in range(300):
        try:
            given += made.place(wants, 100.0, Caller(token="one"))[0].learner >= 0
        except Refused as no:
            assert not no.retry and "places_per_token" in no.reason
    assert given == 5 and (tmp_path / "places.jsonl").read_bytes().count(b"\n") == 5
    assert made.place(-1, 100.0, Caller(token="two"))[0].learner == 5
    assert made.place(4, 100.0 + RESERVED_SECONDS, Caller(token="one"))[0].incarnation == 1
    assert refused(places(tmp_path, 300, per_token=5), 9, 100.0, Caller(token="one")), "a restarted syncer counts on"


def test_place_has_at_most_one_incarnation_a_second(tmp_path: Path) -> None:
    made = places(tmp_path)
    caller = Caller("learner-0")
    assert sum(_given(made, 100.0 + n / 100, caller) for n in range(301)) == 4


def _given(made: Places, now: float, caller: Caller) -> bool:
    try:
        return made.place(0, now, caller)[0].learner == 0
    except Refused as no:
        assert no.retry
        return False


def test_limits_follow_from_the_config() -> None:
    assert PlaceLimits.of(load(overrides={"learners": 2})) == PlaceLimits(1024, 1, 16, 3600.0)
    assert PlaceLimits.of(load(overrides={"learners": 8})).per_token == 32
    limits = {"members_max": 64, "learners_per_certificate": 4, "places_per_token": 6}
    assert PlaceLimits.of(load(overrides={"limits": limits})) == PlaceLimits(64, 4, 6, 3600.0)


def test_expelled_learner_gets_neither_its_place_nor_is_it_given_to_another(tmp_path: Path) -> None:
    expelled: set[int] = set()
    made = places(tmp_path, 8, (), expelled)
    _, _, key = made.place(-1, 100.0, ANYONE)
    assert made.place(-1, 100.0, Caller("learner-1"))[0].learner == 1
    expelled.update((0, 1))
    for caller in (Caller(place=0, key=key), Caller("learner-1")):
        no = refused(made, -1, 200.0, caller)
        assert not no.retry and "expelled" in no.reason
    assert not refused(made, 0, 200.0, ANYONE).retry
    assert made.place(-1, 200.0, ANYONE)[0].learner == 2


# ---------------------------------------------------------------- revoked


def test_revoked_certificate_is_refused_for_good_without_a_restart(tmp_path: Path) -> None:
    made = places(tmp_path)
    placed, key, _ = made.place(-1, 100.0, Caller("learner-0"))
    shown = {"run": "run", "learner": "0", "incarnation": "0", "key": key, CERTIFICATE_KEY: "learner-0"}
    assert made.admit(shown) == Placed(0, 0), placed
    revoke(tmp_path, "learner-0")
    for ask in (lambda: made.admit(shown), lambda: made.check_token({"token": TOKENS.make(), CERTIFICATE_KEY: "learner-0"})):
        with pytest.raises(Refused, match="revoked") as no:
            ask()
        assert not no.value.retry and not no.value.rejoin


def test_revoked_token_admits_nobody_and_those_it_admitted_are_out(tmp_path: Path) -> None:
    made, token, other = places(tmp_path), TOKENS.make(), TOKENS.make()
    assert made.check_token({"token": token}) == token_id(token) != token_id(other)
    _, key, _ = made.place(0, 100.0, Caller(token=token_id(token)))
    revoke(tmp_path, token)
    for ask in (
        lambda: made.check_token({"token": token}),
        lambda: made.admit({"run": "run", "learner": "0", "incarnation": "0", "key": key}),
    ):
        with pytest.raises(Refused, match="revoked"):
            ask()
    assert made.check_token({"token": other}) == token_id(other)
    assert token not in (tmp_path / "revoked").read_text()


def test_place_of_one_that_returns_is_given_to_nobody_by_chance(tmp_path: Path) -> None:
    made = places(tmp_path, return_seconds=60)
    _, _, key = made.place(-1, 100.0, ANYONE)
    made.left(0, 110.0, returns=True)
    assert made.place(-1, 120.0, ANYONE)[0].learner == 1, "a newcomer gets another"
    assert made.place(-1, 150.0, Caller(place=0, key=key))[0] == Placed(0, 1, since=0), "and the one that had it comes back"


def test_place_of_one_that_returns_is_free_for_who_asks_for_it_and_after_a_while(tmp_path: Path) -> None:
    for wants, now in ((0, 120.0), (-1, 171.0)):
        (tmp_path / str(wants)).mkdir()
        made = places(tmp_path / str(wants), return_seconds=60)
        made.place(-1, 100.0, ANYONE)
        made.left(0, 110.0, returns=True)
        assert made.place(wants, now, ANYONE)[0].learner == 0


def test_kept_place_is_given_out_before_a_newcomer_is_turned_away(tmp_path: Path) -> None:
    made = places(tmp_path, 2, {1}, return_seconds=60)
    made.place(0, 100.0, ANYONE)
    made.left(0, 110.0, returns=True)
    assert made.place(-1, 120.0, ANYONE)[0].learner == 0


def test_place_of_one_that_left_for_good_is_free_at_once(tmp_path: Path) -> None:
    made = places(tmp_path, return_seconds=60)
    made.place(-1, 100.0, ANYONE)
    made.left(0, 110.0, returns=False)
    assert made.place(-1, 111.0, ANYONE)[0].learner == 0
