"""Answers of the scripted Triton in the format of the llmapi repository's model.

Each message has the complete text so far, so messages become longer during an answer. An answer may
take longer than a measurement window. The window would then contain only short messages from the
beginnings of answers. Each of the first 100 concurrent answers therefore begins in the middle: its
first message already has a part of the text. The length of this part varies from answer to answer.
"""

from __future__ import annotations

import struct

from tritonclient.grpc import service_pb2 as pb

from bench import frames
from gateway.triton.request import varint

PIECE = b" aa~"
"""Text of each token, as long as an average English token. The load client counts the `~`."""

MET_UNDER_WAY = 100
_GOLDEN = 0.6180339887
_OUTPUTS = ("text_output", "finish_reason", "stop_reason")
# Protobuf tags of `ModelStreamInferResponse.infer_response` (field 2) and of
# `ModelInferResponse.raw_output_contents` (field 6).
_RESPONSE, _CONTENTS = bytes([2 << 3 | 2]), bytes([6 << 3 | 2])
_MAX_FRAME = 16_384


def tokens_before(number: int, tokens: int) -> int:
    """Return the number of tokens that an answer skips, as if they were already sent.

    `number` counts the concurrent answers from 0. `tokens` is the length of the complete answer.
    The result is 0 if `number` is 100 or more.
    """
    return int(tokens * (number * _GOLDEN % 1)) if number < MET_UNDER_WAY else 0


class Texts:
    """Encoder of the messages of one answer."""

    def __init__(self, request: pb.ModelInferRequest, stream: int) -> None:
        self._stream = stream
        self._heads = [_head(request, final=final) for final in (False, True)]

    def frames(self, tokens: int, *, final: bool) -> list[bytes]:
        """Return the DATA frames of one message with the text of the first `tokens` tokens."""
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
