"""Anthropic's error envelope: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import orjson

from gateway.api import failures
from gateway.api.failures import Failure, status_of
from gateway.errors import ContextLengthExceeded, LimitsUnavailable, Overloaded
from gateway.http.http_errors import TooManyConnections

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Anthropic's error types by HTTP status.

Other statuses below 500 get `invalid_request_error`. Other statuses from 500 on get `api_error`.
Errors in `_BUSY` get `overloaded_error` instead.
"""
_BUSY = (Overloaded, LimitsUnavailable, TooManyConnections)
# Agents recognize a message that begins with this text, and then shorten the conversation.
_TOO_LONG = "prompt is too long: "


def build_envelope(error: Failure) -> bytes:
    """Return Anthropic's error object as JSON."""
    message = failures.build_message(error)
    if isinstance(error, ContextLengthExceeded):
        message = _TOO_LONG + message
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(error, _BUSY):
        kind = "overloaded_error"
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
