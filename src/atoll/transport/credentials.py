"""Mutual TLS. Certificates name roles ("atoll-syncer"), not addresses: a learner may be anywhere.

gRPC and the bulk connections have each their own implementation of TLS, with the same certificates.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]


@dataclass(frozen=True)
class ServerCredentials:
    inner: Any
    """A grpc.ServerCredentials; grpcio ships no types."""
    bulk: ssl.SSLContext


@dataclass(frozen=True)
class ClientCredentials:
    inner: Any
    bulk: ssl.SSLContext
    server_name: str
    """The DNS name that the server's certificate must carry, independent of its address."""


def server_credentials(cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ServerCredentials:
    """The handshake fails for a client without a certificate signed by `ca_pem`; no handler sees it."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, cert_pem, key_pem, ca_pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a bulk connection that only sends would never read them
    inner = grpc.ssl_server_credentials(((key_pem, cert_pem),), ca_pem, require_client_auth=True)
    return ServerCredentials(inner, context)


def client_credentials(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, server_name: str) -> ClientCredentials:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, cert_pem, key_pem, ca_pem)
    return ClientCredentials(grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem), context, server_name)


def _context(protocol: int, cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    with _as_file(key_pem + b"\n" + cert_pem) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Python's ssl reads keys only from files. This one is in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("key")
        try:
            os.write(descriptor, data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 600
            file.write(data)
            file.flush()
            yield file.name
