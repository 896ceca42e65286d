"""Answers of the scripted upstream in the format of the llmapi model: the complete text so far.

The first 100 concurrent answers start at different positions. A window then covers all positions of
an answer equally, even if an answer takes longer than the window.
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
# Protobuf tags of field 2 of ModelStreamInferResponse and field 6 of ModelInferResponse.
_RESPONSE, _CONTENTS = bytes([2 << 3 | 2]), bytes([6 << 3 | 2])
_MAX_FRAME = 16_384


def tokens_before(number: int, tokens: int) -> int:
    """Return the number of tokens, out of `tokens`, that answer `number` has at its start."""
    return int(tokens * (number * _GOLDEN % 1)) if number < MET_UNDER_WAY else 0


class Texts:
    """Framed messages of one answer."""

    def __init__(self, request: pb.ModelInferRequest, stream: int) -> None:
        self._stream = stream
        self._heads = [_head(request, final=final) for final in (False, True)]

    def frames(self, tokens: int, *, final: bool) -> list[bytes]:
        """Return the DATA frames of the message with the text of `tokens` tokens."""
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
