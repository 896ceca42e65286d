"""HTTP/2 and gRPC server for the benchmark's scripted upstreams (Triton, and SMG's worker).

For each upstream, a subclass of `ScriptedService` defines the gRPC methods and the responses. This
module handles frames and flow control, and sends tokens at the pace that a request selects. The
module uses no gRPC library: sending a token takes about a microsecond of CPU time, and with a
library tens of microseconds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any, TextIO, cast

import hpack

from bench import frames, pace

MARKED = 900_000
"""Smallest `max_tokens` of a request whose events are logged. Such a request is called marked."""

_HEADERS = b"\x88" + frames.literal("content-type", "application/grpc")  # 0x88: ":status 200"
_OK = frames.literal("grpc-status", "0")
_UNIMPLEMENTED = frames.literal("grpc-status", "12")


class Log:
    """Log of the events of marked requests (see `MARKED`), as lines of JSON.

    The log never forgets the id of a marked request, so a stop request is logged even if it arrives
    after the end of the answer.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._keys: dict[str, int] = {}

    def began(self, request_id: str, key: int) -> None:
        if key >= MARKED and self._file is not None:
            self._keys[request_id] = key
            self.note(request_id, "arrival")

    def follows(self, request_id: str) -> bool:
        return request_id in self._keys

    def note(self, request_id: str, event: str) -> None:
        if (key := self._keys.get(request_id)) is not None and self._file is not None:
            line = {"key": key, "event": event, "at": time.monotonic()}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class ScriptedService(ABC):
    """Base class of a scripted gRPC service. All connections of a process share one object.

    `methods` are the gRPC paths that the service implements. `running` has the unfinished answers
    by request id. Create the object inside the event loop.
    """

    def __init__(self, log: Log, methods: Set[str]) -> None:
        self.pacer = pace.Pacer()
        self.log = log
        self.methods = methods
        self.running: dict[str, StreamedAnswer] = {}

    @abstractmethod
    def receive(self, call: ServerCall, message: bytes) -> None:
        """Handle a message that the client sent on `call`. `call.path` is one of `methods`."""

    def begin(self, answer: StreamedAnswer, key: int, seed: int) -> None:
        """Start sending an answer at the pace that `seed` selects (see `pace`).

        `key` is the request's number of tokens. The answer's events are logged if `key` is at least
        `MARKED`.
        """
        self.log.began(answer.request_id, key)
        answer.call.answers.append(answer)
        self.running[answer.request_id] = answer
        self.pacer.add(answer, seed)

    def stop(self, request_id: str) -> bool:
        """End the answer to a request early, because a stop request has arrived.

        The answer to a marked request (see `MARKED`) is not ended: the stop request is only logged.
        Returns True if the request was running.
        """
        self.log.note(request_id, "stop")
        running = self.running.get(request_id)
        if running is not None and not self.log.follows(request_id):
            running.stop()
        return running is not None


class StreamedAnswer(ABC):
    """An answer in progress.

    `left` is the number of tokens that are not sent yet. `owed` is the number of tokens that are
    due but wait for the client to read. `size` is the approximate size in bytes of the next
    message's frames.
    """

    __slots__ = ("call", "left", "owed", "request_id", "size")

    def __init__(self, call: ServerCall, request_id: str, tokens: int) -> None:
        self.call = call
        self.request_id = request_id
        self.left = tokens
        self.owed = 0
        self.size = 0

    @abstractmethod
    def message(self) -> list[bytes]:
        """Return the frames of the next token. The caller has already subtracted it from `left`."""

    @abstractmethod
    def send_stop(self) -> None:
        """Send the final message of an answer that was stopped early."""

    def takes(self) -> bool:
        return self.call.takes(self.size)

    def emit(self) -> bool:
        if self.call.closed:
            return False
        self.owed += 1
        self.pump()
        return self.left > 0

    def stop(self) -> None:
        self.left = 0
        self.send_stop()
        self.call.finish_answer(self)

    def pump(self) -> None:
        while self.owed and self.left and self.takes():
            self.owed -= 1
            self.left -= 1
            for frame in self.message():
                self.call.send(frame)
            if not self.left:
                self.call.finish_answer(self)


