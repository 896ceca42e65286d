"""What every failure is over HTTP: one row for each class, and OpenAI's envelope made of it.

The rooms below raise failures with facts (which parameter, which limit) and know nothing of this.
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
from gateway.api.rate_headers import rate_headers
from gateway.config.limits import LIMITS
from gateway.http import errors as http_errors

Failure = errors.GatewayError | errors.ClientDisconnected | AdapterError | StoreError
"""All that the table has rows for, subclasses included."""

# A message names what was found; what was found may be megabytes.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200

_OF_TOKENS = {name for name, kind in LIMITS.items() if kind.counts == "tokens"}

_CLIENT, _SERVER = "invalid_request_error", "server_error"


class Row(NamedTuple):
    """What a class of failures is to the client.

    Attributes:
        type: in OpenAI's words, whose fault it is.
        code: a stable word for programs.
        retry_after_s: seconds after which the same request may succeed; None says that it will not.
    """

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


def _adapters(status: int, *kinds: type[AdapterError]) -> dict[type[Exception], Row]:
    return {kind: Row(status, _CLIENT, kind.code) for kind in kinds}


TABLE: Mapping[type[Exception], Row] = {
    errors.InvalidRequest: Row(400, _CLIENT),
    errors.UnsupportedParameter: Row(400, _CLIENT, "unsupported_parameter"),
    # LangChain looks for this code.
    errors.ContextLengthExceeded: Row(400, _CLIENT, "context_length_exceeded"),
    errors.ConversationsOff: Row(400, _CLIENT, "unsupported_parameter"),
    errors.ConversationTooLarge: Row(413, _CLIENT, "conversation_too_large"),
    errors.InvalidKey: Row(401, _CLIENT, "invalid_api_key"),
    errors.SwitchedOff: Row(403, _CLIENT),
    errors.ModelNotAllowed: Row(403, _CLIENT, "model_not_allowed"),
    errors.ModelNotFound: Row(404, _CLIENT, "model_not_found"),
    errors.NotFound: Row(404, _CLIENT),
    errors.PreviousResponseNotFound: Row(404, _CLIENT, "previous_response_not_found"),
    errors.KeyNotFound: Row(404, _CLIENT, "key_not_found"),
    # Nothing says when to try again: a wrong key stays wrong.
    errors.TooManyWrongKeys: Row(429, _CLIENT, "too_many_wrong_keys"),
    # Its type and the time to retry are of the limit: see `_type` and `_headers`.
    errors.RateLimited: Row(429, "requests", "rate_limit_exceeded"),
    # OpenAI's word for what no SDK should try again: the wait may be weeks.
    errors.InsufficientQuota: Row(429, "insufficient_quota", "insufficient_quota"),
    errors.ClientDisconnected: Row(499, _CLIENT),  # nginx's; for logs and metrics alone
    errors.InternalError: Row(500, _SERVER),
    errors.EngineError: Row(500, _SERVER),
    errors.EngineBroken: Row(500, _SERVER),
    errors.AdapterDoesNotFit: Row(500, _SERVER, "adapter_does_not_fit"),
    # No 503, which asks to be tried again: whoever ended it had a reason.
    errors.EndedByAdmin: Row(500, _SERVER, "ended_by_operator"),
    errors.BadModelOutput: Row(502, _SERVER, "bad_model_output"),
    errors.Overloaded: Row(503, _SERVER, "overloaded", retry_after_s=1),
    errors.ClientDeadlineTooNear: Row(503, _SERVER, "overloaded", retry_after_s=1),
    errors.AdapterNotReady: Row(503, _SERVER, "adapter_not_ready", retry_after_s=2),
    errors.LimitsUnavailable: Row(503, _SERVER, "limits_unavailable", retry_after_s=1),
    errors.KeysUnavailable: Row(503, _SERVER, "keys_unavailable", retry_after_s=1),
    errors.OverridesUnavailable: Row(503, _SERVER, "overrides_unavailable", retry_after_s=1),
    errors.ConversationsUnavailable: Row(
        503, _SERVER, "conversations_unavailable", retry_after_s=1
    ),
    errors.EngineUnavailable: Row(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.EngineUnreachable: Row(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.AnswerLost: Row(503, _SERVER, "engine_unavailable", retry_after_s=2),
    errors.EngineStepFailed: Row(503, _SERVER, "engine_step_failed", retry_after_s=1),
    errors.ShuttingDown: Row(503, _SERVER, "shutting_down", retry_after_s=2),
    errors.RequestTimeout: Row(504, _SERVER, "timeout"),
    errors.ClientDeadline: Row(504, _SERVER, "timeout"),
    http_errors.MalformedRequest: Row(400, _CLIENT),
    http_errors.ForWebsites: Row(403, _CLIENT),
    http_errors.UnknownUrl: Row(404, _CLIENT),
    http_errors.MethodNotAllowed: Row(405, _CLIENT),
    http_errors.SlowRequest: Row(408, _CLIENT, "request_timeout"),
    http_errors.ContentTooLarge: Row(413, _CLIENT, "content_too_large"),
    http_errors.UnsupportedMediaType: Row(415, _CLIENT, "unsupported_media_type"),
    # Codex continues over HTTP after this status, and tries again for seconds after any other.
    http_errors.WebSocketNotOffered: Row(426, _CLIENT, "websocket_not_offered"),
    http_errors.HeadersTooLarge: Row(431, _CLIENT, "headers_too_large"),
    http_errors.TooManyConnections: Row(503, _SERVER, "overloaded", retry_after_s=1),
    **_adapters(404, adapter_errors.UnknownAdapter, adapter_errors.UnknownVersion),
    **_adapters(403, adapter_errors.SourceNotAllowed),
    **_adapters(413, adapter_errors.TooLarge),
    **_adapters(
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
    adapter_errors.SourceUnavailable: Row(
        503, _SERVER, adapter_errors.SourceUnavailable.code, retry_after_s=5
    ),
    StoreError: Row(500, _SERVER, StoreError.code),
    adapter_errors.WritesRefused: Row(500, _SERVER, StoreError.code),
    adapter_errors.ChangeUnknown: Row(500, _SERVER, adapter_errors.ChangeUnknown.code),
    adapter_errors.VersionUnavailable: Row(500, _SERVER, adapter_errors.VersionUnavailable.code),
    StoreUnavailable: Row(503, _SERVER, StoreUnavailable.code, retry_after_s=2),
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def answer(error: Failure, body: Callable[[Failure], bytes] | None = None) -> Answer:
    """The whole answer, for a client that has been told nothing yet.

    `body` makes its envelope where that is not OpenAI's.
    """
    return Answer(TABLE[type(error)].status, _headers(error), (body or envelope)(error))


def envelope(error: Failure) -> bytes:
    """OpenAI's error object, as JSON."""
    param = None
    if isinstance(error, errors.InvalidRequest):
        param = error.param
    elif isinstance(error, AdapterError):
        param = error.field
    told = {
        "message": message(error),
        "type": _type(error),
        "param": None if param is None else _clipped(param, _MAX_PARAM),
        "code": TABLE[type(error)].code,
    }
    return orjson.dumps({"error": told})


