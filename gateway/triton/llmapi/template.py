"""Fast search for the text in a response of the llmapi model, without parsing the response.

All responses of a stream except the last differ only in the text and in the length fields before
it. One response is parsed as a template. For each later response, the bytes before and after the
text are compared with the template. This takes 1 us for a text of any length. Parsing a response of
4 KB would take 10 us and copy the text twice.
"""

from __future__ import annotations

import struct

from gateway.triton.protobuf import pb
from gateway.triton.request import varint

# Protobuf keys of two length-delimited fields: infer_response (field 2 of ModelStreamInferResponse)
# and raw_output_contents (field 6 of ModelInferResponse).
_INFER_RESPONSE = bytes([2 << 3 | 2])
_CONTENTS = bytes([6 << 3 | 2])
_LENGTH = struct.Struct("<I")
_LENGTH_BYTES = _LENGTH.size
_unpack_length = _LENGTH.unpack_from


class TextTemplate:
    """The bytes before and after the text, in every response of a stream except the last."""

    def __init__(self, before: bytes, behind: bytes) -> None:
        self._before = before
        self._before_size = len(before)
        self._behind = behind
        self._behind_size = len(behind)

    @classmethod
    def of(cls, data: bytes, response: pb.ModelInferResponse) -> TextTemplate | None:
        """Return the template for the stream to which a response belongs.

        `data` is the serialized ModelStreamInferResponse, and `response` is its parsed content.
        Return None if the response does not have exactly one text in Triton's usual layout.
        """
        names = [output.name for output in response.outputs]
        contents = list(response.raw_output_contents)
        if names.count("text_output") != 1 or len(contents) != len(names):
            return None
        at = names.index("text_output")
        fields = [_CONTENTS + varint(len(raw)) + raw for raw in contents]
        body = response.ByteSize()
        head = _INFER_RESPONSE + varint(body)
        tail = b"".join(fields)
        if len(data) != len(head) + body or not (data.startswith(head) and data.endswith(tail)):
            return None
        before = data[len(head) : len(data) - len(tail)] + b"".join(fields[:at]) + _CONTENTS
        template = cls(before, b"".join(fields[at + 1 :]))
        return template if template.text(data) is not None else None

    def text(self, data: bytes) -> tuple[int, int] | None:
        """Return (start, end) of the text in another response of this stream.

        Return None if the response does not match the template and has to be parsed. This method is
        called once per token. To save time, it does not read protobuf's length fields. From the
        length of `data`, it computes how many bytes the length fields have.
        """
        end = len(data) - self._behind_size
        at = 1 + _length_bytes(len(data) - 1)
        start = at + self._before_size
        start += _length_bytes(end - start)
        if not (
            end - start >= _LENGTH_BYTES
            # Check that the tensor has only one text, by the length before the text.
            and _unpack_length(data, start)[0] == end - start - _LENGTH_BYTES
            and data.startswith(self._before, at)
            and data.endswith(self._behind)
        ):
            return None
        return start + _LENGTH_BYTES, end


def _length_bytes(size: int) -> int:
    """Return the number of bytes of a protobuf length field.

    `size` is the total number of bytes of the length field and of the content behind it.
    """
    if size < 129:
        return 1
    if size < 16_386:
        return 2
    return next(count for count in range(3, 11) if size - count < 1 << 7 * count)
