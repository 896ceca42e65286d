"""A scripted OpenAI server, for gateways that speak OpenAI upstream.

    python -m bench.openai_upstream --port N

As in the scripted Triton (`bench.upstream`), a request's `max_tokens` and `seed` select the length
and the pace of the answer (see `bench.pace`). Each token is one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, cast

import uvloop

from bench import pace

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FULL = 1024 * 1024


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """Return one SSE event as one HTTP chunk."""
    data = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return _chunk(f"data: {json.dumps(data)}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_ROLE = _event({"role": "assistant", "content": ""})
_TOKEN = _event({"content": "~"})
_END = _event({}, "length") + _chunk(b"data: [DONE]\n\n") + _chunk(b"")


class _Answer:
    def __init__(self, transport: asyncio.Transport, tokens: int) -> None:
        self._transport = transport
        self._left = tokens
        transport.write(_HEAD + _ROLE)

    def takes(self) -> bool:
        return self._transport.is_closing() or self._transport.get_write_buffer_size() < _FULL

    def emit(self) -> bool:
        if self._transport.is_closing():
            return False
        self._left -= 1
        self._transport.write(_TOKEN if self._left else _TOKEN + _END)
        return self._left > 0


class _Connection(asyncio.Protocol):
    def __init__(self, pacer: pace.Pacer) -> None:
        self._pacer = pacer
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(body) < length:
            return
        self._buffer = body[length:]
        if not head.startswith(b"POST"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        chat = json.loads(body[:length])
        self._pacer.add(_Answer(self._transport, chat["max_tokens"]), chat.get("seed", 0))

    def resume_writing(self) -> None:
        self._pacer.wake()


async def serve(port: int) -> None:
    pacer = pace.Pacer()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(pacer), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
