"""Traces from HTTP through to Triton, received by a test collector."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ops.commands.up import DEMO_MODEL
from ops.local_stack.repository import PARAMETERS
from tests.support import triton_server
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.otlp_collector import Collector, Span, collecting
from triton_repo.cpu_executor import synthetic
from triton_repo.render import render

SERVER, CLIENT = 2, 3  # SpanKind in OTLP
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
STATE = "vendor=some-value,other=1"
KEY, PROMPT, ANSWER = "sk-very-secret-key", "a very private prompt", "hello"
HEADERS = {"traceparent": PARENT, "tracestate": STATE, "authorization": f"Bearer {KEY}"}
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return tmp_path


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Yield a collector. The long flush limit makes gateways send all spans before they end."""
    monkeypatch.setattr("gateway.observability.tracing._FLUSH_S", 60.0)
    with collecting() as collector:
        yield collector


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_and_its_attempt(
    folder: Path, collector: Collector, stream: bool, transport: str
) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    config = write_config(folder / "c.yaml", tenant("acme", KEY))
    settings = {"config": config, "otlp_endpoint": collector.url, "triton_transport": transport}
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, **settings) as (client, _, _),
    ):
        response = await client.post(
            "/v1/completions", json=BODY | {"stream": stream}, headers=HEADERS
        )
        assert response.status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
    # The gateway sends remaining spans before it ends. Health probes are not traced.
    attempt, server = sorted(collector.spans, key=lambda span: -span.kind)
    assert set(collector.paths) == {"/v1/traces"}
    assert (server.kind, server.name) == (SERVER, "POST /v1/completions")
    assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
    seconds = server.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds < 60
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "gateway.tenant": "acme",
        "gateway.replica": endpoint,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": len(ANSWER),
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert (attempt.kind, attempt.trace_id) == (CLIENT, TRACE)
    assert attempt.parent_id == server.span_id
    assert attempt.attributes["gateway.replica"] == endpoint
    assert attempt.events == ["first token"]
    assert not server.failed
    assert not attempt.failed
    (metadata,) = servicer.metadata
    assert metadata["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert metadata["tracestate"] == STATE
    sent = b"".join(collector.raw)
    assert len(sent) > 100
    for secret in (KEY, PROMPT, ANSWER):
        assert secret.encode() not in sent


async def test_every_protocol_is_traced(folder: Path, collector: Collector) -> None:
    words = {"eos_token": "!", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 10}
    paths = ("/v1/messages", "/v1/chat/completions")
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, otlp_endpoint=collector.url) as (client, _, _),
    ):
        for path in paths:
            assert (await client.post(path, json=asked)).status_code == 200
    found = {span.name: span.attributes for span in collector.spans if span.kind == SERVER}
    for path in paths:
        assert found[f"POST {path}"]["gen_ai.operation.name"] == "chat"


async def test_a_trace_begins_here_without_a_caller(folder: Path, collector: Collector) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, otlp_endpoint=collector.url) as (client, _, _),
    ):
        await client.post("/v1/completions", json=BODY | {"n": 3})
        missing = await client.get(f"/{PROMPT}", headers=HEADERS)
        assert missing.status_code == 404
    *attempts, server, unmatched = sorted(collector.spans, key=lambda span: -span.kind)
    if server.name.startswith("GET"):
        server, unmatched = unmatched, server
    assert server.parent_id == ""
    assert len(attempts) == 3
    assert {span.parent_id for span in attempts} == {server.span_id}
    # Compare without the flags: newer SDKs set a flag that says that the trace id is random.
    asked = {metadata["traceparent"][:52] for metadata in servicer.metadata}
    assert asked == {f"00-{server.trace_id}-{span.span_id}" for span in attempts}
    # The client chose the URL, so the span must not contain it.
    assert unmatched.name == "GET unmatched"
    assert "private" not in str(unmatched)


async def test_every_attempt_is_seen(folder: Path, collector: Collector) -> None:
    broken = FakeTriton(tokens=ids_of(folder, ANSWER), fault="abort", step=0)
    sound = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    async with (
        serving(broken) as first,
        serving(sound) as second,
        running(folder, f"{first},{second}", otlp_endpoint=collector.url) as (client, _, _),
    ):
        async with asyncio.timeout(300):
            while not broken.requests:
                answer = await client.post("/v1/completions", json=BODY)
                assert answer.status_code == 200
    at_broken = [span for span in collector.spans if span.attributes["gateway.replica"] == first]
    (failed,) = at_broken
    assert failed.failed
    assert failed.attributes["error.type"] == "EngineUnavailable"
    assert failed.events == []
    (server,) = [span for span in collector.spans if span.span_id == failed.parent_id]
    assert server.attributes["gateway.replica"] == second
    assert not server.failed
    asked = {metadata["traceparent"][36:52] for metadata in sound.metadata}
    assert failed.span_id not in asked
    assert failed.span_id in broken.metadata[0]["traceparent"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_behind_the_first_token(
    folder: Path, collector: Collector, stream: bool
) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault="abort", step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, otlp_endpoint=collector.url) as (client, _, _),
    ):
        await client.post("/v1/completions", json=BODY | {"stream": stream})
    attempt, server = sorted(collector.spans, key=lambda span: -span.kind)
    assert attempt.failed
    assert server.failed
    assert server.attributes["error.type"] == "EngineUnavailable"
    assert server.attributes["http.response.status_code"] == (200 if stream else 503)
    assert server.attributes["gen_ai.usage.output_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_no_error(
    folder: Path, collector: Collector, stream: bool
) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault="stall", step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, otlp_endpoint=collector.url) as (client, _, _),
    ):
        asked = client.post("/v1/completions", json=BODY | {"stream": stream})
        asking = asyncio.create_task(asked)
        async with asyncio.timeout(300):
            while not servicer.reached:
                await asyncio.sleep(0.02)
            asking.cancel()
            while not servicer.stopped:
                await asyncio.sleep(0.02)
    attempt, server = sorted(collector.spans, key=lambda span: -span.kind)
    assert not attempt.failed
    assert not server.failed
    assert "error.type" in attempt.attributes


