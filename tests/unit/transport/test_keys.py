"""Keys: made once, checked with a clear sentence, good for a real handshake; tokens that say why they are refused."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UserError
from atoll.transport import keys
from atoll.transport.keys import (
    CA_DAYS,
    LEARNER_NAME,
    SYNCER_NAME,
    Credentials,
    JoinTokens,
    KeyPaths,
    Secret,
    add_learner,
    check_token,
    is_loopback,
    load_learner,
    load_server,
    make_keys,
    make_token,
    random_token_secret,
    read_token,
    session_key,
    session_ok,
    split_address,
    token_expiry,
    token_warnings,
)

NOW = datetime(2030, 5, 17, 12, 0, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "deep" / "keys"
    make_keys(directory, learners=2, days=30, tokens=2)
    return directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


# ---------------------------------------------------------------- making


def test_everything_is_made_and_private_things_are_private(made: Path) -> None:
    names = {p.name for p in made.iterdir()}
    pairs = {f"{n}.{end}" for n in ("ca", "syncer", "learner-0", "learner-1") for end in ("pem", "key")}
    assert names == pairs | {"token.key", "token", "token-1"}
    assert mode(made) == 0o700
    assert {mode(p) for p in made.iterdir() if p.suffix != ".pem"} == {0o600}
    assert len((made / "token.key").read_bytes()) == 32


def test_a_permissive_umask_changes_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "k", learners=0)
    finally:
        os.umask(before)
    assert mode(tmp_path / "k") == 0o700
    assert mode(tmp_path / "k" / "ca.key") == mode(tmp_path / "k" / "token") == 0o600


def test_a_directory_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    tmp_path.chmod(0o755)
    make_keys(tmp_path, learners=0, tokens=0)
    assert mode(tmp_path) == 0o755 and mode(tmp_path / "ca.key") == 0o600


def test_paths_are_returned_and_without_tokens_there_is_no_secret(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "k", learners=["anna", "b.2"], days=1, tokens=0)
    assert [p.name for p in made] == [
        "ca.pem", "ca.key", "syncer.pem", "syncer.key", "anna.pem", "anna.key", "b.2.pem", "b.2.key",
    ]  # fmt: skip
    assert all(p.exists() for p in made) and not (tmp_path / "k" / "token.key").exists()


def test_certificates_name_a_role_and_a_learner(made: Path) -> None:
    for file, role in (("syncer", SYNCER_NAME), ("learner-0", LEARNER_NAME), ("learner-1", LEARNER_NAME)):
        cert = certificate(made / f"{file}.pem")
        assert cert.subject.rfc4514_string() == f"CN={file}"
        assert keys._roles(cert) == [role]
        purposes = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {p._name for p in purposes} == {"serverAuth", "clientAuth"}
        assert cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert certificate(made / "ca.pem").extensions.get_extension_for_class(x509.BasicConstraints).value.ca is True


def test_times_come_from_now_and_days(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", learners=0, days=7, tokens=0, now=NOW)
    cert = certificate(tmp_path / "k" / "syncer.pem")
    assert cert.not_valid_before_utc < NOW and cert.not_valid_after_utc == NOW + timedelta(days=7)
    assert certificate(tmp_path / "k" / "ca.pem").not_valid_after_utc == NOW + timedelta(days=CA_DAYS)


@pytest.mark.parametrize("files_that_fit", [0, 1, 5])
def test_full_disk_leaves_no_half_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_that_fit: int) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "notes").write_text("mine")
    room, real = iter(range(files_that_fit)), open

    def full(number: int, mode: str) -> Any:
        file = real(number, mode)
        if next(room, None) is None:
            file.close()
            raise OSError(28, "No space left on device")
        return file

    with monkeypatch.context() as disk:
        disk.setattr(keys, "open", full, raising=False)
        with pytest.raises(UserError) as caught:
            make_keys(tmp_path / "k", learners=1)
    assert str(caught.value) == f"cannot write keys to {tmp_path / 'k'}: No space left on device; make room"
    assert [path.name for path in (tmp_path / "k").iterdir()] == ["notes"]
    make_keys(tmp_path / "k", learners=1)
    load_server(tmp_path / "k")


def test_an_existing_authority_is_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", learners=0)
    before = {p.name: p.read_bytes() for p in (tmp_path / "k").iterdir()}
    with pytest.raises(UserError, match=r"already holds a CA .* another directory, or add learners"):
        make_keys(tmp_path / "k", learners=3)
    assert {p.name: p.read_bytes() for p in (tmp_path / "k").iterdir()} == before


def test_any_other_file_in_the_way_stops_it_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "learner-0.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"learner-0\.key exists"):
        make_keys(tmp_path, learners=1)
    assert [p.name for p in tmp_path.iterdir()] == ["learner-0.key"]


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write keys"):
        make_keys(tmp_path / "file")


@pytest.mark.parametrize(
    ("learners", "days", "tokens", "complaint"),
    [
        (["../x"], 1, 0, "learner name"),
        (["token"], 1, 0, "learner name"),
        (["CA"], 1, 0, "learner name"),
        ([""], 1, 0, "learner name"),
        (["a", "A"], 1, 0, "same name"),
        (5000, 1, 0, "at most"),
        (0, 0, 0, "days is 0"),
        (0, 40_000, 0, "days is 40000"),
        (0, 1, -1, "tokens is -1"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, learners: int | list[str], days: int, tokens: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_keys(tmp_path / "k", learners=learners, days=days, tokens=tokens)
    assert not (tmp_path / "k").exists()


def test_learners_are_added_to_an_existing_authority(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", learners=1, now=NOW)
    assert [p.name for p in add_learner(tmp_path / "k", now=NOW)] == ["learner-1.pem", "learner-1.key"]
    add_learner(tmp_path / "k", "late", days=1000, now=NOW + timedelta(days=CA_DAYS - 2))
    cert = certificate(tmp_path / "k" / "late.pem")
    assert cert.not_valid_after_utc == NOW + timedelta(days=CA_DAYS), "nothing outlives its CA"
    warned = load_learner(tmp_path / "k", "late", now=NOW + timedelta(days=CA_DAYS - 1)).warnings
    assert [words.partition(" expires at ")[0] for words in warned] == [str(tmp_path / "k" / f) for f in ("ca.pem", "late.pem")]
    with pytest.raises(UserError, match="exists and is not overwritten"):
        add_learner(tmp_path / "k", "late", now=NOW)
    with pytest.raises(UserError, match=r"ca\.pem expired"):
        add_learner(tmp_path / "k", now=NOW + timedelta(days=CA_DAYS + 1))


def test_expiry_of_certificates_and_tokens_is_warned_of_a_week_ahead(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    make_keys(tmp_path, learners=1, days=8)
    for load in (load_server, load_learner):
        assert load(tmp_path, now=now + timedelta(hours=12)).warnings == []
        (warned,) = load(tmp_path, now=now + timedelta(days=1, hours=1)).warnings
        assert " expires at " in warned and "atoll keys" in warned
    assert token_warnings(tmp_path) == []
    (tmp_path / "token-9").write_text(JoinTokens.load(tmp_path).make(expires=now + timedelta(hours=2)))
    (warned,) = token_warnings(tmp_path)
    assert warned.startswith(f"{tmp_path / 'token-9'} expires at ")


@pytest.mark.parametrize("token", ["", "atoll1.", "atoll1.AAAA", "x" * 99, "atoll1." + "A" * 80, make_token(b"s" * 32)])
def test_expiry_of_what_is_no_token_or_never_ends_is_none(token: str) -> None:
    assert token_expiry(token) is None


def test_adding_needs_the_authority_and_its_own_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ca\.pem: no such file"):
        add_learner(tmp_path)
    make_keys(tmp_path / "a", learners=0)
    make_keys(tmp_path / "b", learners=0)
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(UserError, match="not the key of"):
        add_learner(tmp_path / "a")


# ---------------------------------------------------------------- loading


def test_loading_gives_what_grpc_takes(made: Path) -> None:
    server = load_server(made)
    assert server[:3] == tuple((made / f).read_bytes() for f in ("syncer.pem", "syncer.key", "ca.pem"))
    assert server.warnings == [] and "PRIVATE" not in repr(server)
    paths = KeyPaths(made / "learner-1.pem", made / "learner-1.key", made / "ca.pem")
    assert load_learner(made, 1) == load_learner(made, "learner-1") == load_learner(paths)
    assert load_server(KeyPaths(made / "syncer.pem", made / "syncer.key", made / "ca.pem")) == server


def test_a_learners_machine_holds_one_certificate_and_need_not_name_it(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 learners .*name one"):
        load_learner(made)
    for name in ("ca.pem", "learner-1.pem", "learner-1.key"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    loaded = load_learner(tmp_path)
    assert loaded.key == (made / "learner-1.key").read_bytes()
    assert loaded.warnings == [f"{tmp_path / 'learner-1.key'} can be read by others (mode 644); chmod 600 it"]
    with pytest.raises(UserError, match=r"learner-0\.pem: no such file"):
        load_learner(tmp_path / "nowhere")


def test_what_can_be_wrong_is_said(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_keys(other, learners=1)
    ca, cert, key = made / "ca.pem", made / "syncer.pem", made / "syncer.key"
    junk, rsa_key = tmp_path / "junk", tmp_path / "rsa.key"
    junk.write_bytes(b"\xff\x00 not PEM")
    secret = rsa.generate_private_key(65537, 1024)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    rsa_key.write_bytes(secret.private_bytes(*pem, serialization.NoEncryption()))
    cases = [
        (KeyPaths(tmp_path / "gone.pem", key, ca), r"gone\.pem: no such file"),
        (KeyPaths(tmp_path, key, ca), "cannot be read"),
        (KeyPaths(junk, key, ca), "not a PEM certificate"),
        (KeyPaths(cert, junk, ca), "not an unencrypted PEM private key"),
        (KeyPaths(cert, rsa_key, ca), "not an elliptic-curve key"),
        (KeyPaths(cert, made / "learner-0.key", ca), "not the key of"),
        (KeyPaths(cert, key, other / "ca.pem"), "not signed by"),
        (KeyPaths(made / "learner-0.pem", made / "learner-0.key", ca), "for atoll-learner, not for atoll-syncer"),
        (KeyPaths(ca, made / "ca.key", ca), "for nobody, not for atoll-syncer"),
    ]
    for paths, complaint in cases:
        with pytest.raises(UserError, match=complaint):
            load_server(paths)
    with pytest.raises(UserError, match="for atoll-syncer, not for atoll-learner"):
        load_learner(KeyPaths(cert, key, ca))


@pytest.mark.parametrize("name", ["learner-0.pem", "learner-0.key", "ca.pem"])
def test_any_byte_of_a_certificate_or_key_changed_is_refused_in_a_sentence(made: Path, tmp_path: Path, name: str) -> None:
    """The parser has an exception for each kind of damage, and most of them are no ValueError."""
    begin, *middle, end = (made / name).read_text().strip().splitlines()
    whole = base64.b64decode("".join(middle))
    paths = {n: made / n for n in ("learner-0.pem", "learner-0.key", "ca.pem")} | {name: tmp_path / name}
    for at in range(0, len(whole), 3):
        damaged = base64.b64encode(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]).decode()
        paths[name].write_text(f"{begin}\n{damaged}\n{end}\n")
        with contextlib.suppress(UserError):
            load_learner(KeyPaths(paths["learner-0.pem"], paths["learner-0.key"], paths["ca.pem"]))


def test_expired_and_not_yet_valid_say_when(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", learners=0, days=10, now=NOW)
    load_server(tmp_path / "k", now=NOW)
    with pytest.raises(UserError, match=r"syncer\.pem expired at 2030-05-27 12:00:00 UTC"):
        load_server(tmp_path / "k", now=NOW + timedelta(days=11))
    with pytest.raises(UserError, match=r"not valid before 2030-05-17 11:55:00 UTC"):
        load_server(tmp_path / "k", now=NOW - timedelta(days=1))


# ---------------------------------------------------------------- a real handshake


def context(side: ssl._SSLMethod, where: Path, name: str, ca: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.load_cert_chain(where / f"{name}.pem", where / f"{name}.key")
    made.load_verify_locations(ca)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, expects: str) -> str:
    """Both ends over a socket pair; the client's name as the server sees it. Raises what either end raised."""
    left, right = socket.socketpair()
    left.settimeout(60)
    right.settimeout(60)
    seen: list[str | BaseException] = []

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as tls:
                peer = tls.getpeercert()
                assert peer is not None
                seen.append(dict(field[0] for field in peer["subject"])["commonName"])  # type: ignore[misc,index]
                tls.sendall(b"welcome")
        except OSError as error:
            left.close()
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(right, server_hostname=expects) as tls:
            assert tls.recv(7) == b"welcome"
    finally:
        right.close()
        thread.join()
    assert isinstance(seen[0], str)
    return seen[0]


