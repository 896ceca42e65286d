"""Errors of every path have OpenAI's envelope and a request id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from gateway.api.request_bounds import parse_timeout
from gateway.api.request_log import EXCHANGE
from gateway.errors import InvalidRequest
from tests.support.cpu import costs_less_than
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


def _envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models%0A", 404),
        ("GET", "/web/", 404),
        ("GET", "/v1/completions", 405),
    ],
)
def test_routes(stack: Stack, method: str, path: str, status: int) -> None:
    error = _envelope(httpx.request(method, stack.gateway + path, timeout=PATIENCE_S), status)
    assert path in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"model": "demo"}', b"\xff\xfe", b"[" * 9999]
)
def test_bad_bodies(stack: Stack, path: str, body: bytes) -> None:
    error = _envelope(httpx.post(stack.gateway + path, content=body, timeout=PATIENCE_S), 400)
    assert error["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(stack: Stack) -> None:
    body = b'{"model": "' + b"x" * (9 * 1024 * 1024)
    error = _envelope(
        httpx.post(stack.gateway + "/v1/completions", content=body, timeout=PATIENCE_S), 413
    )
    assert error["code"] == "content_too_large"


@pytest.mark.parametrize(
    "given", ["", "1_0", "ten", "0", "-1", "1e999", "inf", "nan", "0x1", "1 0", b"\xa01"]
)
def test_a_timeout_that_is_no_number_of_seconds(stack: Stack, given: str | bytes) -> None:
    headers = {b"x-request-timeout": given if isinstance(given, bytes) else given.encode()}
    answer = httpx.post(
        f"{stack.gateway}/v1/chat/completions", json=CHAT, headers=headers, timeout=PATIENCE_S
    )
    error = _envelope(answer, 400)
    assert error["param"] == "x-request-timeout"
    assert error["message"].startswith("x-request-timeout: found")


def test_a_timeout_of_sixty_thousand_digits_is_looked_through_once() -> None:
    fields = {b"x-request-timeout": b"1" * 60_000 + b"x"}
    exchange = SimpleNamespace(fields=fields)
    request = Request({"type": "http", "extensions": {EXCHANGE: exchange}})
    # This once took minutes and blocked the event loop.
    with costs_less_than(0.2), pytest.raises(InvalidRequest) as caught:
        parse_timeout(request, 60)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("given", ["30", "+30", "30.5", "30.", ".5e2", "1E+2"])
def test_a_timeout_in_every_way_to_write_a_number(stack: Stack, given: str) -> None:
    wanted = CHAT | {"max_tokens": 1}
    headers = {"x-request-timeout": given}
    url = f"{stack.gateway}/v1/chat/completions"
    answer = httpx.post(url, json=wanted, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text


def test_the_parameter_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], temperature=3
        )
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"min_p": 0.1},
        )
    assert (caught.value.param, caught.value.code) == ("min_p", "unsupported_parameter")


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_longer_than_the_context(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="word " * 9000, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in caught.value.message


def test_max_tokens_past_the_context_is_an_upper_bound(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=1_000_000,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "honoured"), [("abc-123.X", True), ("a b", False), ("x" * 300, False)]
)
def test_request_ids(stack: Stack, given: str, honoured: bool) -> None:
    response = httpx.get(
        stack.gateway + "/health/live", headers={"x-request-id": given}, timeout=PATIENCE_S
    )
    assert (response.headers["x-request-id"] == given) is honoured
    assert response.headers["x-request-id"]


def test_health_and_metrics(stack: Stack) -> None:
    assert httpx.get(stack.gateway + "/health/live", timeout=PATIENCE_S).json() == {"status": "ok"}
    assert httpx.get(stack.gateway + "/health/ready", timeout=PATIENCE_S).status_code == 200
    httpx.post(
        stack.gateway + "/v1/chat/completions", json=CHAT | {"max_tokens": 4}, timeout=PATIENCE_S
    )
    text = httpx.get(stack.gateway + "/metrics", timeout=PATIENCE_S).text
    assert 'gateway_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert "gateway_engine_ready 1.0" in text
    assert 'gateway_completion_tokens_total{model="demo"}' in text