async def test_a_collector_that_never_answers_costs_the_spans_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter would wait 10 s. The gateway ends earlier and logs that spans are lost."""
    tracing_log = "gateway.observability.tracing"
    caplog.set_level(logging.WARNING, tracing_log)
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with (
            serving(servicer) as endpoint,
            running(folder, endpoint, otlp_endpoint=nobody) as (client, _, _),
        ):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    said = [record.message for record in caplog.records if record.name == tracing_log]
    assert said == ["the last spans are lost: the collector does not answer"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            {"traceparent": PARENT, "tracestate": STATE},
            {"traceparent": PARENT, "tracestate": STATE},
        ),
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=ü".encode()}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a" * 513}, {"traceparent": PARENT}),
        ({"tracestate": STATE}, {}),
        ({"traceparent": PARENT.upper()}, {}),
        ({"traceparent": f"{PARENT}-more"}, {}),
        ({"traceparent": f"ff{PARENT[2:]}"}, {}),
        ({"traceparent": f"00-{'0' * 32}-{CALLER}-01"}, {}),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, {}),
        ({"traceparent": "\xff".encode("latin-1")}, {}),
    ],
)
async def test_without_traces_the_caller_s_goes_on_as_it_came(
    folder: Path, headers: dict[str, str | bytes], expected: dict[str, str]
) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, ANSWER), fault=None, step=0)
    async with serving(servicer) as endpoint, running(folder, endpoint) as (client, _, _):
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
    (metadata,) = servicer.metadata
    assert {name: metadata[name] for name in metadata if name.startswith("trace")} == expected


def test_without_traces_their_module_is_not_loaded() -> None:
    code = "import gateway.server, sys; print('gateway.observability.tracing' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "False\n"


def test_packages_that_are_missing(tmp_path: Path) -> None:
    """OpenTelemetry's API may be installed without the exporter, as a dependency of others."""
    hides = "import sys; sys.modules['opentelemetry.exporter'] = None"
    (tmp_path / "sitecustomize.py").write_text(hides)
    env = {
        "PYTHONPATH": str(tmp_path),
        "GATEWAY_TOKENIZER_DIR": str(DEMO_MODEL),
        "GATEWAY_OTLP_ENDPOINT": "http://127.0.0.1:4318",
    }
    found = subprocess.run(
        [sys.executable, "-m", "gateway"],
        capture_output=True, env=env, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert "GATEWAY_OTLP_ENDPOINT: opentelemetry.exporter" in found.stderr
    assert "pip install 'triton-openai-gateway[otel]'" in found.stderr


@contextmanager
def _traced_triton(folder: Path, collector: Collector) -> Iterator[str]:
    """Run a real tritonserver that sends its own traces to the same collector."""
    engine = synthetic.build(folder / "engine", vocab_size=256, tokens=[60])
    parameters = {name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name}
    parameters |= {"engine_dir": str(engine), "tokenizer_dir": str(folder)}
    render(folder / "repository", parameters, ["tensorrt_llm"])
    traces = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        "rate=1",
        f"opentelemetry,url={collector.url}/v1/traces",
        "opentelemetry,resource=service.name=triton",
    )
    with triton_server.serving(folder, *(f"--trace-config={each}" for each in traces)) as server:
        yield server.grpc


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_triton_goes_on_with_the_trace(
    folder: Path, collector: Collector, transport: str
) -> None:
    settings = {"otlp_endpoint": collector.url, "triton_transport": transport}
    with _traced_triton(folder, collector) as endpoint:
        async with running(folder, endpoint, **settings) as (client, _, _):
            async with asyncio.timeout(120):
                # Repeat, as Triton 2.51 loses the spans of some requests and the context of others.
                while not (found := _inferences(collector)):
                    answer = await client.post("/v1/completions", json=BODY, headers=HEADERS)
                    assert answer.status_code == 200, answer.text
                    await asyncio.sleep(0.2)
    attempts = {span.span_id for span in collector.of() if span.kind == CLIENT}
    assert {span.parent_id for span in found} <= attempts


def _inferences(collector: Collector) -> list[Span]:
    """Return the spans of Triton's requests in the caller's trace."""
    spans = [span for span in collector.of("triton") if span.name == "InferRequest"]
    return [span for span in spans if span.trace_id == TRACE]
