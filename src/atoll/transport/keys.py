"""Keys of a run: certificates made and checked, join tokens, session keys, and which addresses may go without them.

    ca.pem        ca.key         signs everything else; ca.key stays where `atoll keys` was run
    syncer.pem    syncer.key     DNS name atoll-syncer, which learners require of the server they dial
    learner-0.pem learner-0.key  DNS name atoll-learner; the common name says which learner
    shard-0.pem   shard-0.key    DNS name atoll-shard, which a syncer requires of shards on other machines
    token.key                    the syncer's secret, with which join tokens are made and checked
    token, token-1, ...          join tokens, one for each learner or site

The DNS names are roles, not hosts: a syncer may move, and a learner's certificate never passes for a syncer's. A certificate
proves membership of the CA's group; a token, which expires, admits its holder to a run.
"""

from __future__ import annotations

import base64
import errno
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import UNDECODABLE, UserError
from atoll.ids import Incarnation, LearnerId

SYNCER_NAME: Final = "atoll-syncer"
LEARNER_NAME: Final = "atoll-learner"
SHARD_NAME: Final = "atoll-shard"
CA_DAYS: Final = 3650
DAYS_MAX: Final = 36_500
LEARNERS_MAX: Final = 4096
SHARDS_MAX: Final = 256
TOKENS_MAX: Final = 4096
SKEW: Final = timedelta(minutes=5)
"""Clocks differ: a certificate made now must be valid on a machine whose clock is behind."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
"""A certificate's name."""
_RESERVED = {"ca", "syncer", "token"}
_OF_A_SHARD: Final = re.compile(r"shard-\d+", re.IGNORECASE)
WARN_BEFORE: Final = timedelta(days=7)
"""Certificates and tokens that end sooner are warned of."""
_PRIVATE, _PUBLIC = 0o600, 0o644

# ---------------------------------------------------------------- making certificates


