"""What is new in a text that comes whole each time, at a cost of what is new alone."""

from __future__ import annotations

import codecs

from gateway.errors import EngineError

_REPLACEMENT = "\ufffd".encode()
# So much of what was given out is looked at again before more of it is.
_SEAM_BYTES = 64
# More than any character is shown as while it is not there yet. A model may write nothing else, and
# to go back over all of it each time would cost others their turn.
_MAX_HELD_BACK_CHARS = 64
_decode = codecs.utf_8_decode


class AccumulatedText:
    """Reads the texts so far, UTF-8, each as a whole; what was given out stays given out.

    Of a text that grows, only its end may change: a character whose last tokens are not there yet
    is one or more U+FFFD, or half of its bytes, and is held back until it is whole. What is behind
    the text that was given is looked at, and the seam between both.
    """

    def __init__(self) -> None:
        self._delivered_bytes = 0
        self._seam = b""

    def take_new(self, data: bytes, start: int = 0, end: int | None = None) -> str:
        """What a text has more than was given out, but for an incomplete character at its end.

        The text is ``data[start:end]``.

        A text that is shorter than what was given, and its beginning as far as is known, has
        nothing more. Raises EngineError when what was given has become another text: nothing
        behind it would be right.
        """
        end = len(data) if end is None else end
        new = start + self._delivered_bytes
        seam = new - len(self._seam)
        # Only of a text that was cut short is there less of it than the seam.
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
