"""What is known of the request being served: for its log lines, its span and its usage record.

It is passed to whoever learns something of the request, who writes it here: once a request and
never once a token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.generation import Batch

if TYPE_CHECKING:
    from gateway.observability.tracing import RequestSpan

# W3C Trace Context, 3.2 (version 00; ids of zeros and version ff are invalid) and 3.3.1.3.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        request_id: the `x-request-id` of the answer.
        parent: `traceparent` and `tracestate` as the client sent them, if they are valid.
        span: where traces are on.
        model: the base model's name.
        adapter_version: ``NAME@DIGEST``.
        replica: the endpoint that was asked last.
        batch: what is generated, with its meter.
        prompt_tokens: of a request that generates nothing.
        error: the class of the error that the answer is or ended with.
        late_status: that of an error which came behind the headers, None without one.
        path: of the URL, of a request that may generate.
        refused: why it was, in a word, where it was by a limit of its tenant or for want of room.
        left: when its client left, or an admin ended it, in `time.perf_counter`.
        cancelled: whether it was an admin.
        started: in `time.perf_counter`.
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
        """32 hexadecimal digits."""
        if self.span is not None:
            return self.span.trace_id
        parent = self.parent.get("traceparent")
        return None if parent is None else parent[3:35]

    def facts(self, method: str, path: str, status: int) -> dict[str, object]:
        """The fields of the request's log line, None for what the request does not have.

        `status` is what the request ended with, which headers that went out before cannot tell.
        `prompt_tokens` are those of the request, whatever came of it: the bill is the usage log.
        `finish` has the reason of each choice that came to its end, `continued` says how often one
        went on at another replica. `ttft_ms`, the time to the
        first token, and `duration_ms` count from the request's headers.
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
            facts["continued"] = meter.continued or None
            if meter.first_token is not None:
                facts["ttft_ms"] = _milliseconds(meter.first_token - self.started)
        return facts


current: ContextVar[RequestContext | None] = ContextVar("current", default=None)
"""The request that this task serves, for the formatter of log lines alone.

Libraries log too, and nobody can pass them a request. Everybody else is passed the context.
"""


def current_id() -> str:
    """Of the request being served, `-` outside of any."""
    context = current.get()
    return "-" if context is None else context.request_id


def parse_trace_parent(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """`traceparent` and `tracestate` of a request's headers, without what is not valid."""
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
