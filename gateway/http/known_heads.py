"""Heads of refused requests, by their bytes: a flood repeats them, and need not be parsed again.

This is no second parser, so it cannot disagree with the first one on where a request ends. A head
is known if its bytes are those of a head that httptools has parsed and `check_head` has passed.
Only the digits of its content-length may differ, at the place where the parser found that header.

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
# Each field takes some 60 bytes besides its own.
_MAX_FIELDS = 64

# The parser refuses folded lines and bare line feeds, so a header's name follows each CRLF. It
# takes any seven digits for a length.
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,7})\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
# Stands for the digits in a key. The parser refuses it in a head, so no other head has that key.
_DIGITS = b"\0"
# A request with one of these is read in more steps than one, or its body in another way.
_OTHER_FRAMING = frozenset({b"transfer-encoding", b"expect", b"upgrade"})


class KnownHead(NamedTuple):
    """The parts of a head that a refusal needs: the path, and the headers by name.

    The content-length among the headers is that of the first request with this head.
    """

    path: str
    fields: Mapping[bytes, bytes]


class KnownHeads:
    """Heads of POSTs in HTTP/1.1 whose connections stay open: the last `MAX_HEADS` used."""

    def __init__(self) -> None:
        self._heads: OrderedDict[bytes, KnownHead] = OrderedDict()
        self._seen = set[int]()
        """Hashes of the keys of heads that have come once."""

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, data: bytes) -> tuple[KnownHead, int] | None:
        """Return the head of `data` and its body's length; None if the head is not known.

        `data` comes where a request begins. None also if it is not one request with all its body.
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
        """Remember a head that was parsed from `data`, from the second request with it on.

        `data` came where a request begins: a POST in HTTP/1.1 whose connection stays open.
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
            # Heads with an id of their own never come again: to keep them costs more than parsing.
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen.add(hash(key))
            return
        self._heads[key] = KnownHead(path, fields)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)


def _split(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the key of a head and the digits of its content-length.

    Return None unless `data` has as many bytes of body as the digits say.
    """
    end = data.find(_END, 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    match = _LENGTH.search(data, 0, end + 2)
    if match is None or end + len(_END) + int(match[1]) != len(data):
        return None
    begin, behind = match.span(1)
    return b"".join((data[:begin], _DIGITS, data[behind:end])), match[1]
