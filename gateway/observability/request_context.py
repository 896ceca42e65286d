"""Context of the request being served: for its log lines, its span and its usage record.

It is passed to the code that learns something about the request, which stores it here: once per
request, never once per token.

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

# W3C Trace Context, 3.2 (version 00; ids of zeros and version ff are invalid) and 3.3.1.3.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")


@dataclass(slots=True)
class RequestContext:
    """Context of an HTTP request.

    Attributes:
        request_id: The `x-request-id` of the answer.
        parent: The client's `traceparent` and `tracestate`, if valid.
        span: The span of the request; None without tracing.
        tenant: The tenant's name.
        model: The base model's name.
        adapter_version: ``NAME@DIGEST``.
        replica: The endpoint of the last replica used.
        batch: The generations, with their meter.
        prompt_tokens: Tokens of a request that generates nothing.
        error: The class of the error that was answered or that ended the answer.
        late_status: The status of an error after the headers were sent; None without one.
        path: The path of the URL, for requests that may generate.
        refusal: The reason in one word, if a limit or lack of capacity refused the request.
        left_at: When the client left or an admin ended the request, in `time.perf_counter`.
        cancelled: True if an admin ended it.
        started: In `time.perf_counter`.
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
        """The trace id, 32 hexadecimal digits; None without a trace."""
        if self.span is not None:
            return self.span.trace_id
        parent = self.parent.get("traceparent")
        return None if parent is None else parent[3:35]

    def facts(self, method: str, path: str, status: int) -> dict[str, object]:
        """Return the fields of the request's log line, None for those that do not apply.

        `status` is the status at the end, which can differ from the one in the headers.
        `prompt_tokens` counts the request's tokens regardless of its outcome; the usage log is what
        is billed. `finish` lists the finish reason of each completed choice. `continued` counts
        failovers to another replica. `ttft_ms`, the time to first token, and `duration_ms` start at
        the request's headers.
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
"""The request that this task serves, only for the log formatter.

Libraries log too and cannot be passed a request. All other code is passed the context.
"""


def current_id() -> str:
    """Return the id of the request being served, `-` outside of any request."""
    context = current.get()
    return "-" if context is None else context.request_id


def parse_trace_parent(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the valid ones of a request's `traceparent` and `tracestate` headers."""
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
