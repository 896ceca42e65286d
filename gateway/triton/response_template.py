"""Fast reading of the token id in a streamed response, without parsing the response.

All responses to a streaming request have the same names, shapes and lengths. They differ only in
the token id and in the statistics, and statistics are needed only from the first responses. One
response is parsed as a template. For each later response, the other bytes are compared with the
template, and the token id is read from the same position. This takes 0.5 us; parsing takes 4 us.

See decisions 011 and 053 in docs/decisions.
"""

from __future__ import annotations

import struct

from gateway.triton.protobuf import pb
from gateway.triton.request import varint

# Protobuf key of the length-delimited field 6 of ModelInferResponse, raw_output_contents. This
# field is serialized last.
_RAW_OUTPUT_CONTENTS = bytes([6 << 3 | 2])
_ONE = (1).to_bytes(4, "little")
_ID = struct.Struct("<i")


class ResponseTemplate:
    """Layout of the responses of a stream that have one token each.

    Two ranges of bytes are equal in all these responses: the bytes before the token id, and the
    field with `sequence_length`. The layout consists of these bytes, their positions, and the
    position of the token id.
    """

    def __init__(self, data: bytes, id_at: int, length_at: int, length_end: int) -> None:
        self._before = data[:id_at]
        self._id_at = id_at
        self._length = data[length_at:length_end]
        self._length_at = length_at
        self._length_end = length_end
        self._size = len(data)

    @classmethod
    def of(cls, data: bytes, response: pb.ModelInferResponse) -> ResponseTemplate | None:
        """Return the template for the stream to which a response belongs.

        `data` is the serialized ModelStreamInferResponse, and `response` is its parsed content.
        Return None if the response does not have one token id of one beam in Triton's usual layout.
        """
        contents = list(response.raw_output_contents)
        tensors = {output.name: at for at, output in enumerate(response.outputs)}
        ids, length = tensors.get("output_ids"), tensors.get("sequence_length")
        if ids is None or length is None or len(contents) != len(response.outputs):
            return None
        if len(contents[ids]) != _ID.size or contents[length] != _ONE:
            return None
        fields = [_RAW_OUTPUT_CONTENTS + varint(len(raw)) + raw for raw in contents]
        if not data.endswith(b"".join(fields)):
            return None
        ends = [len(data) - len(b"".join(fields[at + 1 :])) for at in (ids, length)]
        return cls(data, ends[0] - _ID.size, ends[1] - len(fields[length]), ends[1])

    def token(self, data: bytes) -> int | None:
        """Return the token id in another response of this stream.

        Return None if the response must be parsed, because its layout may differ.
        """
        if (
            len(data) == self._size
            and data[: self._id_at] == self._before
            and data[self._length_at : self._length_end] == self._length
        ):
            token: int = _ID.unpack_from(data, self._id_at)[0]
            return token
        return None
