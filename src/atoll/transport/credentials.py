"""Mutual TLS. Certificates name roles ("atoll-syncer"), not addresses: a learner may be anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]


@dataclass(frozen=True)
class ServerCredentials:
    inner: Any
    """A grpc.ServerCredentials; grpcio ships no types."""


@dataclass(frozen=True)
class ClientCredentials:
    inner: Any
    server_name: str
    """The DNS name that the server's certificate must carry, independent of its address."""


def server_credentials(cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ServerCredentials:
    """The handshake fails for a client without a certificate signed by `ca_pem`; no handler sees it."""
    return ServerCredentials(grpc.ssl_server_credentials(((key_pem, cert_pem),), ca_pem, require_client_auth=True))


def client_credentials(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, server_name: str) -> ClientCredentials:
    return ClientCredentials(grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem), server_name)