@pytest.mark.parametrize(("serving", "dialling", "expects"), [
    ("syncer", "learner-1", SYNCER_NAME),
    ("learner-0", "learner-1", LEARNER_NAME),
])  # fmt: skip
def test_mutual_tls_between_what_was_made(made: Path, serving: str, dialling: str, expects: str) -> None:
    ca = made / "ca.pem"
    server = context(ssl.PROTOCOL_TLS_SERVER, made, serving, ca)
    client = context(ssl.PROTOCOL_TLS_CLIENT, made, dialling, ca)
    assert handshake(server, client, expects) == dialling


def test_a_learner_cannot_pose_as_the_syncer(made: Path) -> None:
    ca = made / "ca.pem"
    server = context(ssl.PROTOCOL_TLS_SERVER, made, "learner-0", ca)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(server, context(ssl.PROTOCOL_TLS_CLIENT, made, "learner-1", ca), SYNCER_NAME)


def test_another_authority_is_refused_by_either_end(made: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", learners=1, tokens=0)
    ours, theirs = made / "ca.pem", tmp_path / "other" / "ca.pem"
    server = context(ssl.PROTOCOL_TLS_SERVER, made, "syncer", ours)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, context(ssl.PROTOCOL_TLS_CLIENT, made, "learner-0", theirs), SYNCER_NAME)
    with pytest.raises(OSError, match=r"unknown ca|UNKNOWN_CA|reset|Broken pipe|EOF"):
        handshake(server, context(ssl.PROTOCOL_TLS_CLIENT, tmp_path / "other", "learner-0", ours), SYNCER_NAME)


