"""Log probabilities of a prompt's tokens, computed while the logits are being received.

A response has all logits of the prompt in one tensor, `context_logits`, of shape [1, tokens,
vocabulary]. The logits of each token take half a megabyte, so the complete response is never
stored. Memory holds only the bytes that the stream's flow-control window allows, and the rows of
logits that are being processed.

See decision 041 in docs/decisions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.deltas import TokenLogprob
from gateway.errors import EngineBroken, EngineError, EngineUnavailable
from gateway.generation.engine_request import Generation
from gateway.triton.http2.call import PREFIX
from gateway.triton.protobuf import pb
from gateway.triton.request import varint
from gateway.triton.token_stream import Offload, TokenStream
from gateway.triton.transport import Message, ResponseStream

_SLICE_BYTES = 2**20
_LENGTH_DELIMITED = 2
_ITEM_BYTES = {"FP32": 4, "FP16": 2, "BF16": 2}
# Field numbers in ModelStreamInferResponse and in the ModelInferResponse inside.
_RESPONSE, _OUTPUTS, _CONTENTS = 2, 5, 6


class PromptStream(TokenStream):
    """A request for the log probabilities of a prompt's tokens, and its response."""

    _logits_reader: PromptLogitsReader

    async def logprobs(self) -> list[TokenLogprob]:
        """Return a `TokenLogprob` for each prompt token. The first token has no log probability.

        Raise GatewayError if the engine fails, and TimeoutError at the deadline.
        """
        await self.response()
        if self._logits_reader.entries is None:
            raise EngineError("The engine gave no logits of the prompt.")
        return self._logits_reader.entries

    async def _open(self, request: bytes | Message) -> ResponseStream[bytes]:
        stream = await self._engine.open_pieces(request, self._metadata, self._deadline)
        self._logits_reader = PromptLogitsReader(stream, self._generation, self._offload)
        return stream

    async def _next(self, stream: ResponseStream[bytes]) -> bytes | None:
        return await self._logits_reader.read()


class PromptLogitsReader:
    """Reader of a stream of byte chunks. The logits in the responses become log probabilities.

    `entries` has the log probabilities of the prompt's tokens; None if no logits were received.
    """

    def __init__(
        self, stream: ResponseStream[bytes], generation: Generation, offload: Offload
    ) -> None:
        self._stream = stream
        self._ids = generation.prompt_ids
        self._count = generation.prompt_logprobs or 0
        self._offload = offload
        # `_data` has received bytes. The bytes before the index `_at` are already processed.
        # `_taken_bytes` is the number of bytes of the stream that were processed so far.
        self._data = b""
        self._at = 0
        self._taken_bytes = 0
        self.entries: list[TokenLogprob] | None = None

    async def read(self) -> bytes | None:
        """Return the next serialized response without its logits; None at the stream's end."""
        if self._at == len(self._data) and not await self._receive_more():
            return None
        compressed, length = PREFIX.unpack(await self._take(PREFIX.size))
        if compressed:
            raise EngineBroken("The inference server's answer is compressed.")
        end = self._taken_bytes + length
        stripped = b""
        while self._taken_bytes < end:
            field, size = await self._field()
            if field == _RESPONSE:
                inner = await self._response(self._taken_bytes + size)
                stripped += _encode_field(field, inner)
            else:
                stripped += _encode_field(field, await self._take(size))
        return stripped

    async def _response(self, end: int) -> bytes:
        stripped = b""
        tensors: list[Any] = []
        contents = 0
        while self._taken_bytes < end:
            field, size = await self._field()
            content = b""
            if field == _CONTENTS and tensors[contents].name == "context_logits":
                await self._score(tensors[contents], size)
            else:
                content = await self._take(size)
            stripped += _encode_field(field, content)
            contents += field == _CONTENTS
            if field == _OUTPUTS:
                tensors.append(pb.ModelInferResponse.InferOutputTensor.FromString(content))
        return stripped

    async def _score(self, tensor: Any, size: int) -> None:
        """Read a tensor of logits with `size` bytes from the stream, and compute `entries`.

        The logits of one token predict the next token, so the first token has no log probability.
        """
        vocabulary = tensor.shape[-1]
        row = vocabulary * _ITEM_BYTES[tensor.datatype]
        rows = max(_SLICE_BYTES // row, 1)
        end = self._taken_bytes + size
        entries = [TokenLogprob(self._ids[0], None)]
        while self._taken_bytes < end:
            raw = await self._take(min(rows * row, end - self._taken_bytes))
            ids = self._ids[len(entries) : len(entries) + len(raw) // row].tolist()
            work = partial(_logprobs, raw, tensor.datatype, vocabulary, ids, self._count)
            entries += await self._offload(work)
        self.entries = entries

    async def _field(self) -> tuple[int, int]:
        """Read the header of the next protobuf field. Return its number and its size in bytes.

        All fields of these messages must be length-delimited.
        """
        key = await self._varint()
        if key & 7 != _LENGTH_DELIMITED:
            raise EngineBroken("The inference server's answer cannot be read.")
        return key >> 3, await self._varint()

    async def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = (await self._take(1))[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    async def _take(self, size: int) -> bytes:
        while len(self._data) - self._at < size:
            if not await self._receive_more(size):
                raise EngineUnavailable("The inference server ended the stream early.")
        found = self._data[self._at : self._at + size]
        self._at += size
        self._taken_bytes += size
        return found

    async def _receive_more(self, size: int = 1) -> bool:
        """Wait until `size` unprocessed bytes are available. Return False at the stream's end."""
        pieces = [self._data[self._at :]]
        held = len(pieces[0])

        def enough(came: Any) -> bool:
            nonlocal held
            pieces.extend(came)
            held += sum(map(len, came))
            return held < size

        more = await self._stream.feed(enough)
        self._data, self._at = b"".join(pieces), 0
        return more


def _encode_field(field: int, content: bytes) -> bytes:
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(len(content)) + content


def _logprobs(
    raw: bytes, datatype: str, vocabulary: int, ids: list[int], count: int
) -> list[TokenLogprob]:
    """Compute log probabilities. Call this in a thread, because the import below loads numpy."""
    from gateway.triton.logits import token_logprobs  # noqa: PLC0415

    return token_logprobs(raw, datatype, vocabulary, ids, count)
