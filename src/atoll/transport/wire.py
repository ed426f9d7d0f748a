"""A typed wrapper of gRPC: streams of bytes, unary calls, refusals, options. Beside `credentials.py`, only this file uses it.

gRPC serialises nothing: handlers are generic and messages are bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from atoll.transport.credentials import ClientCredentials, ServerCredentials
from atoll.transport.frames import LinkFailed, LinkLimits, Refused

Metadata: TypeAlias = Mapping[str, str]
Option: TypeAlias = tuple[str, int | str]

LINK_SERVICE: Final = "atoll.Link"
CALL_SERVICE: Final = "atoll.Call"
REFUSED_KEY: Final = "atoll-refused"
CERTIFICATE_KEY: Final = ":certificate"
"""The common name of a client's certificate, for `admit`. A client cannot send a key that begins with a colon."""
SLACK_BYTES: Final = 64 << 10

STREAMS_MAX: Final = 2
"""Streams at a time on one connection. An honest client has one; a second may begin while the first ends."""

LAST_RESORT_MS: Final = 600_000
"""An HTTP/2 answer may queue behind a full socket buffer: 4 MB, Linux's default, takes 600 s on a link of 56 kbit/s."""


class StreamBroken(Exception):
    """The stream ended without a close frame from the peer."""


class FrameStream(Protocol):
    async def read(self) -> bytes | None: ...

    async def write(self, frame: bytes) -> None: ...


@dataclass(frozen=True)
class GrpcStream:
    """Either end: a client's call and a server's context have the same read and write."""

    end: Any

    async def read(self) -> bytes | None:
        message: Any = await self._outcome(self.end.read())
        return message if isinstance(message, bytes) else None

    async def write(self, frame: bytes) -> None:
        try:
            await self._outcome(self.end.write(frame))
        except StreamBroken as broken:
            # A write does not learn the status of a stream that ended; its text is "Internal error from Core".
            raise StreamBroken("the stream to the peer has ended") from broken.__cause__

    async def finish(self) -> None:
        """Half-close: the client sends no more."""
        await self._outcome(self.end.done_writing())

    async def _outcome(self, operation: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await operation
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise StreamBroken(describe_error(error)) from error
        except asyncio.CancelledError:
            # gRPC raises this also for a stream that the *peer* cancelled. Only the task knows which of the two it is.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StreamBroken("the peer cancelled it") from None


def describe_error(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {error.details() or 'refusal details'}"
    return str(error) or type(error).__name__


def options(limits: LinkLimits) -> list[Option]:
    message_bytes_max = limits.frame_bytes_max + SLACK_BYTES
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        *keep_alive(limits),
    ]


def keep_alive(limits: LinkLimits) -> list[Option]:
    """gRPC must not judge by ping latency whether a peer is alive. A ping queues behind the bytes before it, and its answer
    behind those of the other direction: on a link of 3 Mbit/s these are megabytes, hence seconds, each way. gRPC times every
    ping, also those that measure bandwidth, and data that arrives meanwhile does not count (`keepalive_timeout` is meant to
    count it, but gRPC 1.85 never starts that timer). A server's options hold for all its connections, so it cannot be strict
    with talk streams alone either.

    So pings may take up to `LAST_RESORT_MS`, and `keepalive_timeout_ms` is set for its effect on Linux: TCP_USER_TIMEOUT. The
    kernel then breaks a connection with unacknowledged bytes after that long without an acknowledgement. That measures
    progress, not latency. Pings are still sent so that an idle connection has unacknowledged bytes too. Whether the peer is
    alive is judged by the link's own pulses (`Link`)."""
    return [
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", round(limits.stall_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # If a middlebox acknowledges for the peer and then hangs, only these end a bulk connection.
        ("grpc.http2.ping_timeout_ms", LAST_RESORT_MS),
        ("grpc.http2.settings_timeout", LAST_RESORT_MS),
    ]


class Context(Protocol):
    """What gRPC tells a server about one stream or call."""

    def invocation_metadata(self) -> Any: ...

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...

    def peer(self) -> str: ...

    async def abort(self, code: Any, details: str, trailing_metadata: Sequence[tuple[str, str]]) -> NoReturn: ...


def metadata_of(context: Context) -> dict[str, str]:
    found = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    if names := context.auth_context().get("x509_common_name"):
        found[CERTIFICATE_KEY] = next(iter(names)).decode("utf8", "replace")
    return found


async def refuse(context: Context, refused: Refused) -> NoReturn:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if refused.retry else grpc.StatusCode.PERMISSION_DENIED
    mark = "later" if refused.retry else "rejoin" if refused.rejoin else "final"
    await context.abort(code, refused.reason, ((REFUSED_KEY, mark),))


def failure(error: BaseException, address: str) -> Refused | LinkFailed:
    """A refusal carries `REFUSED_KEY`; the same status without it came from gRPC or from a proxy."""
    cause = error if isinstance(error, grpc.aio.AioRpcError) else error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        mark = dict(cause.trailing_metadata() or ()).get(REFUSED_KEY)
        if mark is not None:
            return Refused(cause.details() or "no reason given", retry=mark == "later", rejoin=mark == "rejoin")
    return LinkFailed(f"{address} cannot be reached ({describe_error(error)})")


class Channel:
    """One TCP connection: by default gRPC shares one between channels to the same address."""

    def __init__(self, address: str, limits: LinkLimits, credentials: ClientCredentials | None) -> None:
        wanted = [*options(limits), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if credentials is None:
            self._channel: Any = grpc.aio.insecure_channel(address, options=wanted)
        else:
            wanted.append(("grpc.ssl_target_name_override", credentials.server_name))
            self._channel = grpc.aio.secure_channel(address, credentials.inner, options=wanted)

    def open(self, method: str, metadata: Metadata, service: str = LINK_SERVICE) -> GrpcStream:
        return GrpcStream(self._channel.stream_stream(f"/{service}/{method}")(metadata=tuple(metadata.items())))

    async def call(self, name: str, metadata: Metadata, request: bytes) -> bytes:
        reply: bytes = await self._channel.unary_unary(f"/{CALL_SERVICE}/{name}")(request, metadata=tuple(metadata.items()))
        return reply

    async def close(self) -> None:
        await self._channel.close()


RpcError: Final[type[Exception]] = grpc.aio.AioRpcError

StreamHandler: TypeAlias = Callable[[Any, Context], Awaitable[None]]


class Listener:
    """A gRPC server that is not started yet."""

    def __init__(self, limits: LinkLimits, connections_max: int, handshake_seconds: float) -> None:
        bounds = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", connections_max),
            ("grpc.server_handshake_timeout_ms", round(handshake_seconds * 1000)),
            ("grpc.max_concurrent_streams", STREAMS_MAX),
            ("grpc.enable_channelz", 0),  # a record of every connection that nobody reads: a tenth of the cost of one
        ]
        self._server: Any = grpc.aio.server(options=[*options(limits), *bounds])

    def serve(self, streams: Mapping[str, StreamHandler], calls: Mapping[str, StreamHandler]) -> None:
        """A call is a stream here, of one message each way: gRPC would read the whole message of a unary call into memory before
        any function of ours sees its metadata."""
        for service, handlers in ((LINK_SERVICE, streams), (CALL_SERVICE, calls)):
            methods = {name: grpc.stream_stream_rpc_method_handler(function) for name, function in handlers.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    async def start(self, address: str, credentials: ServerCredentials | None) -> None:
        if credentials is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, credentials.inner)
        await self._server.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
