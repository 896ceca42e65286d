"""Answers of the scripted upstream in the llmapi model's form: the text so far.

The first 100 concurrent answers start at different positions, so that a window covers all positions
of an answer equally, however long an answer takes.
"""

from __future__ import annotations

import struct

from tritonclient.grpc import service_pb2 as pb

from bench import frames
from gateway.triton.request import varint

PIECE = b" aa~"
"""Text of each token: as long as an average English token, with the letter that clients count."""

MET_UNDER_WAY = 100
_GOLDEN = 0.6180339887
_OUTPUTS = ("text_output", "finish_reason", "stop_reason")
# Field 2 of ModelStreamInferResponse and 6 of ModelInferResponse, length-delimited.
_RESPONSE, _CONTENTS = bytes([2 << 3 | 2]), bytes([6 << 3 | 2])
_MAX_FRAME = 16_384


def tokens_before(number: int, tokens: int) -> int:
    """Return the tokens that answer `number` has when it starts, of `tokens` in total."""
    return int(tokens * (number * _GOLDEN % 1)) if number < MET_UNDER_WAY else 0


class Texts:
    """The messages of one answer, framed."""

    def __init__(self, request: pb.ModelInferRequest, stream: int) -> None:
        self._stream = stream
        self._heads = [_head(request, final=final) for final in (False, True)]

    def frames(self, tokens: int, *, final: bool) -> list[bytes]:
        """Return the DATA frames of the message with the text of that many tokens."""
        text = PIECE * tokens
        reason = b"length" if final else b"None"
        told = b"".join(_contents(each) for each in (text, reason, b"None"))
        head = self._heads[final]
        body = _RESPONSE + varint(len(head) + len(told)) + head + told
        data = frames.grpc_message(body)
        return [
            frames.frame(frames.DATA, 0, self._stream, data[at : at + _MAX_FRAME])
            for at in range(0, len(data), _MAX_FRAME)
        ]


def _contents(text: bytes) -> bytes:
    return _CONTENTS + varint(4 + len(text)) + struct.pack("<I", len(text)) + text


def _head(request: pb.ModelInferRequest, *, final: bool) -> bytes:
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
    response.id = request.id
    response.parameters["triton_final_response"].bool_param = final
    for name in _OUTPUTS:
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
    return bytes(response.SerializeToString())
