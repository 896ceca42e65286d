"""`AccumulatedText`, which finds the new part when each response repeats the complete text so far.

The time for a response depends only on the length of the new part.

See decision 063 in docs/decisions.
"""

from __future__ import annotations

import codecs

from gateway.errors import EngineError

_REPLACEMENT = "\ufffd".encode()
# Number of bytes at the end of the returned text that are compared with the text in the next
# response. A difference shows that the engine has changed text that was already returned.
_SEAM_BYTES = 64
# Maximum number of U+FFFD characters at the end of a text that are held back. An incomplete
# character appears as only a few U+FFFD. But a model may write nothing else than U+FFFD. Without
# the limit, all these characters would be searched again for each response, and the search would
# block the event loop.
_MAX_HELD_BACK_CHARS = 64
_decode = codecs.utf_8_decode


class AccumulatedText:
    """Reader for a growing UTF-8 text that is received completely each time.

    Returned text cannot be changed later. An incomplete character at the end is therefore not
    returned until its last tokens arrive. Until then, the received text ends with one or more
    U+FFFD, or with some of the character's bytes. Only bytes that were not returned yet are
    decoded. The last bytes of the returned text (the "seam") are compared with each received text.
    """

    def __init__(self) -> None:
        self._delivered_bytes = 0
        self._seam = b""

    def take_new(self, data: bytes, start: int = 0, end: int | None = None) -> str:
        """Return the part of the text ``data[start:end]`` that was not returned before.

        An incomplete character at the end is left out until it is complete. Return "" if the
        received text is only a beginning of the text that was returned before. Raise EngineError if
        the received text differs from the text that was returned before.
        """
        end = len(data) if end is None else end
        new = start + self._delivered_bytes
        seam = new - len(self._seam)
        # If the received text is shorter than the returned text, it contains only a part of the
        # seam. Compare only this part.
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
