"""Requests are counted by the status they end with, not by the status in their headers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

TEXT = "hello"
URL = "/v1/completions"
STREAM = {"model": "m", "prompt": "xyz", "stream": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return tmp_path


def _counted(service: object, status: int) -> float:
    return metric_of(service, "gateway_requests_total", path=URL, status=str(status))


@pytest.mark.parametrize(("fault", "status"), [(None, 200), ("abort", 503), ("stall", 504)])
async def test_a_stream_that_ends_in_an_error_frame(
    folder: Path, fault: Fault | None, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault=fault, step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint) as (client, service, _),
    ):
        asked = client.post(URL, json=STREAM, timeout=None)
        with caplog.at_level(logging.INFO, "gateway.requests"):
            stalls = lambda: fault == "stall" and servicer.reached > 0  # noqa: E731
            answer = await clock.leap_once(stalls, asked)
        assert answer.status_code == 200
        assert ('"error"' in answer.text) is (fault is not None)
        assert _counted(service, status) == 1
        assert _counted(service, 200) == (status == 200)
    assert f"POST {URL} {status} " in caplog.text


@pytest.mark.parametrize(("asked_s", "counted"), [(120, 499), (3600, 504)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_of_the_clients_own_pages_nobody(
    folder: Path, asked_s: float, counted: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A deadline that the client chose counts as 499, so that no alert on 5xx fires.

    The client and the log still get 504. A deadline longer than the gateway's own counts as 504.
    """
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault="stall", step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint) as (client, service, _),
    ):
        asked = client.post(
            URL,
            json=STREAM | {"stream": stream},
            headers={"x-request-timeout": str(asked_s)},
            timeout=None,
        )
        with caplog.at_level(logging.INFO, "gateway.requests"):
            answer = await clock.leap_once(lambda: servicer.reached > 0, asked, 7200)
        assert stream or answer.status_code == 504
        assert '"code":"timeout"' in answer.text
        assert _counted(service, counted) == 1
        assert _counted(service, 504 if counted == 499 else 499) == 0
    assert f"POST {URL} 504 " in caplog.text


async def test_a_client_that_leaves_its_stream(folder: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault="stall", step=2)
    async with serving(servicer) as endpoint, running(folder, endpoint) as (client, service, _):
        async with client.stream("POST", URL, json=STREAM) as answer:
            assert answer.status_code == 200
        async with asyncio.timeout(300):
            while not _counted(service, 499):
                await asyncio.sleep(0.01)
        assert _counted(service, 200) == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_refusal_by_the_queue_comes_before_headers(folder: Path, n: int) -> None:
    """Keep-alive comments start only when a request runs, so a queued stream can get a 503."""
    servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault="stall", step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_in_flight=1, queue_timeout=1, keep_alive=0.1) as (
            client,
            service,
            _,
        ),
    ):
        async with client.stream("POST", URL, json=STREAM):
            refused = await client.post(URL, json=STREAM | {"n": n})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["x-should-retry"] == "true"
        assert _counted(service, 503) == 1


async def test_comments_in_the_queue_where_they_are_wanted(folder: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault="stall", step=2)
    settings = {"max_in_flight": 1, "queue_timeout": 1, "keep_alive": 0.1}
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, keep_alive_in_queue=True, **settings) as (client, service, _),
    ):
        async with client.stream("POST", URL, json=STREAM):
            refused: httpx.Response = await client.post(URL, json=STREAM)
        assert refused.status_code == 200
        assert refused.text.startswith(": keep-alive\n\n")
        assert '"code":"overloaded"' in refused.text
        assert _counted(service, 503) == 1
