"""The new part of a text that is sent complete each time, at a cost of the new part only.

See decision 063 in docs/decisions.
"""

from __future__ import annotations

import codecs

from gateway.errors import EngineError

_REPLACEMENT = "\ufffd".encode()
# Bytes of delivered text that are compared again before more is delivered.
_SEAM_BYTES = 64
# More than any incomplete character is shown as. A model may write nothing but U+FFFD, and going
# back over all of it each time would block the event loop.
_MAX_HELD_BACK_CHARS = 64
_decode = codecs.utf_8_decode


class AccumulatedText:
    """Reader of the texts so far, UTF-8, each one complete; delivered text stays delivered.

    In a growing text only the end may change: a character whose last tokens are missing is one or
    more U+FFFD, or half of its bytes, and is held back until it is complete. Only the text after
    the delivered part is read, and the seam between both is compared.
    """

    def __init__(self) -> None:
        self._delivered_bytes = 0
        self._seam = b""

    def take_new(self, data: bytes, start: int = 0, end: int | None = None) -> str:
        """Return what ``data[start:end]`` adds to the delivered text, without an incomplete
        character at its end.

        A text that is shorter than the delivered one, and equals its beginning as far as known,
        adds nothing. Raises EngineError if the delivered text has changed: nothing after it would
        be right.
        """
        end = len(data) if end is None else end
        new = start + self._delivered_bytes
        seam = new - len(self._seam)
        # Only a text that was cut short has less of it than the seam.
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
