"""What a request's head must not say: things that two readers of it could understand in two ways.

httptools (llhttp) already refuses contradicting lengths, folded lines, bare line feeds, spaces
before colons and odd chunk sizes. These are left: each of them lets a proxy in front and the
gateway disagree on where a request ends or whose it is (RFC 9112, 11.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.http.errors import MalformedRequest

_VERSIONS = frozenset({"1.0", "1.1"})
# Of these the first would be taken here and perhaps the last by whoever checked it before.
_ONCE = frozenset(
    {
        *(b"authorization", b"content-encoding", b"content-type", b"expect", b"host"),
        *(b"transfer-encoding", b"upgrade", b"x-api-key"),
    }
)
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name; of several, the last. Their names are in lower case.

    Raises MalformedRequest.
    """
    if version not in _VERSIONS:
        raise MalformedRequest("Only HTTP/1.0 and HTTP/1.1 are spoken here.")
    fields = dict(headers)
    if len(fields) < len(headers):
        _check_once(headers)
    if version == "1.1" and b"host" not in fields:
        raise MalformedRequest("The header host is missing.")
    coding = fields.get(b"transfer-encoding")
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        raise MalformedRequest("transfer-encoding: allowed: chunked, in HTTP/1.1.")
    if version == "1.0":
        # What it asks for would be taken for the answer (RFC 9110, 10.1.1).
        fields.pop(b"expect", None)
    return fields


def _check_once(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises MalformedRequest where one came twice that must not."""
    single = [name for name, _ in headers if name in _ONCE]
    twice = next((name for name in single if single.count(name) > 1), None)
    if twice is not None:
        raise MalformedRequest(f"The header {twice.decode()} came more than once.")


def framing(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    """The one of checked headers that tells where the body ends; None where there is none."""
    return next(
        (
            (name, value)
            for name, value in headers
            if name in _FRAMING and value.strip(b"0")  # a length of 0 is no body
        ),
        None,
    )
