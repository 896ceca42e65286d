"""Checks of request headers against HTTP request smuggling.

If headers are ambiguous, a proxy may read them differently than the gateway behind it. The two
could then disagree on where a request ends or who sent it (RFC 9112, 11.2). These checks refuse
ambiguous headers. httptools (llhttp) itself refuses contradicting lengths, folded lines, bare line
feeds, spaces before colons and invalid chunk sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.http.http_errors import MalformedRequest

_VERSIONS = frozenset({"1.0", "1.1"})
# Headers that must not be repeated. Otherwise a proxy might check the first value, while the
# gateway uses the last value.
_SINGLE_HEADERS = frozenset(
    {
        *(b"authorization", b"content-encoding", b"content-type", b"expect", b"host"),
        *(b"transfer-encoding", b"upgrade", b"x-api-key"),
    }
)
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the headers by lower-case name. For a repeated header, the last value is returned.

    The names in `headers` must be in lower case. Raise MalformedRequest if this server does not
    accept the HTTP version or the headers.
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
        # Ignore `expect`, because an HTTP/1.0 client would mistake `100 Continue` for the final
        # response (RFC 9110, 10.1.1).
        fields.pop(b"expect", None)
    return fields


def _check_once(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise MalformedRequest if a header in `_SINGLE_HEADERS` is repeated."""
    single = [name for name, _ in headers if name in _SINGLE_HEADERS]
    twice = next((name for name in single if single.count(name) > 1), None)
    if twice is not None:
        raise MalformedRequest(f"The header {twice.decode()} came more than once.")


def find_framing(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    """Return the name and value of the content-length or transfer-encoding header.

    Return None if the request has no body. `headers` must have passed `check_head`.
    """
    return next(
        (
            (name, value)
            for name, value in headers
            if name in _FRAMING and value.strip(b"0")  # a content-length of 0 means no body
        ),
        None,
    )
