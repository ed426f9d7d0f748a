"""Mutual TLS: certificates name roles, and who has none does not get in."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from transport_peers import Recorder, credentials_of, run, serving

from atoll.transport import LinkFailed, call, client_credentials, dial, server_credentials

Signed = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def signed(name: str, by: Signed | None = None) -> Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    return builder.sign(by[1] if by else key, hashes.SHA256()), key


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def test_roles_are_checked_on_both_ends() -> None:
    authority, stranger = signed("atoll-ca"), signed("other-ca")
    syncer, learner = signed("atoll-syncer", authority), signed("atoll-learner", authority)
    outsider = signed("atoll-learner", stranger)
    ca = pem(authority[0])
    server = server_credentials(pem(syncer[0]), key_pem(syncer[1]), ca)
    good = client_credentials(ca, pem(learner[0]), key_pem(learner[1]), "atoll-syncer")
    wrong_role = client_credentials(ca, pem(learner[0]), key_pem(learner[1]), "atoll-archive")
    unknown = client_credentials(ca, pem(outsider[0]), key_pem(outsider[1]), "atoll-syncer")
    seen: list[str] = []

    async def story() -> None:
        here, there = Recorder(), Recorder(echo=True)
        async with serving(there, credentials=server) as (running, address):
            running._admit = lambda metadata: seen.append(metadata[":certificate"]) or metadata["name"]
            link = await dial(address, here, peer="s", metadata=credentials_of("a"), credentials=good, timeout=60)
            link.send(b"secret", [bytes(3 << 20)])
            await here.until(lambda: here.heads == [b"secret"])
            for bad in (wrong_role, unknown, None):
                with pytest.raises(LinkFailed):
                    await dial(address, here, peer="s", metadata=credentials_of("a"), credentials=bad, timeout=2)
            with pytest.raises(LinkFailed, match="unimplemented"):
                await call(address, "nothing", {}, b"", good, 60)
        assert seen == ["atoll-learner"]

    run(story())
