"""Where the text is in a response of the llmapi repository's model, found by an earlier response.

The responses of one stream differ in the text and in the lengths around it, until the last. So once
one has been parsed, the bytes before and behind the text are compared, and the text is not touched:
2 us whatever its length, where to parse 4 KB takes 10 and copies them twice.
"""

from __future__ import annotations

import struct

from gateway.triton.protobuf import pb
from gateway.triton.request import varint

# Field 2 of ModelStreamInferResponse, and 6 of ModelInferResponse: length-delimited.
_INFER_RESPONSE = bytes([2 << 3 | 2])
_CONTENTS = bytes([6 << 3 | 2])
_LENGTH = struct.Struct("<I")


class TextTemplate:
    """What surrounds the text of a response that is not final."""

    def __init__(self, before: bytes, behind: bytes) -> None:
        self._before = before
        self._behind = behind

    @classmethod
    def of(cls, data: bytes, response: pb.ModelInferResponse) -> TextTemplate | None:
        """That of the serialized ModelStreamInferResponse `data`, parsed as `response`.

        None unless it has one text and is laid out as Triton does it.
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
        """From where to where the text is in another response of this stream.

        None if that must be parsed after all.
        """
        _, at = _varint(data, 1)
        if not (data.startswith(self._before, at) and data.endswith(self._behind)):
            return None
        size, start = _varint(data, at + len(self._before))
        end = start + size
        if end + len(self._behind) != len(data) or size < _LENGTH.size:
            return None
        # The tensor has one text, with its own length before it.
        if _LENGTH.unpack_from(data, start)[0] != size - _LENGTH.size:
            return None
        return start + _LENGTH.size, end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A length of protobuf's, and where it ends; of what is none, anything."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at