class _Pair(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def files(self, name: str) -> dict[str, tuple[bytes, int]]:
        pem = serialization.Encoding.PEM
        key = self.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return {f"{name}.pem": (self.certificate.public_bytes(pem), _PUBLIC), f"{name}.key": (key, _PRIVATE)}


def make_keys(
    directory: Path, *, learners: int | Sequence[str] = 1, days: int = 365, tokens: int = 1, shards: int = 0,
    now: datetime | None = None,
) -> list[Path]:  # fmt: skip
    """A new CA and everything it signs. Nothing is written if any of the files exists."""
    now = _checked_now(now, days)
    names = [f"learner-{i}" for i in range(learners)] if isinstance(learners, int) else list(learners)
    _check_names(names)
    if not 0 <= tokens <= TOKENS_MAX:
        raise UserError(f"tokens is {tokens}; it must be 0 to {TOKENS_MAX}")
    if (directory / "ca.pem").exists() or (directory / "ca.key").exists():
        raise UserError(f"{directory} already holds a CA (ca.pem); name another directory, or add learners to this one")
    # A unique name: verifiers look issuers up by name, and two CAs with one name give misleading errors.
    authority = _sign(f"atoll CA {secrets.token_hex(4)}", now, max(days, CA_DAYS), authority=None)
    files = authority.files("ca") | _sign("syncer", now, days, authority=authority, role=SYNCER_NAME).files("syncer")
    for name in names:
        files |= _sign(name, now, days, authority=authority, role=LEARNER_NAME).files(name)
    for name in (f"shard-{shard}" for shard in range(shards)):
        files |= _sign(name, now, days, authority=authority, role=SHARD_NAME).files(name)
    if tokens:
        secret = random_token_secret()
        files["token.key"] = (secret, _PRIVATE)
        for i in range(tokens):
            token = make_token(secret, expires=now + timedelta(days=days), now=now)
            files["token" if i == 0 else f"token-{i}"] = (token.encode() + b"\n", _PRIVATE)
    return _write_all(directory, files)


def add_learner(directory: Path, name: str | None = None, *, days: int = 365, now: datetime | None = None) -> list[Path]:
    """One more learner under the CA in `directory`; without a name, the next free learner-N."""
    if name is None:
        name = _next_free(directory, "learner", LEARNERS_MAX)
    _check_names([name])
    return _add(directory, name, LEARNER_NAME, days, now)


def add_shard(directory: Path, *, days: int = 365, now: datetime | None = None) -> list[Path]:
    """One more shard under the CA in `directory`: the next free shard-N."""
    return _add(directory, _next_free(directory, "shard", SHARDS_MAX), SHARD_NAME, days, now)


def _next_free(directory: Path, what: str, most: int) -> str:
    return next(n for n in (f"{what}-{i}" for i in range(most + 1)) if not (directory / f"{n}.pem").exists())


def _add(directory: Path, name: str, role: str, days: int, now: datetime | None) -> list[Path]:
    now = _checked_now(now, days)
    pem, key_pem = _read(directory / "ca.pem"), _read(directory / "ca.key")
    authority = _Pair(_parse_certificates(pem, directory / "ca.pem")[0], _parse_key(key_pem, directory / "ca.key"))
    if authority.key.public_key() != authority.certificate.public_key():
        raise UserError(f"{directory / 'ca.key'} is not the key of {directory / 'ca.pem'}; restore the pair, or make new keys")
    _check_time(authority.certificate, directory / "ca.pem", now)
    return _write_all(directory, _sign(name, now, days, authority=authority, role=role).files(name))


def _checked_now(now: datetime | None, days: int) -> datetime:
    if not 1 <= days <= DAYS_MAX:
        raise UserError(f"days is {days}; it must be 1 to {DAYS_MAX}")
    return (now or datetime.now(UTC)).astimezone(UTC)


def _check_names(names: Sequence[str]) -> None:
    if len(names) > LEARNERS_MAX:
        raise UserError(f"{len(names)} learners; a CA makes at most {LEARNERS_MAX} at a time")
    for name in names:
        if not NAME.fullmatch(name) or name.lower() in _RESERVED or _OF_A_SHARD.fullmatch(name):
            raise UserError(
                f"learner name {name!r}: it becomes a file name; use up to 48 letters, digits, '.', '_' and '-', "
                f"and not {', '.join(sorted(_RESERVED))}, nor shard-N, which is a shard's"
            )
    if len({name.lower() for name in names}) < len(names):
        raise UserError("two learners have the same name (case aside); give each its own")


def _sign(name: str, now: datetime, days: int, *, authority: _Pair | None, role: str | None = None) -> _Pair:
    """A certificate for a new key; without an authority, a self-signed CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer, end = subject, key, now + timedelta(days=days)
    if authority is not None:
        issuer, signer = authority.certificate.subject, authority.key
        # No certificate outlives its CA: the chain would fail at a time that no error message names.
        end = min(end, authority.certificate.not_valid_after_utc)
    is_ca = authority is None
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if role is not None:
        # Both server and client: a learner serves weights to a recovering peer.
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(purposes, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(role)]), critical=False)
    return _Pair(builder.sign(signer, hashes.SHA256()), key)


def _write_all(directory: Path, files: dict[str, tuple[bytes, int]]) -> list[Path]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.iterdir()):  # a directory with other files keeps the mode its owner chose
            directory.chmod(0o700)
        taken = [name for name in files if os.path.lexists(directory / name)]
        if taken:
            raise UserError(f"{directory / taken[0]} exists and is not overwritten; remove it, or choose another name")
        _write_or_remove(directory, files)
    except OSError as error:
        instead = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name a directory of your own"
        raise UserError(f"cannot write keys to {directory}: {error.strerror or error}; {instead}") from None
    return [directory / name for name in files]


def _write_or_remove(directory: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """All of them or none: half a CA signs nothing, and `make_keys` would refuse its directory."""
    made: list[Path] = []
    try:
        for name, (content, mode) in files.items():
            # O_EXCL, and the mode at creation: the file is never readable by others and never written through a symlink.
            number = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(directory / name)
            with open(number, "wb") as file:
                file.write(content)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- loading certificates


class KeyPaths(NamedTuple):
    certificate: Path
    key: Path
    ca: Path


class Credentials(NamedTuple):
    """PEM files as gRPC takes them. `warnings` are sentences for the user about what does not fail yet."""

    certificate: bytes
    key: bytes
    ca: bytes
    warnings: list[str]

    def __repr__(self) -> str:
        return f"Credentials(key='***', warnings={self.warnings!r})"


def load_server(where: Path | KeyPaths, *, now: datetime | None = None) -> Credentials:
    """The syncer's credentials, from a directory that `atoll keys` made or from three paths."""
    paths = where if isinstance(where, KeyPaths) else KeyPaths(where / "syncer.pem", where / "syncer.key", where / "ca.pem")
    return _load(paths, SYNCER_NAME, now)


def load_learner(where: Path | KeyPaths, name: str | LearnerId | None = None, *, now: datetime | None = None) -> Credentials:
    """A learner's credentials. Without a name, the directory must hold exactly one, as it usually does on a learner's machine."""
    if isinstance(where, KeyPaths):
        return _load(where, LEARNER_NAME, now)
    if name is None:
        name = _only_one(where, "learners", lambda stem: stem not in _RESERVED and not _OF_A_SHARD.fullmatch(stem)) or 0
    name = f"learner-{name}" if isinstance(name, int) else name
    return _load(KeyPaths(where / f"{name}.pem", where / f"{name}.key", where / "ca.pem"), LEARNER_NAME, now)


def load_shard(where: Path, name: str | None = None, *, now: datetime | None = None) -> Credentials:
    """A shard's credentials; as for a learner."""
    name = name or _only_one(where, "shards", lambda stem: bool(_OF_A_SHARD.fullmatch(stem))) or "shard-0"
    return _load(KeyPaths(where / f"{name}.pem", where / f"{name}.key", where / "ca.pem"), SHARD_NAME, now)


def _only_one(where: Path, whose: str, is_one: Callable[[str], bool]) -> str | None:
    found = sorted(p.stem for p in where.glob("*.pem") if is_one(p.stem))
    if len(found) > 1:
        raise UserError(f"{where} holds certificates of {len(found)} {whose} ({found[0]}, {found[1]}, ...); name one")
    return found[0] if found else None


def _load(paths: KeyPaths, role: str, now: datetime | None) -> Credentials:
    now = (now or datetime.now(UTC)).astimezone(UTC)
    pem, key_pem, ca_pem = (_read(path) for path in paths)
    certificate = _parse_certificates(pem, paths.certificate)[0]
    authorities = _parse_certificates(ca_pem, paths.ca)
    if _parse_key(key_pem, paths.key).public_key() != certificate.public_key():
        raise UserError(f"{paths.key} is not the key of {paths.certificate}; copy both from the same `atoll keys`")
    signers = [ca for ca in authorities if _is_signed_by(certificate, ca)]
    if not signers:
        raise UserError(f"{paths.certificate} is not signed by {paths.ca}; copy both from the same `atoll keys`")
    _check_time(signers[0], paths.ca, now)
    _check_time(certificate, paths.certificate, now)
    roles = _roles(certificate)
    if role not in roles:
        raise UserError(f"{paths.certificate} is for {', '.join(roles) or 'nobody'}, not for {role}; choose another")
    mode = paths.key.stat().st_mode & 0o777
    readable = [f"{paths.key} can be read by others (mode {mode:o}); chmod 600 it"] if mode & 0o077 else []
    ends = [(paths.ca, signers[0].not_valid_after_utc), (paths.certificate, certificate.not_valid_after_utc)]
    return Credentials(pem, key_pem, ca_pem, readable + [expiry_warning(path, end) for path, end in ends if soon(end, now)])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `atoll keys` makes it, or copy it from where that was done") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; give this user access to it") from None


