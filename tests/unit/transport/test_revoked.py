"""The list of revoked certificates and tokens: what is written, what is read, and that a change is seen without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UserError
from atoll.transport.keys import make_keys, make_token
from atoll.transport.revoked import Revoked, revoke, token_id

TOKEN = make_token(b"s" * 32)


def test_names_token_files_and_tokens_are_listed_once_each(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", learners=2)
    (tmp_path / "guest").write_text(TOKEN + "\n")
    lines = [revoke(tmp_path / "keys", name) for name in ("learner-1", "token", str(tmp_path / "guest"), TOKEN, "learner-1")]
    own = token_id((tmp_path / "keys" / "token").read_text().strip())
    assert lines == ["certificate learner-1", f"token {own}", f"token {token_id(TOKEN)}", f"token {token_id(TOKEN)}", lines[0]]
    assert (tmp_path / "keys" / "revoked").read_text().splitlines() == lines[:3]


def test_what_can_be_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--revoke"):
        revoke(tmp_path, "no such/file")
    assert not (tmp_path / "revoked").exists()


def test_list_is_read_again_when_it_changes_and_when_it_is_gone(tmp_path: Path) -> None:
    found = Revoked(tmp_path)
    assert not found.certificate("a") and found.changes == 0
    revoke(tmp_path, "a")
    found.refresh()
    assert found.certificate("a") and not found.certificate("") and found.changes == 1
    revoke(tmp_path, "b")
    found.refresh()
    assert found.certificate("a") and found.certificate("b") and not found.token("a")
    (tmp_path / "revoked").unlink()
    found.refresh()
    assert not found.certificate("a") and found.changes == 3
    found.refresh()
    assert found.changes == 3


def test_line_that_is_not_understood_is_named_and_the_others_are_in_force(tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text("# ours\n\ncertificate a  # left the project\nlearner-3\ntoken\ntoken 12ab\n")
    found = Revoked(tmp_path)
    assert found.certificate("a") and found.token("12ab")
    assert [flaw.partition(": ")[0] for flaw in found.flaws] == [f"{tmp_path / 'revoked'}, line {n}" for n in (4, 5)]
