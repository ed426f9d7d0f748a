"""Mutual TLS. Certificates name roles ("atoll-syncer"), not addresses: a learner may be anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]


@dataclass(frozen=True)
class ServerCredentials:
    inner: Any
    """grpc.ServerCredentials, which has no type that we could name."""


@dataclass(frozen=True)
class ClientCredentials:
    inner: Any
    server_name: str
    """What the server's certificate must say, whatever its address is."""


def server_credentials(cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ServerCredentials:
    """A client without a certificate of `ca_pem` does not get as far as a handler."""
    return ServerCredentials(grpc.ssl_server_credentials(((key_pem, cert_pem),), ca_pem, require_client_auth=True))


def client_credentials(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, server_name: str) -> ClientCredentials:
    return ClientCredentials(grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem), server_name)
