"""HTTP status and code of every error class, and OpenAI's error envelope.

Lower layers raise errors with facts (which parameter, which limit) and do not know about HTTP.
The envelope is ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from adapters import errors as adapter_errors
from adapters.errors import AdapterError, StoreError, StoreUnavailable
from gateway import errors
from gateway.api.rate_headers import build_rate_headers
from gateway.config.limits import LIMITS
from gateway.http import http_errors

Failure = errors.GatewayError | errors.ClientDisconnected | AdapterError | StoreError
"""Base classes of all errors in `TABLE`."""

# Maximum characters of an error's message and of its `param`. Both may quote values from the
# client's request, which may be megabytes long.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200

_TOKEN_LIMITS = {name for name, kind in LIMITS.items() if kind.counts == "tokens"}

_CLIENT, _SERVER = "invalid_request_error", "server_error"


class ErrorRow(NamedTuple):
    """The HTTP status and OpenAI error fields for an error class.

    Attributes:
        status: the HTTP status.
        type: OpenAI's `type`, which says whether the client or the server is at fault.
        code: OpenAI's `code`, a stable word that programs can check.
        retry_after_s: seconds after which a retry may succeed; None if a retry does not help, or if
            the time depends on the error.
    """

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


def _build_adapter_rows(status: int, *kinds: type[AdapterError]) -> dict[type[Exception], ErrorRow]:
    return {kind: ErrorRow(status, _CLIENT, kind.code) for kind in kinds}


TABLE: Mapping[type[Exception], ErrorRow] = {
    errors.InvalidRequest: ErrorRow(400, _CLIENT),
    errors.UnsupportedParameter: ErrorRow(400, _CLIENT, "unsupported_parameter"),
    # LangChain checks for this code.
    errors.ContextLengthExceeded: ErrorRow(400, _CLIENT, "context_length_exceeded"),
    errors.ConversationsOff: ErrorRow(400, _CLIENT, "unsupported_parameter"),
    errors.ConversationTooLarge: ErrorRow(413, _CLIENT, "conversation_too_large"),
    errors.InvalidKey: ErrorRow(401, _CLIENT, "invalid_api_key"),
    errors.SwitchedOff: ErrorRow(403, _CLIENT),
    errors.ModelNotAllowed: ErrorRow(403, _CLIENT, "model_not_allowed"),
    errors.ModelNotFound: ErrorRow(404, _CLIENT, "model_not_found"),
    errors.NotFound: ErrorRow(404, _CLIENT),
    errors.PreviousResponseNotFound: ErrorRow(404, _CLIENT, "previous_response_not_found"),
    errors.KeyNotFound: ErrorRow(404, _CLIENT, "key_not_found"),
    # No retry-after, as a retry with a wrong key does not help.
    errors.TooManyWrongKeys: ErrorRow(429, _CLIENT, "too_many_wrong_keys"),
    # The type and the time to retry depend on the limit: see `_get_type` and `_build_headers`.
    errors.RateLimited: ErrorRow(429, "requests", "rate_limit_exceeded"),
    # OpenAI's code for an error that SDKs must not retry: the quota may be used up for weeks.
    errors.InsufficientQuota: ErrorRow(429, "insufficient_quota", "insufficient_quota"),
    errors.ClientDisconnected: ErrorRow(499, _CLIENT),  # nginx's status; only for logs and metrics
    errors.InternalError: ErrorRow(500, _SERVER),
    errors.EngineError: ErrorRow(500, _SERVER),
    errors.EngineBroken: ErrorRow(500, _SERVER),
    errors.AdapterDoesNotFit: ErrorRow(500, _SERVER, "adapter_does_not_fit"),
    # Use 500: the operator ended the request on purpose, and 503 would invite a retry.
    errors.EndedByAdmin: ErrorRow(500, _SERVER, "ended_by_operator"),
    errors.BadModelOutput: ErrorRow(502, _SERVER, "bad_model_output"),
    errors.Overloaded: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    errors.ClientDeadlineTooNear: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    errors.AdapterNotReady: ErrorRow(503, _SERVER, "adapter_not_ready", retry_after_s=2),
    errors.LimitsUnavailable: ErrorRow(503, _SERVER, "limits_unavailable", retry_after_s=1),
    errors.DatabaseUnavailable: ErrorRow(503, _SERVER, "database_unavailable", retry_after_s=1),
    errors.ConversationsUnavailable: ErrorRow(
        503, _SERVER, "conversations_unavailable", retry_after_s=1
    ),
    errors.EngineUnavailable: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.EngineUnreachable: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.AnswerLost: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.EngineStepFailed: ErrorRow(503, _SERVER, "engine_step_failed", retry_after_s=1),
    errors.ShuttingDown: ErrorRow(503, _SERVER, "shutting_down", retry_after_s=2),
    errors.RequestTimeout: ErrorRow(504, _SERVER, "timeout"),
    errors.ClientDeadline: ErrorRow(504, _SERVER, "timeout"),
    http_errors.MalformedRequest: ErrorRow(400, _CLIENT),
    http_errors.ForWebsites: ErrorRow(403, _CLIENT),
    http_errors.UnknownUrl: ErrorRow(404, _CLIENT),
    http_errors.MethodNotAllowed: ErrorRow(405, _CLIENT),
    http_errors.SlowRequest: ErrorRow(408, _CLIENT, "request_timeout"),
    http_errors.ContentTooLarge: ErrorRow(413, _CLIENT, "content_too_large"),
    http_errors.UnsupportedMediaType: ErrorRow(415, _CLIENT, "unsupported_media_type"),
    # The Codex client switches from WebSocket to HTTP at once if the status is 426. After other
    # statuses, it first retries for several seconds.
    http_errors.WebSocketNotOffered: ErrorRow(426, _CLIENT, "websocket_not_offered"),
    http_errors.HeadersTooLarge: ErrorRow(431, _CLIENT, "headers_too_large"),
    http_errors.TooManyConnections: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    **_build_adapter_rows(404, adapter_errors.UnknownAdapter, adapter_errors.UnknownVersion),
    **_build_adapter_rows(403, adapter_errors.SourceNotAllowed),
    **_build_adapter_rows(413, adapter_errors.TooLarge),
    **_build_adapter_rows(
        400,
        adapter_errors.BaseMismatch,
        adapter_errors.CorruptFile,
        adapter_errors.IncompleteAdapter,
        adapter_errors.InvalidName,
        adapter_errors.InvalidRank,
        adapter_errors.InvalidSource,
        adapter_errors.LayerOutOfRange,
        adapter_errors.MissingFile,
        adapter_errors.NotFinite,
        adapter_errors.PathEscape,
        adapter_errors.PickleRefused,
        adapter_errors.ShapeMismatch,
        adapter_errors.SourceUnsupported,
        adapter_errors.UnsupportedEngine,
        adapter_errors.UnsupportedFeature,
        adapter_errors.UnsupportedModule,
    ),
    adapter_errors.SourceUnavailable: ErrorRow(
        503, _SERVER, adapter_errors.SourceUnavailable.code, retry_after_s=5
    ),
    StoreError: ErrorRow(500, _SERVER, StoreError.code),
    adapter_errors.WritesRefused: ErrorRow(500, _SERVER, StoreError.code),
    adapter_errors.ChangeUnknown: ErrorRow(500, _SERVER, adapter_errors.ChangeUnknown.code),
    adapter_errors.VersionUnavailable: ErrorRow(
        500, _SERVER, adapter_errors.VersionUnavailable.code
    ),
    StoreUnavailable: ErrorRow(503, _SERVER, StoreUnavailable.code, retry_after_s=2),
}


class ErrorResponse(NamedTuple):
    """The status, headers and body of an error response."""

    status: int
    headers: dict[str, str]
    body: bytes


def build_response(error: Failure, body: Callable[[Failure], bytes] | None = None) -> ErrorResponse:
    """Return the complete error response.

    `body` is a function that encodes the error as the response body; None for OpenAI's envelope.
    """
    return ErrorResponse(
        TABLE[type(error)].status, _build_headers(error), (body or build_envelope)(error)
    )


def build_envelope(error: Failure) -> bytes:
    """Return OpenAI's error object as JSON."""
    param = None
    if isinstance(error, errors.InvalidRequest):
        param = error.param
    elif isinstance(error, AdapterError):
        param = error.field
    fields = {
        "message": build_message(error),
        "type": _get_type(error),
        "param": None if param is None else _clip(param, _MAX_PARAM),
        "code": TABLE[type(error)].code,
    }
    return orjson.dumps({"error": fields})


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status for an error, 200 for None.

    If an error occurs after the response headers were sent, the client has already received a
    different status. The returned status is then used only in logs and metrics.
    """
    if error is None:
        return 200
    return TABLE[type(error) if isinstance(error, Failure) else errors.InternalError].status


def get_refusal_reason(error: Failure) -> str | None:
    """Return a short reason for logs and metrics if the gateway refused the request; else None.

    Errors with the status 503 or 4xx are refusals, except for disconnected clients (499).
    """
    if isinstance(error, errors.RateLimited):
        return error.limit
    if isinstance(error, errors.Overloaded) and error.cause is not None:
        return error.cause
    row = TABLE[type(error)]
    if 400 <= row.status < 500 and row.status != 499:
        return row.code or f"status_{row.status}"
    return row.code if row.status == 503 else None


def _build_headers(error: Failure) -> dict[str, str]:
    """Build the response headers of an error.

    Most of these headers say whether and when to retry. Without `x-should-retry`, openai-python
    retries every 429 and 5xx twice.
    """
    if isinstance(error, http_errors.MethodNotAllowed):
        return {"allow": ", ".join(error.allowed)}
    if isinstance(error, http_errors.WebSocketNotOffered):
        return {"upgrade": "HTTP/1.1", "connection": "close"}
    status, _, _, retry_after_s = TABLE[type(error)]
    if isinstance(error, errors.RateLimited):
        headers = build_rate_headers(error.quotas)
        if error.wait_ms is not None:
            headers["retry-after-ms"] = str(error.wait_ms)
            retry_after_s = -(-error.wait_ms // 1000)
    elif status < 429:  # SDKs do not retry these statuses
        return {}
    else:
        headers = {}
        if isinstance(error, errors.Overloaded):
            retry_after_s = max(1, math.ceil(error.wait_s))
    soon = retry_after_s is not None and not isinstance(error, errors.InsufficientQuota)
    headers["x-should-retry"] = "true" if soon else "false"
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return headers


def _get_type(error: Failure) -> str:
    if type(error) is errors.RateLimited and error.limit in _TOKEN_LIMITS:
        return "tokens"
    return TABLE[type(error)].type


def build_message(error: Failure) -> str:
    """Return the error's message for the client, cut to `_MAX_MESSAGE` characters."""
    if isinstance(error, StoreUnavailable):
        # Hide the error's text from clients, because it names internal servers.
        return "The adapter store does not answer; try again."
    text = str(error)
    if isinstance(error, StoreError):
        text = f"{text[0].upper()}{text[1:]}."
    return _clip(text, _MAX_MESSAGE)


def _clip(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, and replace lone surrogates, which form fields may have."""
    text = text if len(text) <= limit else text[:limit] + "..."
    return text.encode(errors="replace").decode()
