"""Fast finding of the text in a response of the llmapi model, by comparison with an earlier one.

The responses of one stream, except the last, differ only in the text and in the length fields
before it. So once a response has been parsed, only the bytes before and after the text of later
ones are compared. That takes 1 us for any length, against 10 us and two copies for parsing 4 KB.
"""

from __future__ import annotations

import struct

from gateway.triton.protobuf import pb
from gateway.triton.request import varint

# Field 2 of ModelStreamInferResponse, and 6 of ModelInferResponse: length-delimited.
_INFER_RESPONSE = bytes([2 << 3 | 2])
_CONTENTS = bytes([6 << 3 | 2])
_LENGTH = struct.Struct("<I")
_LENGTH_BYTES = _LENGTH.size
_unpack_length = _LENGTH.unpack_from


class TextTemplate:
    """The bytes around the text of a response that is not final."""

    def __init__(self, before: bytes, behind: bytes) -> None:
        self._before = before
        self._before_size = len(before)
        self._behind = behind
        self._behind_size = len(behind)

    @classmethod
    def of(cls, data: bytes, response: pb.ModelInferResponse) -> TextTemplate | None:
        """Return the template of the serialized ModelStreamInferResponse `data`, parsed as
        `response`.

        Return None unless the response has one text in Triton's usual layout.
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

        Return None if that response has to be parsed. This is called once per token. Protobuf's
        length fields are skipped: the size of the data after such a field shows how many bytes the
        field has.
        """
        end = len(data) - self._behind_size
        at = 1 + _length_bytes(len(data) - 1)
        start = at + self._before_size
        start += _length_bytes(end - start)
        if not (
            end - start >= _LENGTH_BYTES
            # The tensor has one text, with its own length before it.
            and _unpack_length(data, start)[0] == end - start - _LENGTH_BYTES
            and data.startswith(self._before, at)
            and data.endswith(self._behind)
        ):
            return None
        return start + _LENGTH_BYTES, end


def _length_bytes(size: int) -> int:
    """Return how many bytes a length field has, if the field and its contents have `size` bytes."""
    if size < 129:
        return 1
    if size < 16_386:
        return 2
    return next(count for count in range(3, 11) if size - count < 1 << 7 * count)
