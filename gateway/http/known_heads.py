"""Cache of the heads (request line and headers) of refused requests.

In a flood of requests, each client sends the same head again and again. If a head is in the cache,
the request can be refused without parsing the head again.

The cache compares bytes and is not a second parser. A cached head has been parsed by httptools and
accepted by `check_head`. A later request matches only if all bytes of its head are the same, apart
from the digits of the content-length. The cache and httptools therefore always agree on where a
request ends.

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
# Maximum number of headers in a cached head. Each header takes about 60 bytes in addition to its
# text.
_MAX_FIELDS = 64

# Pattern of the content-length header in the bytes of a head. A match cannot be part of another
# header's value, because the parser refuses folded lines and bare line feeds. The matched digits
# are always a valid length, because the parser accepts all numbers of up to seven digits.
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,7})\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
# Placeholder in a cache key for the digits of the content-length. The parser refuses heads with
# this byte, so no head can contain the placeholder itself.
_DIGITS = b"\0"
# Headers that exclude a request from the cache. The end of such a request does not depend on the
# content-length alone, or the client waits for the server before it sends the body.
_OTHER_FRAMING = frozenset({b"transfer-encoding", b"expect", b"upgrade"})


class KnownHead(NamedTuple):
    """Path and headers of a cached head. `fields` has the headers by lower-case name.

    The content-length in `fields` is that of the request whose head was cached, so it must not be
    used for other requests.
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
        """Hashes of cache keys: one for each head that was passed to `add`. Cleared when full."""

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, data: bytes) -> tuple[KnownHead, int] | None:
        """Return the cached head of the request in `data`, and the size of the body in bytes.

        `data` must start with the first byte of a request. Return None if the head is not cached,
        or if `data` is not exactly one request with its complete body.
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
        """Cache the head of a refused request. The first call for a head only stores a hash.

        The second call for the same head caches the head. The request must be an HTTP/1.1 POST that
        keeps its connection open.

        Args:
            data: received bytes, starting with the first byte of the request.
            path: the path of the request.
            fields: the headers of the request, by lower-case name.
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
            # Cache a head only at the second request. A head with a unique request id never
            # repeats, and caching such a head would cost more than parsing it.
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen.add(hash(key))
            return
        self._heads[key] = KnownHead(path, fields)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)


def _split(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the cache key of the head in `data`, and the digits of its content-length.

    Return None if `data` is not a head with a content-length, followed by exactly that many bytes.
    """
    end = data.find(_END, 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    match = _LENGTH.search(data, 0, end + 2)
    if match is None or end + len(_END) + int(match[1]) != len(data):
        return None
    begin, behind = match.span(1)
    return b"".join((data[:begin], _DIGITS, data[behind:end])), match[1]