# ---------------------------------------------------------------- tokens


def test_a_good_token_opens_its_run_and_no_other() -> None:
    secret = random_token_secret()
    for_one, for_any = make_token(secret, run="a7"), make_token(secret)
    assert for_one.startswith("atoll1.") and for_one.isascii() and for_one.isprintable()
    assert check_token(secret, for_one, "a7") is None and check_token(secret, for_any, "b8") is None
    assert check_token(secret, for_one, "b8") == "token is for run a7"
    assert check_token(random_token_secret(), for_any, "a7") == "wrong token"
    assert make_token(secret) != make_token(secret), "each has a nonce of its own"


def test_a_token_expires() -> None:
    secret = random_token_secret()
    token = make_token(secret, expires=NOW + timedelta(hours=1), now=NOW)
    assert check_token(secret, token, "r", NOW + timedelta(minutes=59)) is None
    assert check_token(secret, token, "r", NOW + timedelta(hours=1)) == "token expired at 2030-05-17 13:00:00 UTC"
    with pytest.raises(UserError, match="is in the past"):
        make_token(secret, expires=NOW, now=NOW)
    with pytest.raises(UserError, match="name a run"):
        make_token(secret, run="")


SECRET = b"s" * 32
GOOD = make_token(SECRET, run="a7")


