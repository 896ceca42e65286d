"""Minimal gRPC client that writes and reads HTTP/2 frames itself, for a trusted server.

The difference between a request through a gateway and a request through this client is the time
that the gateway adds. A gRPC library would add its own time here and make the gateway look better.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Protocol, cast

from tritonclient.grpc import service_pb2 as pb

from bench import frames

_ANSWER_WITHIN_S = 30.0
PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


class Received(Protocol):
    def __call__(self, count: int, *, end: bool) -> None:
        """Handle the arrival of `count` gRPC messages. `end` is True when the stream has ended."""


def infer_request(request_id: str, ids: list[int], tokens: int, seed: int) -> bytes:
    """Return a serialized ModelInferRequest that generates `tokens` tokens after the prompt `ids`.

    The request is for the model tensorrt_llm.
    """
    request = pb.ModelInferRequest(model_name="tensorrt_llm", id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    tensors: dict[str, tuple[str, int, bytes]] = {
        "input_ids": ("INT32", len(ids), struct.pack(f"<{len(ids)}i", *ids)),
        "input_lengths": ("INT32", 1, struct.pack("<i", len(ids))),
        "request_output_len": ("INT32", 1, struct.pack("<i", tokens)),
        "random_seed": ("UINT64", 1, struct.pack("<Q", seed)),
        "streaming": ("BOOL", 1, b"\x01"),
    }
    for name, (datatype, size, raw) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=(1, size))
        request.raw_input_contents.append(raw)
    request.outputs.add(name="output_ids")
    request.outputs.add(name="sequence_length")
    return bytes(request.SerializeToString())


class Direct(asyncio.Protocol):
    """An HTTP/2 connection to a gRPC server, with any number of concurrent requests."""

    def __init__(self, authority: str, path: str) -> None:
        self._headers = b"\x83\x86" + b"".join(  # ":method POST", ":scheme http"
            frames.literal(name, value)
            for name, value in (
                (":path", path),
                (":authority", authority),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        self._buffer = bytearray()
        self._next = 1
        self._consumed = 0
        self._waiting: dict[int, tuple[bytearray, Received]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(frames.PREFACE + frames.opening())

    def ask(self, request: bytes, received: Received) -> None:
        """Send a request of up to 16 KiB on a new stream.

        `received` is called when response messages arrive and when the stream ends.
        """
        stream, self._next = self._next, self._next + 2
        self._waiting[stream] = bytearray(), received
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, self._headers)
        message = frames.grpc_message(request)
        self._transport.write(head + frames.frame(frames.DATA, frames.END_STREAM, stream, message))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for kind, flags, stream, payload in frames.take_frames(self._buffer):
            if kind == frames.DATA:
                self._consumed += len(payload)
                if (waiting := self._waiting.get(stream)) is not None:
                    waiting[0].extend(payload)
                    if count := sum(1 for _ in frames.take_messages(waiting[0])):
                        waiting[1](count, end=False)
            if kind in {frames.DATA, frames.HEADERS} and flags & frames.END_STREAM:
                self._waiting.pop(stream)[1](0, end=True)
            elif kind == frames.RST_STREAM:
                raise ConnectionError("the stream was reset")
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                self._transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
            elif kind == frames.PING and not flags & frames.ACK:
                self._transport.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        if self._consumed > 2**24:
            self._transport.write(frames.window_update(0, self._consumed))
            self._consumed = 0

    def close(self) -> None:
        self._transport.abort()


async def connect(address: str, path: str = PATH) -> Direct:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(lambda: Direct(address, path), host, int(port))
    return line


async def first_tokens(address: str, requests: list[bytes], path: str = PATH) -> list[float]:
    """Send requests one at a time, and return the seconds until the first message of each response.

    Raises TimeoutError if the server does not respond.
    """
    line = await connect(address, path)
    loop = asyncio.get_running_loop()
    seconds = []
    for request in requests:
        first, over = loop.create_future(), loop.create_future()

        def received(
            count: int,
            *,
            end: bool,
            first: asyncio.Future[float] = first,
            over: asyncio.Future[None] = over,
        ) -> None:
            if count and not first.done():
                first.set_result(time.monotonic())
            if end:
                over.set_result(None)

        sent = time.monotonic()
        line.ask(request, received)
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            seconds.append(await first - sent)
            await over
    line.close()
    return seconds
