"""Failures of HTTP itself: of what carries a request, before anybody asks what it wants."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import GatewayError


class MalformedRequest(GatewayError):
    """This is not HTTP, or not such that every reader of it would understand the same."""


class HeadersTooLarge(GatewayError):
    """The URL and headers have more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The URL and headers are larger than {limit} bytes.")
        self.limit = limit


class SlowRequest(GatewayError):
    """The request did not arrive in time."""


class TooManyConnections(GatewayError):
    """This process has as many as it takes, or this client's address has."""

    def __init__(self) -> None:
        super().__init__("The gateway has as many connections as it takes; try again.")


class UnknownUrl(GatewayError):
    """No endpoint has this path; `advice` says which path may be meant."""

    def __init__(self, method: str, path: str, advice: str = "") -> None:
        super().__init__(f"Unknown URL: {method} {path}.{advice}")
        self.path = path


class ForWebsites(GatewayError):
    """A browser has sent this for a website, which nobody has let in."""


class MethodNotAllowed(GatewayError):
    """The URL is known, for the methods `allowed`."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed on {path}.")
        self.allowed = allowed


class WebSocketNotOffered(GatewayError):
    """A client asks to go on over WebSocket, where the same is served over plain HTTP."""

    def __init__(self, path: str) -> None:
        super().__init__(f"WebSocket is not offered here; send POST {path} over HTTP instead.")


class ContentTooLarge(GatewayError):
    """`what` has more than `limit` bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"The {what} is larger than {limit} bytes.")
        self.limit = limit


class UnsupportedMediaType(GatewayError):
    """The body is not of the kind, or not in the encoding, that the endpoint reads."""

    def __init__(self, header: str, found: str, allowed: str) -> None:
        super().__init__(f"{header}: found {found or 'none'}; allowed: {allowed}.")
        self.header = header
