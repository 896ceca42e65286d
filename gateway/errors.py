"""Every error a client can see, and the only place that knows HTTP statuses.

Code below raises these with facts (which parameter, which limit); `body` is OpenAI's
envelope ``{"error": {"message", "type", "param", "code"}}``. Texts of the engine never reach a
client: they hold backtraces, paths and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

# An error names what it found; what it found may be megabytes.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class GatewayError(Exception):
    """Base of all errors that are answered to the client.

    `retry` says whether sending the same request again can help; openai-python retries every
    429 and 5xx twice unless ``x-should-retry`` says otherwise.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    retry: ClassVar[bool] = False
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = _clipped(message, _MAX_MESSAGE)
        self.param = None if param is None else _clipped(param, _MAX_PARAM)
        self.code = code or self.default_code

    def body(self) -> dict[str, Any]:
        """The envelope, as a JSON-ready dict."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Retry advice; none for plain client errors, which no SDK retries."""
        if self.status < 429:
            return {}
        headers = {"x-should-retry": "true" if self.retry else "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers

    def json(self) -> bytes:
        return orjson.dumps(self.body())


class InvalidRequest(GatewayError):
    """The request is malformed or a value is out of range; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    """A known parameter that changes meaning and is not served; never silently dropped."""

    default_code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt leaves no room for one generated token. LangChain looks for this code."""

    default_code = "context_length_exceeded"


class Unauthorized(InvalidRequest):
    """No key, or a wrong one."""

    status = 401
    default_code = "invalid_api_key"


class Forbidden(InvalidRequest):
    """Nobody may do this here, or this key may not."""

    status = 403


class NotFound(InvalidRequest):
    """No such route or object."""

    status = 404


class ModelNotFound(InvalidRequest):
    status = 404
    default_code = "model_not_found"

    @classmethod
    def named(cls, model: str) -> ModelNotFound:
        """The same words whether it does not exist or must not be known of."""
        return cls(f"The model `{model}` does not exist.", param="model")


class MethodNotAllowed(InvalidRequest):
    status = 405


class ContentTooLarge(InvalidRequest):
    status = 413
    default_code = "content_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not of the kind, or not in the encoding, that the endpoint reads."""

    status = 415
    default_code = "unsupported_media_type"

    def __init__(self, header: str, found: str, allowed: str) -> None:
        super().__init__(f"{header}: found {found or 'none'}; allowed: {allowed}.")


class SlowRequest(InvalidRequest):
    """The request did not arrive in time."""

    status = 408
    default_code = "request_timeout"


class HeadersTooLarge(InvalidRequest):
    status = 431
    default_code = "headers_too_large"


class RateLimited(GatewayError):
    """A limit of the tenant is reached. `type` is that of OpenAI: `requests` or `tokens`."""

    status = 429
    default_code = "rate_limit_exceeded"

    def __init__(
        self, message: str, kind: str, wait_ms: int | None, headers: Mapping[str, str]
    ) -> None:
        """`wait_ms` is when a retry can succeed; None says never. `headers` tell of the limits."""
        super().__init__(message)
        self._kind = kind
        self._wait_ms = wait_ms
        self._headers = headers

    def body(self) -> dict[str, Any]:
        body = super().body()
        body["error"]["type"] = self._kind
        return body

    def headers(self) -> dict[str, str]:
        headers = {**self._headers, "x-should-retry": "false"}
        if self._wait_ms is not None:
            headers["x-should-retry"] = "true"
            headers["retry-after"] = str(-(-self._wait_ms // 1000))
            headers["retry-after-ms"] = str(self._wait_ms)
        return headers


class EngineError(GatewayError):
    """The engine failed on this request for a reason that a retry does not mend."""


class EngineBroken(EngineError):
    """Not this request failed but what it was given to: the next ones will fail there too."""


class EngineUnavailable(GatewayError):
    """Triton cannot be reached or is not ready."""

    status = 503
    default_code = "engine_unavailable"
    retry = True
    retry_after_s = 2


class ShuttingDown(EngineUnavailable):
    """This gateway is ending and the request outlived the grace; another one may serve it."""

    default_code = "shutting_down"


class Overloaded(GatewayError):
    """The engine's queue is full."""

    status = 503
    default_code = "overloaded"
    retry = True
    retry_after_s = 1


class LimitsUnavailable(Overloaded):
    """A limit of the tenant cannot be counted now, and the configuration wants it counted."""

    default_code = "limits_unavailable"


class RequestTimeout(GatewayError):
    """The request outlived its deadline; generation was stopped."""

    status = 504
    default_code = "timeout"


class ClientDisconnected(Exception):
    """The client left. Nobody is there to answer; 499 appears in logs and metrics only."""

    status = 499


def _clipped(text: str, limit: int) -> str:
    """At most `limit` characters, fit for JSON: form fields may hold lone surrogates."""
    text = text if len(text) <= limit else text[:limit] + "..."
    return text.encode(errors="replace").decode()


def from_http_status(status: int, detail: str) -> GatewayError:
    """An error for what the web framework itself refuses (unknown route, wrong method)."""
    known: dict[int, type[GatewayError]] = {404: NotFound, 405: MethodNotAllowed}
    return known.get(status, InvalidRequest if status < 500 else GatewayError)(detail)