@given(st.text() | st.text(alphabet="ABCabc012-_=").map("atoll1.".__add__) | st.just("atoll1." + "A" * 5000))
def test_a_malformed_token_is_wrong_and_never_raises(text: str) -> None:
    assert check_token(SECRET, text, "a7") == "wrong token"


@given(st.integers(0, len(GOOD) - 2), st.characters())
def test_an_altered_token_is_wrong(at: int, character: str) -> None:
    altered = GOOD[:at] + character + GOOD[at + 1 :]
    assert check_token(SECRET, altered, "a7") == (None if altered == GOOD else "wrong token")
    assert check_token(SECRET, GOOD[:at], "a7") == "wrong token"


def test_a_token_of_another_version_is_wrong() -> None:
    body = msgspec.msgpack.encode({"run": 3})
    token = keys.base64.urlsafe_b64encode(body + keys._mac(SECRET, b"join", body)).decode().rstrip("=")
    assert check_token(SECRET, f"atoll1.{token}", "a7") == "wrong token"


def test_what_make_keys_writes_is_what_the_syncer_takes(made: Path, tmp_path: Path) -> None:
    tokens = JoinTokens.load(made)
    for file in ("token", "token-1"):
        token = read_token(made / file).reveal()
        assert tokens.check(token, "any") is None
        assert (tokens.check(token, "any", datetime.now(UTC) + timedelta(days=31)) or "").startswith("token expired at ")
    assert tokens.check(tokens.make(run="x"), "y") == "token is for run x"
    (tmp_path / "token.key").write_bytes(b"short")
    with pytest.raises(UserError, match="too short"):
        JoinTokens.load(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        JoinTokens.load(tmp_path / "nowhere")


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("hunter2")
    assert secret.reveal() == "hunter2"
    shown = [repr(secret), str(secret), f"{secret}", "%s" % secret, repr({"token": secret}), f"{secret!r}"]  # noqa: UP031
    assert not any("hunter2" in text for text in shown) and shown[0] == "***"
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)
    assert "hunter2" not in repr(Credentials(b"", b"hunter2", b"", []))


