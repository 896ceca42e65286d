"""Encoding of embeddings as JSON, and responses that are sent in parts to limit memory.

2048 embeddings of 4096 numbers are 90 MB of text. Encoding this text takes seconds, so a thread
encodes it. The thread holds the GIL while it encodes one embedding. Other threads can run between
two embeddings. Sending the text in one part would copy all of the text once more.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MAX_INLINE_NUMBERS = 8192
"""Maximum count of numbers that are encoded on the event loop, which takes a millisecond."""
_PIECE_BYTES = 256 * 1024


def write_embeddings(rows: Any, first: int, *, as_base64: bool) -> bytes:
    """Return the rows of a float32 array as OpenAI's `embedding` objects, separated by commas.

    `first` is the index of the first row in the answer. With `as_base64`, an embedding is the
    base64 of its little-endian float32 bytes. numpy has the same byte order on the machines that
    Triton runs on.
    """
    objects = []
    for index, row in enumerate(rows, first):
        if as_base64:
            vector = b'"%b"' % base64.b64encode(row.tobytes())
        else:
            vector = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
        objects.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector))
    return b",".join(objects)


def estimate_bytes(rows: int, width: int, *, as_base64: bool) -> int:
    """Estimate how many bytes embeddings take in memory, as numbers and as text together.

    `rows` is the number of embeddings, `width` the count of numbers in each.
    """
    return rows * width * (4 + (6 if as_base64 else 12))


class LargeAnswer(Response):
    """A JSON response whose body is a list of pieces. Each piece is freed once it is sent.

    `on_sent` is called after the last piece, or when the client leaves or sending fails.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        headers: dict[str, str],
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(media_type="application/json", headers=headers)
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = list(reversed(pieces))
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            while self._pieces:
                piece = self._pieces.pop()
                for begin in range(0, len(piece), _PIECE_BYTES):
                    part = piece[begin : begin + _PIECE_BYTES]
                    more = bool(self._pieces) or begin + _PIECE_BYTES < len(piece)
                    await send({"type": "http.response.body", "body": part, "more_body": more})
        finally:
            self._on_sent()