class ServerCall:
    """A gRPC call: an HTTP/2 stream with one or more answers.

    The server ends the stream when the client has ended its side and all answers are complete.
    """

    def __init__(self, connection: ServerConnection, stream: int, path: str) -> None:
        self.stream = stream
        self.window = connection.stream_window
        self.closed = False
        self.answers: list[StreamedAnswer] = []
        self.path = path
        self._connection = connection
        self._received = bytearray()
        self._half_closed = False
        if path not in connection.service.methods:
            self._end(_UNIMPLEMENTED)
        else:
            connection.send(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, _HEADERS))

    def takes(self, size: int) -> bool:
        """Return True if frames of `size` bytes, including headers, can be sent now.

        Also returns True for a closed stream. The pacer then calls `StreamedAnswer.emit`, which
        returns False, and forgets the answer.
        """
        open_for = min(self.window, self._connection.window)
        return self.closed or (not self._connection.paused and open_for >= size)

    def send(self, data: bytes) -> None:
        self.window -= len(data) - 9
        self._connection.window -= len(data) - 9
        self._connection.send(data)

    def receive(self, data: bytes, *, last: bool) -> None:
        if self.closed:
            return
        self._received += data
        for message in frames.take_messages(self._received):
            self._connection.service.receive(self, message)
        if last:
            self._half_closed = True
            self._end_if_done()

    def finish_answer(self, answer: StreamedAnswer) -> None:
        self.answers.remove(answer)
        self._connection.service.running.pop(answer.request_id, None)
        self._end_if_done()

    def reset(self) -> None:
        self.closed = True
        for answer in self.answers:
            self._connection.service.log.note(answer.request_id, "reset")
            self._connection.service.running.pop(answer.request_id, None)

    def send_message(self, message: bytes) -> None:
        """Send a complete message, split into as many DATA frames as needed."""
        data = frames.grpc_message(message)
        for at in range(0, len(data), 16_384):
            self.send(frames.frame(frames.DATA, 0, self.stream, data[at : at + 16_384]))

    def _end_if_done(self) -> None:
        if self._half_closed and not self.answers and not self.closed:
            self._end(_OK)

    def _end(self, trailers: bytes) -> None:
        if trailers is _UNIMPLEMENTED:
            trailers = _HEADERS + trailers
        self.closed = True
        flags = frames.END_HEADERS | frames.END_STREAM
        self._connection.send(frames.frame(frames.HEADERS, flags, self.stream, trailers))
        self._connection.forget(self)


class ServerConnection(asyncio.Protocol):
    """A connection from a client. All data of one event loop iteration is sent in one write."""

    def __init__(self, service: ScriptedService) -> None:
        self.service = service
        self.paused = False
        self.window = self.stream_window = frames.DEFAULT_WINDOW
        self._calls: dict[int, ServerCall] = {}
        self._buffer = bytearray()
        self._preface = len(frames.PREFACE)
        self._hpack = hpack.Decoder()
        self._consumed = 0
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=256 * 1024)
        self.send(frames.opening())

    def connection_lost(self, exc: Exception | None) -> None:
        for call in self._calls.values():
            call.reset()
        self.service.pacer.wake()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._resume()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._preface:
            if len(self._buffer) < self._preface:
                return
            del self._buffer[: self._preface]
            self._preface = 0
        for kind, flags, stream, payload in frames.take_frames(self._buffer):
            self._frame(kind, flags, stream, payload)

    def send(self, data: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def forget(self, call: ServerCall) -> None:
        self._calls.pop(call.stream, None)

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if not self._transport.is_closing():
            self._transport.write(data)

    def _resume(self) -> None:
        for call in list(self._calls.values()):
            for answer in list(call.answers):
                answer.pump()
        self.service.pacer.wake()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        call = self._calls.get(stream)
        if kind == frames.DATA:
            self._consumed += len(payload)
            if self._consumed > 2**24:
                self.send(frames.window_update(0, self._consumed))
                self._consumed = 0
            if call is not None:
                last = bool(flags & frames.END_STREAM)
                call.receive(frames.bare_payload(flags, payload), last=last)
        elif kind == frames.HEADERS:
            if not flags & frames.END_HEADERS:
                raise ValueError("headers in several frames")
            fields: dict[Any, Any] = dict(self._hpack.decode(frames.bare_payload(flags, payload)))
            self._calls[stream] = ServerCall(self, stream, str(fields[":path"]))
        elif kind == frames.RST_STREAM and call is not None:
            del self._calls[stream]
            call.reset()
        elif kind == frames.WINDOW_UPDATE:
            size = struct.unpack(">I", payload)[0]
            if call is not None:
                call.window += size
            elif stream == 0:
                self.window += size
            self._resume()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(payload)
            self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.PING and not flags & frames.ACK:
            self.send(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _settings(self, payload: bytes) -> None:
        for identifier, value in struct.iter_unpack(">HI", payload):
            if identifier == frames.INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self.stream_window
                self.stream_window = value
        self._resume()


async def serve(service: ScriptedService, port: int) -> None:
    """Serve `service` on a port of 127.0.0.1 until the task is cancelled.

    Several processes may listen on the same port. The kernel then distributes the connections among
    the processes.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: ServerConnection(service), sock=listener, backlog=1024
    )
    await server.serve_forever()
