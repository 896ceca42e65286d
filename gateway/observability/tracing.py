"""OpenTelemetry spans: one per request, with a child span for each gRPC call to a replica.

This module needs the packages of the extra `otel`, which may not be installed. Other modules
therefore import it only through `service_setup.load_tracer_class`. Attribute names follow the
OpenTelemetry semantic conventions for HTTP servers, RPC clients and generative AI. All other
attributes begin with `gateway.`. Attributes never contain free text of clients, such as a URL, a
prompt, a key or an error message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from adapters.record import selected_name
from certificates.contexts import ClientFiles
from certificates.memory_files import copy_to_memory

log = logging.getLogger(__name__)

_FLUSH_S = 2.0
_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
"""Ends of the names of OpenTelemetry's variables for paths of certificates and keys.

An example of such a name is OTEL_EXPORTER_OTLP_CLIENT_KEY. The order of the ends is the order of
the fields of `ClientFiles`.
"""
_W3C = TraceContextTextMapPropagator()
_METHOD = "inference.GRPCInferenceService/ModelStreamInfer"
_INFER_ONCE = "inference.GRPCInferenceService/ModelInfer"

# Names of the span's attributes, by field of `RequestContext.facts`. Times are omitted, because a
# span has its own start and end.
_ATTRIBUTES = {
    "path": "http.route",
    "error": "error.type",
    "tenant": "gateway.tenant",
    "model": "gen_ai.response.model",
    "adapter_version": "gateway.adapter_version",
    "replica": "gateway.replica",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
}
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}


class Tracer:
    """Factory of spans. A background thread sends the spans to a collector.

    OpenTelemetry's standard environment variables apply: OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_* and OTEL_EXPORTER_OTLP_*.
    """

    def __init__(self, endpoint: str) -> None:
        """Create the exporter.

        `endpoint` is the base URL of a collector that accepts OTLP over HTTP as protobuf.
        """
        files = _load_certificates()
        exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces",
            certificate_file=files["CERTIFICATE"],
            client_certificate_file=files["CLIENT_CERTIFICATE"],
            client_key_file=files["CLIENT_KEY"],
        )
        named = Resource.create({SERVICE_NAME: "triton-openai-gateway"})
        resource = named.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("gateway")

    def begin(self, method: str, scheme: str, parent: Mapping[str, str]) -> RequestSpan:
        """Start the span of an HTTP request.

        If `parent` contains a `traceparent`, the new span is a child of the client's span.
        """
        span = self._tracer.start_span(
            method,
            context=_W3C.extract(parent),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.scheme": scheme},
        )
        return RequestSpan(self._tracer, span)

    async def close(self) -> None:
        """Send the remaining spans. Wait at most 2 s for the collector."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # raised if the event loop has already ended
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await sent.wait()
        except TimeoutError:
            log.warning("the last spans are lost: the collector does not answer")


def _load_certificates() -> dict[str, str | None]:
    """Copy the certificate files for the connection to the collector to memory files.

    The copies are updated when the files change. OpenTelemetry's environment variables contain the
    paths of the files. Return the paths of the copies, by the names in `_FILES`. A path is None if
    its variable is not set. All paths are None if the files cannot be read now. OpenTelemetry's
    exporter then reads the variables and the files itself.
    """
    given = [
        os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
        or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        for name in _FILES
    ]
    if not any(given):
        return dict.fromkeys(_FILES)
    try:
        files = copy_to_memory(
            "certificates of the connections to the trace collector",
            ClientFiles(*(Path(name) if name else None for name in given)),
        )
    except OSError:
        return dict.fromkeys(_FILES)
    return {
        name: None if path is None else str(path) for name, path in zip(_FILES, files, strict=True)
    }


class RequestSpan:
    """The span of one HTTP request."""

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def begin_attempt(self, replica: str, method: str = _METHOD) -> AttemptSpan:
        """Start the span of a gRPC call to one replica.

        `method` is the name of the gRPC method. The default is the method for text generation.
        """
        span = self._tracer.start_span(
            method,
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": method,
                "gateway.replica": replica,
            },
        )
        return AttemptSpan(span)

    def begin_unary_attempt(self, replica: str) -> AttemptSpan:
        """Start the span of a unary gRPC call to one replica."""
        return self.begin_attempt(replica, _INFER_ONCE)

    def end(self, facts: Mapping[str, object], header_status: int) -> None:
        """End the span.

        `facts` is the result of `RequestContext.facts`. `header_status` is the HTTP status that was
        sent in the headers. It differs from the status in `facts` if an error occurred later.
        """
        span, path, status = self._span, facts["path"], facts["status"]
        span.update_name(f"{facts['method']} {path}")
        span.set_attribute("http.response.status_code", header_status)
        for fact, name in _ATTRIBUTES.items():
            value = facts[fact]
            if isinstance(value, str | int | list):
                span.set_attribute(name, value)
        if facts["model"] is not None:
            version = str(facts["adapter_version"] or facts["model"])
            span.set_attribute("gen_ai.request.model", selected_name(version))
            span.set_attribute("gen_ai.operation.name", _OPERATIONS.get(str(path), "chat"))
        if isinstance(facts["ttft_ms"], float):
            seconds = facts["ttft_ms"] / 1000
            span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)
        # Do not set the span's status to error for client errors and disconnects (4xx).
        if isinstance(status, int) and status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()


class AttemptSpan:
    """The span of a gRPC call to one replica.

    `metadata` contains the span's `traceparent`. Send `metadata` with the call.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span))
        self.metadata: Mapping[str, str] = carrier

    def mark_first_token(self) -> None:
        self._span.add_event("first token")

    def end(self, error_type: type[BaseException] | None) -> None:
        """End the span.

        `error_type` is the class of the exception that ended the call; None if the call succeeded.
        A cancellation (after a client has disconnected) does not set the span's status to error.
        """
        if error_type is not None:
            self._span.set_attribute("error.type", error_type.__name__)
            if issubclass(error_type, Exception):
                self._span.set_status(StatusCode.ERROR)
        self._span.end()