# ---------------------------------------------------------------- sessions


def test_a_session_key_fits_one_learner_and_one_incarnation() -> None:
    key = session_key(b"run", 3, 2)
    assert key == session_key(b"run", 3, 2) and len(key) == 64
    assert session_ok(b"run", 3, 2, key)
    others = [(b"other", 3, 2), (b"run", 2, 2), (b"run", 3, 1), (b"run", 32, 0)]
    assert not any(session_ok(*other, key) for other in others)
    assert not any(session_ok(b"run", 3, 2, shown) for shown in ("", key[:-1], key.upper(), "\udcff", "é" * 64))


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "parts", "loopback"),
    [
        ("localhost:1", ("localhost", 1), True),
        ("LocalHost:1", ("LocalHost", 1), True),
        ("127.0.0.1:7077", ("127.0.0.1", 7077), True),
        ("127.3.2.1:0", ("127.3.2.1", 0), True),
        ("[::1]:7077", ("::1", 7077), True),
        ("[::ffff:127.0.0.1]:1", ("::ffff:127.0.0.1", 1), True),
        ("0.0.0.0:7077", ("0.0.0.0", 7077), False),
        ("[::]:7077", ("::", 7077), False),
        ("[::ffff:10.0.0.1]:1", ("::ffff:10.0.0.1", 1), False),
        ("10.0.0.5:65535", ("10.0.0.5", 65535), False),
        ("localhost.example.org:80", ("localhost.example.org", 80), False),
        ("node_3.cluster-a:80", ("node_3.cluster-a", 80), False),
    ],
)
def test_addresses(address: str, parts: tuple[str, int], loopback: bool) -> None:
    assert split_address(address) == parts
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    "address",
    ["", ":1", "host", "host:", "host:x", "host:-1", "host:70000", "host:٣", "::1:80", "[::1]", "[nonsense]:1", "[a:b]:1",
     "[127.0.0.1]:1", "a b:1", "http://h:1", "unix:/tmp/s", "h:1\n", " h:1", "host:000001"],
)  # fmt: skip
def test_nonsense_addresses_are_refused(address: str) -> None:
    for function in (split_address, is_loopback):
        with pytest.raises(UserError, match="must be host:port"):
            function(address)
