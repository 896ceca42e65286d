"""A scripted Triton: the gRPC service as far as a gateway needs it, without an engine behind it.

    python -m bench.upstream --port N --repository DIR [--events FILE]

Answers ServerReady, ModelReady, ModelConfig (from the rendered config.pbtxt of `tensorrt_llm` in
DIR) and ModelStreamInfer with messages that equal byte for byte what Triton 2.51 sends for the
synthetic engine: `request_output_len` tokens, one per message, always the token TOKEN, at the pace
of `random_seed` (see `pace`). A message is built once per request, so a token costs this process
about a microsecond where a gRPC library needs tens. Where the config.pbtxt is that of the llmapi
repository, messages are its texts so far (see `text_answer`), each built anew.

Of each request whose `request_output_len` is at least MARKED, FILE gets lines of JSON:
{"key": request_output_len, "event": "arrival" | "reset" | "stop", "at": monotonic seconds},
when it came, when its stream was reset, and when a stop request for it came. A stop request ends
every other request, as an engine would; these go on, so that both can be seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any, TextIO, cast

import hpack
import uvloop
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from bench import frames, pace
from bench.text_answer import Texts, tokens_before

TOKEN = 60
"""`Z` in the demo's tokenizer: a letter that occurs nowhere in an answer's envelope or headers."""

MARKED = 900_000
_SERVICE = "/inference.GRPCInferenceService/"
_HEADERS = b"\x88" + frames.literal("content-type", "application/grpc")  # 0x88: ":status 200"
_MAX_TOKENS = "sampling_param_max_tokens"
_OK = frames.literal("grpc-status", "0")
_UNIMPLEMENTED = frames.literal("grpc-status", "12")
_OUTPUTS = {"output_ids": (1, 1, 1), "sequence_length": (1, 1), "kv_cache_reused_blocks": (1, 1)}
_STATISTICS = "return_kv_cache_reuse_stats"
_VALUES = {"output_ids": TOKEN, "sequence_length": 1, "kv_cache_reused_blocks": 0}


class Log:
    """What became of marked requests; ids are remembered until their stop request comes."""

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


class Upstream:
    """What all connections share."""

    def __init__(self, config: Any, log: Log, seed: int | None) -> None:
        self._seed = seed
        self.pacer = pace.Pacer()
        self.log = log
        self.running: dict[str, Answer] = {}
        self._answers = 0
        self.replies = {
            _SERVICE + "ServerLive": pb.ServerLiveResponse(live=True),
            _SERVICE + "ServerReady": pb.ServerReadyResponse(ready=True),
            _SERVICE + "ModelReady": pb.ModelReadyResponse(ready=True),
            _SERVICE + "ModelConfig": pb.ModelConfigResponse(config=config),
        }

    def answer(self, call: Call, request: pb.ModelInferRequest, values: dict[str, bytes]) -> None:
        """Begins to answer."""
        prefix = "sampling_param_" if _MAX_TOKENS in values else ""
        tokens = struct.unpack("<i", values[_MAX_TOKENS if prefix else "request_output_len"])[0]
        raw = values.get("sampling_param_seed" if prefix else "random_seed", bytes(8))
        self.log.began(request.id, tokens)
        if prefix:
            # Counted from when none ran: a window begins so.
            number = self._answers if self.running else 0
            self._answers = number + 1
            before = tokens_before(number, tokens)
            answer: Answer = TextAnswer(call, request, tokens - before, before)
        else:
            answer = Answer(call, request, tokens)
        call.answers.append(answer)
        self.running[request.id] = answer
        asked = struct.unpack("<Q", raw)[0]
        self.pacer.add(answer, asked if self._seed is None else self._seed)


class Answer:
    """One request being answered: `left` more tokens, `owed` of them due but not sent."""

    __slots__ = ("_last", "_next", "call", "left", "owed", "request_id")

    def __init__(self, call: Call, request: pb.ModelInferRequest, tokens: int) -> None:
        self.call = call
        self.request_id = request.id
        self.left = tokens
        self.owed = 0
        self._next, self._last = (self._framed(request, final=final) for final in (False, True))

    def _framed(self, request: pb.ModelInferRequest, *, final: bool) -> list[bytes]:
        message = frames.grpc_message(_response(request, final=final))
        return [frames.frame(frames.DATA, 0, self.call.stream, message)]

    def _message(self) -> list[bytes]:
        """The frames of the next message; `left` are to come behind it."""
        return self._next if self.left else self._last

    def takes(self) -> bool:
        return self.call.takes(sum(map(len, self._next)))

    def emit(self) -> bool:
        if self.call.closed:
            return False
        self.owed += 1
        self.pump()
        return self.left > 0

    def stop(self) -> None:
        self.left = 0
        self.call.send_final(self.request_id)
        self.call.answered(self)

    def pump(self) -> None:
        while self.owed and self.left and self.takes():
            self.owed -= 1
            self.left -= 1
            for frame in self._message():
                self.call.send(frame)
            if not self.left:
                self.call.answered(self)


class TextAnswer(Answer):
    """One that is `before` tokens long when it begins."""

    __slots__ = ("_texts", "_tokens")

    def __init__(self, call: Call, request: pb.ModelInferRequest, tokens: int, before: int) -> None:
        self._texts = Texts(request, call.stream)
        self._tokens = before
        super().__init__(call, request, tokens)

    def _framed(self, request: pb.ModelInferRequest, *, final: bool) -> list[bytes]:
        return []

    def _message(self) -> list[bytes]:
        self._tokens += 1
        # What `takes` will ask about is about as long.
        self._next = self._texts.frames(self._tokens, final=not self.left)
        return self._next


class Call:
    """One stream of HTTP/2. Each message on ModelStreamInfer is a request of its own."""

    def __init__(self, connection: UpstreamConnection, stream: int, path: str) -> None:
        self.stream = stream
        self.window = connection.stream_window
        self.closed = False
        self.answers: list[Answer] = []
        self._connection = connection
        self._path = path
        self._received = bytearray()
        self._half_closed = False
        if path != _SERVICE + "ModelStreamInfer" and path not in connection.upstream.replies:
            self._end(_UNIMPLEMENTED)
        else:
            connection.send(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, _HEADERS))

    def takes(self, size: int) -> bool:
        """Also when it is closed, so that a pacer finds out. Frame headers are counted too."""
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
            self._message(message)
        if last:
            self._half_closed = True
            self._end_if_done()

    def answered(self, answer: Answer) -> None:
        self.answers.remove(answer)
        self._connection.upstream.running.pop(answer.request_id, None)
        self._end_if_done()

    def reset(self) -> None:
        self.closed = True
        for answer in self.answers:
            self._connection.upstream.log.note(answer.request_id, "reset")
            self._connection.upstream.running.pop(answer.request_id, None)

    def _message(self, message: bytes) -> None:
        upstream = self._connection.upstream
        if (reply := upstream.replies.get(self._path)) is not None:
            self._say(reply.SerializeToString())
            return
        request = pb.ModelInferRequest.FromString(message)
        names = [tensor.name for tensor in request.inputs]
        values = dict(zip(names, request.raw_input_contents, strict=True))
        if "stop" in values:
            upstream.log.note(request.id, "stop")
            running = upstream.running.get(request.id)
            if running is not None and not upstream.log.follows(request.id):
                running.stop()
            self.send_final(request.id)
            return
        upstream.answer(self, request, values)

    def send_final(self, request_id: str) -> None:
        """A response without outputs that ends a request."""
        final = pb.ModelStreamInferResponse()
        final.infer_response.id = request_id
        final.infer_response.model_name = "tensorrt_llm"
        final.infer_response.parameters["triton_final_response"].bool_param = True
        self._say(final.SerializeToString())

    def _say(self, message: bytes) -> None:
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


class UpstreamConnection(asyncio.Protocol):
    """One connection; what is sent within one turn of the loop goes out in one write."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.paused = False
        self.window = self.stream_window = frames.DEFAULT_WINDOW
        self._calls: dict[int, Call] = {}
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
        self.upstream.pacer.wake()

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

    def forget(self, call: Call) -> None:
        self._calls.pop(call.stream, None)

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if not self._transport.is_closing():
            self._transport.write(data)

    def _resume(self) -> None:
        for call in list(self._calls.values()):
            for answer in list(call.answers):
                answer.pump()
        self.upstream.pacer.wake()

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
            self._calls[stream] = Call(self, stream, str(fields[":path"]))
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


