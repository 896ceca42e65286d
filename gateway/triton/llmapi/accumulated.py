"""Search for the new part of a text, when each response has the complete text so far.

The search takes time only for the new part.

See decision 063 in docs/decisions.
"""

from __future__ import annotations

import codecs

from gateway.errors import EngineError

_REPLACEMENT = "\ufffd".encode()
# Number of bytes at the end of the delivered text that are compared with the next received text, to
# detect changes.
_SEAM_BYTES = 64
# Maximum number of U+FFFD that are held back at the end of a text. An incomplete character appears
# as only a few of them. Without this limit, a model that writes only U+FFFD would block the event
# loop, because all of them would be searched again for each response.
_MAX_HELD_BACK_CHARS = 64
_decode = codecs.utf_8_decode


class AccumulatedText:
    """Reader of a growing UTF-8 text that is received completely each time. It returns new parts.

    Delivered text cannot be changed later. So an incomplete character at the end is held back until
    its last tokens arrive. Until then, the text ends with one or more U+FFFD, or with some of the
    character's bytes. Only the bytes after the delivered text are decoded. The last bytes of the
    delivered text (the seam) are compared with each received text.
    """

    def __init__(self) -> None:
        self._delivered_bytes = 0
        self._seam = b""

    def take_new(self, data: bytes, start: int = 0, end: int | None = None) -> str:
        """Return the part of the text ``data[start:end]`` that was not delivered yet.

        An incomplete character at the end is held back. Return "" for a text that is shorter than
        the delivered text but agrees with it. Raise EngineError if the text differs from the
        delivered text.
        """
        end = len(data) if end is None else end
        new = start + self._delivered_bytes
        seam = new - len(self._seam)
        # If the text is shorter than the delivered text, compare only the part of the seam that it
        # contains.
        if not data.startswith(self._seam, seam, end) and (
            end >= new or data[seam:end] != self._seam[: max(0, end - seam)]
        ):
            raise EngineError("The engine changed a text that it had given already.")
        if data.endswith(_REPLACEMENT, new, end):
            least = max(new, end - _MAX_HELD_BACK_CHARS * len(_REPLACEMENT))
            while end > least and data.endswith(_REPLACEMENT, least, end):
                end -= len(_REPLACEMENT)
        added, used = _decode(data[new:end], "replace", False)
        if used:
            new += used
            self._delivered_bytes += used
            self._seam = data[new - _SEAM_BYTES if new > start + _SEAM_BYTES else start : new]
        return added
