"""Opaque messages between named peers, and their payloads, over sockets. Nothing here knows what a message means.

A link has two lanes each way: control messages, which are small, and bulk messages, which carry a payload of any size. A
lane keeps its order. A bulk message is delivered after every control message sent before it. A control message is
delivered after every bulk message sent before it, unless it may overtake.
"""

import os

# Unless these are set before it is loaded, gRPC's core writes every cancelled stream and every fork to stderr. Errors that
# matter reach us as a status; a user who wants gRPC's own log sets the variables.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from atoll.transport.credentials import ClientCredentials, ServerCredentials, client_credentials, server_credentials
from atoll.transport.dial import Backoff, call, dial, upload
from atoll.transport.door import PEER_CONNECTIONS, Caps
from atoll.transport.feed import FeedEnd, PlacedBytes
from atoll.transport.frames import Buffers, LinkFailed, LinkLimits, Refused, SharedBuffers, Streamed
from atoll.transport.inbox import Elsewhere
from atoll.transport.link import Handler, Link
from atoll.transport.server import Server
from atoll.transport.sockets import open_files_limit, raise_open_files_limit
from atoll.transport.spool import spooled
from atoll.transport.uploads import Sink
from atoll.transport.wire import CERTIFICATE_KEY

__all__ = [
    "CERTIFICATE_KEY",
    "PEER_CONNECTIONS",
    "Backoff",
    "Buffers",
    "Caps",
    "ClientCredentials",
    "Elsewhere",
    "FeedEnd",
    "Handler",
    "Link",
    "LinkFailed",
    "LinkLimits",
    "PlacedBytes",
    "Refused",
    "Server",
    "ServerCredentials",
    "SharedBuffers",
    "Sink",
    "Streamed",
    "call",
    "client_credentials",
    "dial",
    "open_files_limit",
    "raise_open_files_limit",
    "server_credentials",
    "spooled",
    "upload",
]
