"""Transport on grpc.aio, the library that tritonclient uses. Tests compare `http2` with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc

from gateway.errors import EngineUnreachable, GatewayError
from gateway.triton.failures import Status, from_status, no_connection
from gateway.triton.http2.call import PREFIX
from gateway.triton.transport import (
    ABANDON_GRACE_S,
    CONNECT_TIMEOUT_S,
    MAX_ABANDONED,
    NO_METADATA,
    ClientTls,
    ConnectionOptions,
    Endpoint,
    Message,
    Metadata,
    OnEnded,
    message_bytes,
)

# Message sizes are not limited here, because Triton itself limits them to INT32_MAX bytes. gRPC's
# default of 4 MiB would be too small for logits. Keepalive is not enabled, because Triton ends idle
# connections that send pings more often than every 5 minutes.
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this option is not a backoff but the minimum time of a connection attempt.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# Text of the INTERNAL error that grpc.aio raises if the server has ended a call before the request
# was written.
_NOT_SENT = "Internal error from Core"
_NO_CONNECTION = "failed to connect to all addresses; last error: "
_COPY_BYTES = 1 << 20
# Seconds after which a replaced channel is closed. No call on the channel takes this long, because
# every call has a shorter timeout.
_REPLACED_GRACE_S = 86_400.0

T = TypeVar("T")


class GrpcioTransport:
    """Implementation of `transport.Transport` with grpc.aio."""

    def __init__(self, endpoint: Endpoint, options: ConnectionOptions) -> None:
        """Create the channel. Raise OSError if a certificate cannot be read."""
        self._metadata = tuple(options.metadata.items())
        self._endpoint = endpoint
        self._tls = options.load_tls() if endpoint.tls else None
        self._channel = self._connect()
        self._closing: set[asyncio.Task[None]] = set()
        self._replaced: set[Any] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Timeout] = set()

    async def stream(
        self,
        path: str,
        request: Message,
        parse: Callable[[bytes], T],
        metadata: Metadata,
        by: float | None = None,
    ) -> _Call[T]:
        return _Call(await self._start(path, request, metadata, by), parse, self._abandoned)

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> _CompleteMessages:
        return _CompleteMessages(
            await self._start(path, request, metadata, by), bytes, self._abandoned
        )

    async def _start(
        self, path: str, request: Message, metadata: Metadata, by: float | None
    ) -> Any:
        limit = asyncio.timeout_at(by)
        self._starting.add(limit)
        try:
            async with limit:
                return await self._send(path, request, metadata)
        except TimeoutError:
            if limit in self._starting:
                raise
            raise _disconnected_error() from None
        finally:
            self._starting.discard(limit)

    async def _send(self, path: str, request: Message, metadata: Metadata) -> Any:
        joined = request[0] if len(request) == 1 else await asyncio.to_thread(_join, request)
        open_call: Any = self._current().stream_stream(
            path, request_serializer=None, response_deserializer=None
        )
        call = open_call(metadata=(*self._metadata, *metadata.items()))
        try:
            await call.write(bytes(joined))
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.RpcError):
            pass  # the call has ended already, so the first read raises the error
        except BaseException:
            call.cancel()
            raise
        return call

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        call: Any = self._current().unary_unary(path)
        sent = (*self._metadata, *metadata.items())
        try:
            with _raise_if_disconnected():
                reply: bytes = await call(request, timeout=timeout_s, metadata=sent)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            raise _translate(error) from error
        return reply

    def _connect(self) -> Any:
        self._channel_tls = None if self._tls is None else self._tls.value
        return _channel(self._endpoint, self._channel_tls)

    def _current(self) -> Any:
        """Return the channel for the next call.

        After certificates were reloaded, create a new channel. Calls in progress continue on the
        old channel.
        """
        if self._tls is not None and self._tls.value is not self._channel_tls:
            before, self._channel = self._channel, self._connect()
            self._replaced.add(before)
            self._close_behind(before, _REPLACED_GRACE_S)
        return self._channel

    def _close_behind(self, channel: Any, grace_s: float | None = None) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(lambda _: self._replaced.discard(channel))

    def _give_up_starting(self) -> None:
        """End calls that wait for a connection. Closing the channel would not end their wait."""
        for limit in [limit for limit in self._starting if not limit.expired()]:
            limit.reschedule(0)
            self._starting.remove(limit)

    def disconnect(self) -> None:
        self._give_up_starting()
        for channel in (self._channel, *self._replaced):
            self._close_behind(channel)
        self._channel = self._connect()

    async def close(self) -> None:
        self._give_up_starting()
        for task in self._abandoned:
            task.cancel()
        if self._abandoned:
            await asyncio.wait(self._abandoned)
        for channel in (self._channel, *self._replaced):
            self._close_behind(channel)
        await asyncio.gather(*self._closing)


class _Call(Generic[T]):
    unread = 0
    """Always 0, because grpc.aio does not report how many received messages wait to be read."""

    def __init__(
        self, call: Any, parse: Callable[[bytes], T], abandoned: set[asyncio.Task[None]]
    ) -> None:
        """Wrap a started call.

        `abandoned` is the transport's set of tasks for abandoned calls. The method `abandon` adds a
        task to this set. The task reads the remaining responses and ignores them.
        """
        self._call = call
        self._parse = parse
        self._abandoned = abandoned
        self._is_abandoned = False
        self._is_cancelled = False
        self._is_read = False

    async def wait_sent(self) -> None:
        """Return at once, because `GrpcioTransport.stream` has already written the request."""

    async def read(self) -> T | None:
        message = await self._read()
        return None if message is None else self._parse(message)

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        while (message := await self._read()) is not None:
            if not take([message]):
                return True
        return False

    async def _read(self) -> bytes | None:
        if self._is_abandoned:
            raise asyncio.CancelledError  # the same error as after `cancel`
        self._is_read = True
        try:
            with _raise_if_disconnected(by=lambda: self._is_cancelled or self._is_abandoned):
                message: Any = await self._call.read()
        except grpc.RpcError as error:
            raise _translate(error) from error
        finally:
            self._is_read = False
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()

    def abandon(self, ended: OnEnded | None = None) -> None:
        if self._is_abandoned:
            return
        self._is_abandoned = True
        # Do not read the call to its end if another task is waiting in a read. Cancel the call
        # instead, because only this ends the wait of the other task.
        if self._call.done() or self._is_read or len(self._abandoned) >= MAX_ABANDONED:
            # If the call has finished, the server has ended it, with one exception: grpc.aio
            # cancels a call when the task that reads it is cancelled.
            by_server = self._call.done() and not self._call.cancelled()
            self._call.cancel()
            if ended is not None:
                ended(by_server)
            return
        task = asyncio.get_running_loop().create_task(self._read_to_the_end(ended))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _read_to_the_end(self, ended: OnEnded | None) -> None:
        by_server = False
        try:
            async with asyncio.timeout(ABANDON_GRACE_S):
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            by_server = True
        except (grpc.RpcError, TimeoutError):
            pass
        finally:
            self._call.cancel()
            if ended is not None:
                ended(by_server)


class _CompleteMessages(_Call[bytes]):
    """A call that returns complete messages, each with gRPC's 5-byte prefix.

    grpc.aio returns complete messages without the prefix, so the prefix is added again.
    """

    async def _read(self) -> bytes | None:
        message = await super()._read()
        return None if message is None else PREFIX.pack(0, len(message)) + message


def _channel(endpoint: Endpoint, tls: ClientTls | None) -> Any:
    if tls is None:
        return grpc.aio.insecure_channel(endpoint.authority, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    options: list[tuple[str, str | int]] = [*_OPTIONS]
    if endpoint.name != endpoint.host:
        options.append(("grpc.ssl_target_name_override", endpoint.name))
    return grpc.aio.secure_channel(endpoint.authority, credentials, options=options)


@contextmanager
def _raise_if_disconnected(by: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Return a context manager that raises EngineUnreachable if `disconnect` has cancelled a call.

    A call raises CancelledError in three cases: `disconnect` or the caller has cancelled the call,
    or the current task was cancelled. Only in the first case, EngineUnreachable is raised instead.
    `by` must return True in the second case.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if by() or (task is not None and task.cancelling()):
            raise
        raise _disconnected_error() from None


def _disconnected_error() -> EngineUnreachable:
    return no_connection("the server does not answer")


def _join(request: Message) -> bytes:
    """Join all chunks of a message. Call this in a thread.

    Copying 132 MB at once would hold the GIL for 60 ms or more. Therefore, the chunks are first
    copied to `bytes` objects of 1 MiB. `bytes.join` releases the GIL while it joins such objects.
    """
    message_bytes(request)
    return b"".join(
        bytes(piece[start : start + _COPY_BYTES])
        for piece in request
        for start in range(0, len(piece), _COPY_BYTES)
    )


def _translate(error: grpc.RpcError) -> GatewayError:
    details = str(error.details())
    if details.startswith(_NO_CONNECTION):
        return no_connection(details.removeprefix(_NO_CONNECTION))
    status = Status.UNAVAILABLE if details == _NOT_SENT else error.code().value[0]
    return from_status(status, details)