def _response(request: pb.ModelInferRequest, *, final: bool) -> bytes:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.model_version = request.model_name, "1"
    response.id = request.id
    response.parameters["triton_final_response"].bool_param = final
    # Where none is named, all that are made are wanted.
    names = [output.name for output in request.outputs] or ["output_ids", "sequence_length"]
    if not request.outputs and any(tensor.name == _STATISTICS for tensor in request.inputs):
        names.append("kv_cache_reused_blocks")
    for name in names:
        response.outputs.add(name=name, datatype="INT32", shape=_OUTPUTS[name])
        response.raw_output_contents.append(struct.pack("<i", _VALUES[name]))
    return bytes(message.SerializeToString())


async def serve(port: int, repository: Path, events: Path | None, seed: int | None) -> None:
    """Until cancelled. Several processes may serve one port: the kernel deals out connections."""
    config = model_config_pb2.ModelConfig()
    text_format.Parse((repository / "tensorrt_llm" / "config.pbtxt").read_text(), config)
    log = Log(events.open("a") if events else None)
    upstream = Upstream(config, log, seed)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: UpstreamConnection(upstream), sock=listener, backlog=1024
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--seed", type=int, help="the script of all requests, in place of theirs")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.repository, options.events, options.seed))


if __name__ == "__main__":
    main()
