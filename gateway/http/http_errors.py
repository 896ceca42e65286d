"""Errors of the HTTP layer, which are raised before the JSON of a request is parsed."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import GatewayError


class MalformedRequest(GatewayError):
    """The request is not valid HTTP, or a proxy could read it differently than this gateway."""


class HeadersTooLarge(GatewayError):
    """The URL and headers of the request are together longer than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The URL and headers are larger than {limit} bytes.")
        self.limit = limit


class SlowRequest(GatewayError):
    """The request did not arrive in time."""


class TooManyConnections(GatewayError):
    """The connection limit of this process or of the client's address is reached."""

    def __init__(self) -> None:
        super().__init__("The gateway has as many connections as it takes; try again.")


class UnknownUrl(GatewayError):
    """No endpoint has this path.

    `advice` is a sentence that names a similar path; empty if there is no similar path.
    """

    def __init__(self, method: str, path: str, advice: str = "") -> None:
        super().__init__(f"Unknown URL: {method} {path}.{advice}")
        self.path = path


class ForWebsites(GatewayError):
    """The request comes from a web page whose site is not allowed to call this gateway."""


class MethodNotAllowed(GatewayError):
    """The endpoint of this path does not accept this HTTP method."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed on {path}.")
        self.allowed = allowed


class WebSocketNotOffered(GatewayError):
    """A client tried to upgrade to WebSocket; the endpoint is served over plain HTTP only."""

    def __init__(self, path: str) -> None:
        super().__init__(f"WebSocket is not offered here; send POST {path} over HTTP instead.")


class ContentTooLarge(GatewayError):
    """The request's body, or a part of the body, is longer than `limit` bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"The {what} is larger than {limit} bytes.")
        self.limit = limit


class UnsupportedMediaType(GatewayError):
    """The body has a media type or encoding that the endpoint does not accept."""

    def __init__(self, header: str, found: str, allowed: str) -> None:
        super().__init__(f"{header}: found {found or 'none'}; allowed: {allowed}.")
        self.header = header
