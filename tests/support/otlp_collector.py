"""A collector for OTLP over HTTP, as protobuf or as JSON, which Triton sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span. Ids are lower-case hexadecimal. `parent_id` is empty for a root span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


class Collector:
    """A collector. `raw` has the received bodies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.raw: list[bytes] = []
        self.paths: list[str] = []
        self.spans: list[Span] = []

    def of(self, service: str = "triton-openai-gateway") -> list[Span]:
        return [span for span in self.spans if span.service == service]

    def wait_for(self, count: int, service: str, within_s: float = 60.0) -> list[Span]:
        """Wait until a service has sent `count` spans, and return them."""
        deadline = time.monotonic() + within_s
        while len(found := self.of(service)) < count:
            assert time.monotonic() < deadline, self.spans
            time.sleep(0.05)
        return found

    def take(self, path: str, kind: str, body: bytes) -> None:
        self.raw.append(body)
        self.paths.append(path)
        if kind == "application/x-protobuf":
            self.spans += _from_protobuf(body)
        else:
            self.spans += _from_json(body)


def _from_protobuf(body: bytes) -> Iterator[Span]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = {a.key: _value(a.value) for a in group.resource.attributes}["service.name"]
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    {a.key: _value(a.value) for a in span.attributes},
                    [event.name for event in span.events],
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _value(value: Any) -> Any:
    found = getattr(value, value.WhichOneof("value"))
    return [_value(one) for one in found.values] if hasattr(found, "values") else found


def _from_json(body: bytes) -> Iterator[Span]:
    """Yield the spans of an OTLP JSON body with service, name, ids and attributes."""
    for group in orjson.loads(body)["resourceSpans"]:
        named = {a["key"]: a["value"] for a in group["resource"]["attributes"]}
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    named["service.name"]["stringValue"],
                    span["name"],
                    span["traceId"].lower(),
                    span["spanId"].lower(),
                    span.get("parentSpanId", "").lower(),
                    0,
                    {},
                    [],
                    failed=False,
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, self.headers["content-type"], body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
