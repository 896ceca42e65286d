"""Finding the new part of a text that is sent complete each time.

The time taken depends only on the length of the new part.

See decision 063 in docs/decisions.
"""

from __future__ import annotations

import codecs

from gateway.errors import EngineError

_REPLACEMENT = "\ufffd".encode()
# Bytes at the end of the delivered text that are compared with the next text, to detect changes.
_SEAM_BYTES = 64
# Maximum number of U+FFFD at the end of a text that are held back. An incomplete character is shown
# as fewer. Without a limit, a model that writes nothing but U+FFFD would block the event loop:
# all of them would be searched again for each response.
_MAX_HELD_BACK_CHARS = 64
_decode = codecs.utf_8_decode


class AccumulatedText:
    """Reader of a growing text (UTF-8) that is received complete each time. It delivers new parts.

    Delivered text cannot be changed any more. So a character whose last tokens are missing is held
    back until it is complete: until then the text ends in one or more U+FFFD, or in half of the
    character's bytes. Only the text after the delivered part is decoded. The end of the delivered
    part, the seam, is compared with each received text.
    """

    def __init__(self) -> None:
        self._delivered_bytes = 0
        self._seam = b""

    def take_new(self, data: bytes, start: int = 0, end: int | None = None) -> str:
        """Return what the text ``data[start:end]`` adds to the delivered text.

        An incomplete character at its end is held back. A text that is shorter than the delivered
        one adds nothing, if it agrees with the seam. Raises EngineError if the delivered text has
        changed, because nothing after it would be right.
        """
        end = len(data) if end is None else end
        new = start + self._delivered_bytes
        seam = new - len(self._seam)
        # A text that is shorter than the delivered one has only a part of the seam, or none of it.
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