def status_of(error: BaseException | None) -> int:
    """The status of what an answer ended with, whether or not it was still to be told."""
    if error is None:
        return 200
    return TABLE[type(error) if isinstance(error, Failure) else errors.InternalError].status


def refusal(error: Failure) -> str | None:
    """In a word, for operators, why a request was not served; None for what is no refusal."""
    if isinstance(error, errors.RateLimited):
        return error.limit
    if isinstance(error, errors.Overloaded) and error.cause is not None:
        return error.cause
    row = TABLE[type(error)]
    if 400 <= row.status < 500 and row.status != 499:
        return row.code or f"status_{row.status}"
    return row.code if row.status == 503 else None


def _headers(error: Failure) -> dict[str, str]:
    """Whether to try again: openai-python does, twice, for every 429 and 5xx, if not told."""
    if isinstance(error, http_errors.MethodNotAllowed):
        return {"allow": ", ".join(error.allowed)}
    if isinstance(error, http_errors.WebSocketNotOffered):
        return {"upgrade": "HTTP/1.1", "connection": "close"}
    status, _, _, retry_after_s = TABLE[type(error)]
    if isinstance(error, errors.RateLimited):
        headers = rate_headers(error.quotas)
        if error.wait_ms is not None:
            headers["retry-after-ms"] = str(error.wait_ms)
            retry_after_s = -(-error.wait_ms // 1000)
    elif status < 429:  # no SDK tries these again
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


def _type(error: Failure) -> str:
    if type(error) is errors.RateLimited and error.limit in _OF_TOKENS:
        return "tokens"
    return TABLE[type(error)].type


def message(error: Failure) -> str:
    """What a client is told, fit for JSON."""
    if isinstance(error, StoreUnavailable):
        return "The adapter store does not answer; try again."  # the error's own has addresses
    text = str(error)
    if isinstance(error, StoreError):
        text = f"{text[0].upper()}{text[1:]}."
    return _clipped(text, _MAX_MESSAGE)


def _clipped(text: str, limit: int) -> str:
    """At most `limit` characters, fit for JSON: form fields may hold lone surrogates."""
    text = text if len(text) <= limit else text[:limit] + "..."
    return text.encode(errors="replace").decode()
