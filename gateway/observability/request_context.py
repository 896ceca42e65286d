"""Context of a request: data for the request's log line, tracing span and usage record.

The code that handles the request gets the context as an argument and sets its attributes. Each
attribute is set a few times per request, never for each token.

See decision 087 in docs/decisions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.generation.batch import Batch

if TYPE_CHECKING:
    from gateway.observability.tracing import RequestSpan

# Patterns of the headers `traceparent` and `tracestate`, according to sections 3.2 and 3.3.1.3 of
# W3C Trace Context. An id of zeros and the version ff are invalid.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")


@dataclass(slots=True)
class RequestContext:
    """Context of an HTTP request.

    Attributes:
        request_id: the `x-request-id` of the response.
        parent: the client's headers `traceparent` and `tracestate`, if valid.
        span: the span of the request; None without tracing.
        tenant: the tenant's name; None if requests need no key or the tenant is not known yet.
        model: the base model's name.
        adapter_version: the adapter version as ``NAME@DIGEST``; None without an adapter.
        replica: endpoint of the replica to which the request was sent last.
        batch: the generations of the request; None for a request that generates no text.
        prompt_tokens: number of input tokens of a request that generates no text.
        error: class of the error with which the request failed, before or during its response.
        late_status: HTTP status for an error that occurred after the headers were sent; None
            without such an error.
        path: path of the URL; set only for endpoints that generate text.
        refusal: reason in one word, if the request was refused.
        left_at: time by `time.perf_counter` at which the client disconnected or an admin cancelled
            the request.
        cancelled: True if an admin cancelled the request.
        started: time by `time.perf_counter` at which the request started.
    """

    request_id: str
    parent: Mapping[str, str] = field(default_factory=dict)
    span: RequestSpan | None = None
    tenant: str | None = None
    model: str | None = None
    adapter_version: str | None = None
    replica: str | None = None
    batch: Batch | None = None
    prompt_tokens: int | None = None
    error: type[BaseException] | None = None
    late_status: int | None = None
    path: str = ""
    refusal: str | None = None
    left_at: float | None = None
    cancelled: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def trace_id(self) -> str | None:
        """Trace id of the request, 32 hexadecimal digits; None without a trace."""
        if self.span is not None:
            return self.span.trace_id
        parent = self.parent.get("traceparent")
        return None if parent is None else parent[3:35]

    def facts(self, method: str, path: str, status: int) -> dict[str, object]:
        """Return the fields of the request's log line. Fields that do not apply are None.

        `status` is the HTTP status at the end of the request. It differs from the status in the
        headers if an error occurred after the headers were sent.

        In the result, `prompt_tokens` is the length of the prompt, even if the request has failed;
        the usage log has the number that is billed. `finish` lists the finish reason of each
        completed choice. `continued` is the number of times that another replica has continued the
        generation. `ttft_ms` (time to first token) and `duration_ms` count from the time at which
        the gateway has received the request's headers.
        """
        facts: dict[str, object] = {
            "method": method,
            "path": path,
            "status": status,
            "error": self.error and self.error.__name__,
            "tenant": self.tenant,
            "model": self.model,
            "adapter_version": self.adapter_version,
            "replica": self.replica,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": None,
            "finish": None,
            "continued": None,
            "ttft_ms": None,
            "duration_ms": _milliseconds(time.perf_counter() - self.started),
        }
        if self.batch is not None:
            meter = self.batch.meter
            facts["prompt_tokens"] = self.batch.prompt_tokens
            facts["completion_tokens"] = meter.tokens
            facts["finish"] = meter.finished
            facts["continued"] = meter.resumptions or None
            if meter.first_token is not None:
                facts["ttft_ms"] = _milliseconds(meter.first_token - self.started)
        return facts


current: ContextVar[RequestContext | None] = ContextVar("current", default=None)
"""Context of the request that the current task serves. Only the log formatter may read it.

The log formatter also formats messages of libraries, which do not know the request. All other code
gets the context as an argument.
"""


def current_id() -> str:
    """Return the id of the request that the current task serves. Return "-" if there is none."""
    context = current.get()
    return "-" if context is None else context.request_id


def parse_trace_parent(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the valid headers `traceparent` and `tracestate` of a request, by name."""
    parent = headers.get(b"traceparent")
    if parent is None or not _TRACEPARENT.fullmatch(parent):
        return {}
    found = {"traceparent": parent.decode("ascii")}
    state = headers.get(b"tracestate")
    if state is not None and _TRACESTATE.fullmatch(state):
        found["tracestate"] = state.decode("ascii")
    return found


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)