def _parse_certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(pem)
        for certificate in found:  # its parts are parsed when they are asked for
            certificate.public_key(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return found
    except Exception:  # of many kinds, for the many ways in which a certificate can be damaged
        raise UserError(f"{path} is not a PEM certificate; copy it again, or make new keys") from None


def _parse_key(pem: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except Exception:  # of many kinds; an encrypted key too, because nobody is there to type a password
        raise UserError(f"{path} is not an unencrypted PEM private key; copy it again, or make new keys") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is not an elliptic-curve key; make keys with `atoll keys`")
    return key


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):  # another issuer name; another kind of key; only the name matches
        return False
    return True


def _check_time(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    if now > certificate.not_valid_after_utc:
        raise UserError(f"{path} expired at {_utc(certificate.not_valid_after_utc)}; make a new one with `atoll keys`")
    if now < certificate.not_valid_before_utc:
        raise UserError(f"{path} is not valid before {_utc(certificate.not_valid_before_utc)}; check this machine's clock")


def soon(end: datetime, now: datetime | None = None) -> bool:
    return end - (now or datetime.now(UTC)) < WARN_BEFORE


def expiry_warning(what: object, end: datetime) -> str:
    return f"{what} expires at {_utc(end)}: make a new one with `atoll keys` before, or no connection can be opened with it"


def _roles(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # there are none, or not such as can be read
        return []
    return names.get_values_for_type(x509.DNSName)


def _utc(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


# ---------------------------------------------------------------- join tokens


class Secret:
    """A string that is not shown in a log, a traceback or an f-string. Not a str: `join` and `encode` would show it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    expires: int | None
    nonce: bytes


TOKEN_PREFIX: Final = "atoll1."
_MAC_BYTES: Final = 32
_TOKEN_MAX: Final = 1024
ANY_RUN: Final = "*"


def random_token_secret() -> bytes:
    return secrets.token_bytes(32)


def make_token(secret: bytes, *, run: str = ANY_RUN, expires: datetime | None = None, now: datetime | None = None) -> str:
    if not run or len(run.encode()) > 256:
        raise UserError(f"a token's run is {run!r}; name a run in up to 256 bytes, or use * for any run")
    expires = expires and expires.astimezone(UTC)
    if expires is not None and expires <= (now or datetime.now(UTC)).astimezone(UTC):
        raise UserError(f"a token's expiry {_utc(expires)} is in the past; choose a later time")
    until = None if expires is None else int(expires.timestamp())
    body = msgspec.msgpack.encode(_Body(run, until, secrets.token_bytes(16)))
    return TOKEN_PREFIX + _text(body + _mac(secret, b"join", body))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def check_token(secret: bytes, token: str, run: str, now: datetime | None = None) -> str | None:
    """None if the token admits to this run, else the reason. Tokens come from strangers, so no input may raise."""
    if len(token) > _TOKEN_MAX or not token.startswith(TOKEN_PREFIX):
        return "wrong token"
    text = token.removeprefix(TOKEN_PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:  # binascii.Error is one; non-ASCII text raises another
        return "wrong token"
    if _text(raw) != text:  # decoders accept / for _ and ignore spare bits; a token has one spelling
        return "wrong token"
    body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"join", body)):
        return "wrong token"
    try:
        claim = msgspec.msgpack.decode(body, type=_Body)
    except UNDECODABLE:  # our signature, another version's format
        return "wrong token"
    if claim.expires is not None and (now or datetime.now(UTC)).timestamp() >= claim.expires:
        return f"token expired at {_utc(datetime.fromtimestamp(max(0, claim.expires), UTC))}"  # no date is before 1970
    return None if claim.run in (ANY_RUN, run) else f"token is for run {claim.run}"


def token_expiry(token: str) -> datetime | None:
    """When it ends, by its own words: for its holder, who cannot check the signature. None: never, or it is no token."""
    text = token.removeprefix(TOKEN_PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        expires = msgspec.msgpack.decode(raw[:-_MAC_BYTES], type=_Body).expires
        return None if expires is None else datetime.fromtimestamp(expires, UTC)
    except (ValueError, OverflowError, OSError):  # msgspec's errors are ValueErrors
        return None


def token_warnings(directory: Path) -> list[str]:
    """Of the token files that are here."""
    paths = sorted(path for path in directory.glob("token*") if path.suffix != ".key")
    ends = [(path, token_expiry(read_token(path).reveal())) for path in paths]
    return [expiry_warning(path, end) for path, end in ends if end is not None and soon(end)]


class JoinTokens:
    """The syncer's side: makes and checks tokens with the secret in `token.key`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, directory: Path) -> JoinTokens:
        secret = _read(directory / "token.key")
        if len(secret) < 32:
            raise UserError(f"{directory / 'token.key'} is too short for a secret; make keys again with `atoll keys`")
        return cls(secret)

    def make(self, *, run: str = ANY_RUN, expires: datetime | None = None, now: datetime | None = None) -> str:
        return make_token(self._secret, run=run, expires=expires, now=now)

    def check(self, token: str, run: str, now: datetime | None = None) -> str | None:
        return check_token(self._secret, token, run, now)


def read_token(path: Path) -> Secret:
    """The learner's side: reads a token that `atoll keys` wrote."""
    return Secret(_read(path).decode("ascii", "replace").strip())


def _mac(secret: bytes, purpose: bytes, message: bytes) -> bytes:
    """One secret with separated purposes: a token never passes for a session key."""
    return hmac.digest(secret, b"atoll " + purpose + b"\0" + message, "sha256")


# ---------------------------------------------------------------- session keys


def session_key(run_secret: bytes, learner: LearnerId, incarnation: Incarnation) -> str:
    """What a learner presents with every call after admission. The syncer keeps no table of keys; it recomputes them."""
    return _mac(run_secret, b"session", b"%d %d" % (learner, incarnation)).hex()


def session_ok(run_secret: bytes, learner: LearnerId, incarnation: Incarnation, shown: str) -> bool:
    return hmac.compare_digest(session_key(run_secret, learner, incarnation).encode(), shown.encode("utf8", "replace"))


def place_key(run_secret: bytes, learner: LearnerId, since: Incarnation) -> str:
    """What the processes of a place without a certificate show when they come back. It stays the same until the place is given to
    another process: `since` is the incarnation with which that one came."""
    return _mac(run_secret, b"place", b"%d %d" % (learner, since)).hex()


def place_ok(run_secret: bytes, learner: LearnerId, since: Incarnation, shown: str) -> bool:
    return hmac.compare_digest(place_key(run_secret, learner, since).encode(), shown.encode("utf8", "replace"))


# ---------------------------------------------------------------- addresses


def split_address(address: str) -> tuple[str, int]:
    """host:port. An IPv6 host is written in brackets, which are removed."""
    match = re.fullmatch(r"(?:\[([\w:.%]*:[\w:.%]*)\]|([\w.-]+)):([0-9]{1,5})", address, re.ASCII)
    if match is None or int(match[3]) > 65_535 or (match[1] is not None and not _is_ip(match[1])):
        raise UserError(f"address {address!r}: must be host:port, such as 10.0.0.5:7077 or [::1]:7077")
    return match[1] or match[2], int(match[3])


def is_loopback(address: str) -> bool:
    """Only this machine can reach the address, so a run on it may go without certificates."""
    host, _ = split_address(address)
    if not _is_ip(host):
        return host.lower() == "localhost"  # any other name may resolve to anything, at any time
    ip = ipaddress.ip_address(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
