"""Cache of the heads (request line and headers) of refused requests.

In a flood, the same clients repeat the same heads. A request whose head is in the cache can be
refused without parsing it again. The cache is not a second parser, so it cannot disagree with
httptools on where a request ends: a head is known only if its bytes equal those of a head that
httptools has parsed and `check_head` has accepted. Only the digits of the content-length header may
differ.

See decision 056 in docs/decisions.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

MAX_HEADS = 1024
MAX_HEAD_BYTES = 2048
MAX_SEEN = 8192
# Maximum number of headers of a cached head. Each takes about 60 bytes in addition to its text.
_MAX_FIELDS = 64

# Content-length header in the bytes of a head. A CRLF is always followed by a header's name,
# because the parser refuses folded lines and bare line feeds. The parser accepts any seven digits
# as a length.
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,7})\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
# Placeholder for the digits of the length in a cache key. The parser refuses heads with this
# character, so no other head can have the same key.
_DIGITS = b"\0"
# Headers whose requests are not cached: the body is framed in another way, or the request is read
# in several steps.
_OTHER_FRAMING = frozenset({b"transfer-encoding", b"expect", b"upgrade"})


class KnownHead(NamedTuple):
    """Parts of a head that a refusal needs: the path, and the headers by lower-case name.

    The content-length in `fields` is the one of the request that was cached.
    """

    path: str
    fields: Mapping[bytes, bytes]


class KnownHeads:
    """LRU cache of at most `MAX_HEADS` heads.

    Only heads of HTTP/1.1 POST requests that keep their connection open are cached.
    """

    def __init__(self) -> None:
        self._heads: OrderedDict[bytes, KnownHead] = OrderedDict()
        self._seen = set[int]()
        """Hashes of the cache keys of heads that have come at least once."""

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, data: bytes) -> tuple[KnownHead, int] | None:
        """Return the cached head of the request in `data`, and the length of its body in bytes.

        Return None if the head is not cached, or if `data` is not exactly one request with its
        complete body. `data` must start with the first byte of a request.
        """
        found = _split(data)
        if found is None:
            return None
        key, length = found
        head = self._heads.get(key)
        if head is None:
            return None
        self._heads.move_to_end(key)
        return head, int(length)

    def add(self, data: bytes, path: str, fields: Mapping[bytes, bytes]) -> None:
        """Cache the head of a refused request, at the second request with the same head.

        The request must be an HTTP/1.1 POST that keeps its connection open.

        Args:
            data: received bytes, from the first byte of the request.
            path: the path in the head.
            fields: the headers in the head, by lower-case name.
        """
        found = _split(data)
        if found is None:
            return
        key, length = found
        if len(fields) > _MAX_FIELDS:
            return
        if fields.get(b"content-length") != length or not _OTHER_FRAMING.isdisjoint(fields):
            return
        if hash(key) not in self._seen:
            # Cache a head only when it comes again. A head with an id of its own never does, and
            # caching it would cost more than parsing.
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen.add(hash(key))
            return
        self._heads[key] = KnownHead(path, fields)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)


def _split(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the cache key of the head in `data`, and the digits of its content-length.

    Return None if `data` is not a head with a content-length and a body of exactly this length.
    """
    end = data.find(_END, 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    match = _LENGTH.search(data, 0, end + 2)
    if match is None or end + len(_END) + int(match[1]) != len(data):
        return None
    begin, behind = match.span(1)
    return b"".join((data[:begin], _DIGITS, data[behind:end])), match[1]
