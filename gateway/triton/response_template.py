"""The one id of a response, read from where it was in an earlier one.

The responses to a streaming request differ in the token and in nothing else: same names, same
shapes, same lengths. So once one has been parsed, the others are compared with its bytes and the id
is taken from its place: half a microsecond, where parsing and walking the tensors takes 4.
"""

from __future__ import annotations

import struct

from tritonclient.grpc import service_pb2 as pb

# Field 6 of ModelInferResponse, length-delimited: raw_output_contents, last on the wire.
_RAW_OUTPUT_CONTENTS = bytes([6 << 3 | 2])
_ONE = (1).to_bytes(4, "little")
_ID = struct.Struct("<i")


class ResponseTemplate:
    """All bytes of a response but the four of its id."""

    def __init__(self, data: bytes, place: int) -> None:
        self._place = place
        self._before = data[:place]
        self._after = data[place + _ID.size :]
        self._size = len(data)

    @classmethod
    def of(cls, data: bytes, response: pb.ModelInferResponse) -> ResponseTemplate | None:
        """That of the serialized ModelStreamInferResponse `data`, parsed as `response`.

        None unless it holds one id of one beam and is laid out as Triton does it.
        """
        contents = list(response.raw_output_contents)
        tensors = {output.name: at for at, output in enumerate(response.outputs)}
        ids, length = tensors.get("output_ids"), tensors.get("sequence_length")
        if ids is None or length is None or len(contents) != len(response.outputs):
            return None
        if contents[length] != _ONE or any(len(raw) != _ID.size for raw in contents):
            return None
        fields = [_RAW_OUTPUT_CONTENTS + bytes([len(raw)]) + raw for raw in contents]
        if not data.endswith(b"".join(fields)):
            return None
        after = _ID.size + len(b"".join(fields[ids + 1 :]))
        return cls(data, len(data) - after)

    def token(self, data: bytes) -> int | None:
        """The id in another response of this stream, None if that must be parsed after all."""
        if len(data) == self._size and data.startswith(self._before) and data.endswith(self._after):
            token: int = _ID.unpack_from(data, self._place)[0]
            return token
        return None
