"""Rate limits, tested through the HTTP API with a real Redis: shared, exact and without delays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import paced_engine, tritons
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S, until
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer
from tests.support.triton_server import LONG_ANSWER, LONG_SEQ_LEN

# Start each test with an empty Redis.
pytestmark = pytest.mark.usefixtures("at_shared_redis")

KEYS = {
    name: f"sk-{name}-key"
    for name in ("fifty", "large", "tokens", "single", "free", "pair", "once")
}


@pytest.fixture(scope="module")
def gateways(
    long_stack: Stack, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """Start two gateways with the same configuration and Redis, and metrics on a second port."""
    folder = tmp_path_factory.mktemp("limits")
    config = write_config(
        folder / "gateway.yaml",
        tenant("fifty", KEYS["fifty"], requests_per_minute=50),
        tenant("large", KEYS["large"], requests_per_minute=1000, tokens_per_minute=500),
        tenant("tokens", KEYS["tokens"], tokens_per_minute=100),
        tenant("single", KEYS["single"], concurrent_requests=1),
        tenant("pair", KEYS["pair"], concurrent_requests=2),
        tenant("free", KEYS["free"]),
        tenant("once", KEYS["once"], requests_per_minute=1),
    )
    common: dict[str, object] = {
        "config": config,
        "redis_url": shared_redis.url,
        "redis_timeout": PATIENT_S,
        "admin_port": 0,
    }
    with (
        GatewayProcess(folder / "1", long_stack, **common) as first,
        GatewayProcess(folder / "2", long_stack, **common) as second,
    ):
        yield first, second


def _count(**fields: Any) -> dict[str, Any]:
    """Return a request with a prompt of 9 tokens and an answer of the maximum length."""
    return body(prompt="Count from 1 to 300", ignore_eos=True, **fields)


LONG = _count(max_tokens=LONG_ANSWER // 2, stream=True)
TOO_LONG = "long " * LONG_SEQ_LEN


def _code(response: httpx.Response) -> str | None:
    code: str | None = response.json()["error"]["code"]
    return code


def _refusals(gateways: tuple[GatewayProcess, GatewayProcess]) -> float:
    return sum(
        metric(
            f"http://127.0.0.1:{gateway.admin_port}/metrics",
            "gateway_rate_limited_total",
            tenant="fifty",
            limit="requests_per_minute",
        )
        for gateway in gateways
    )


@pytest.mark.slow
async def test_two_gateways_let_through_exactly_the_limit(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    counted_before = _refusals(gateways)
    async with (
        gateways[0].async_client(KEYS["fifty"]) as one,
        gateways[1].async_client(KEYS["fifty"]) as two,
    ):
        asked = [client.post("/v1/completions", json=body()) for client in (one, two) * 100]
        answers = await asyncio.gather(*asked)
    passed = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(passed), len(refused)) == (50, 150)
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in passed)
    assert left == list(range(50))
    for answer in refused:
        assert _code(answer) == "rate_limit_exceeded"
        assert answer.json()["error"]["type"] == "requests"
        assert "requests per minute: limit 50, remaining 0" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "true"
        assert 0 < int(answer.headers["retry-after-ms"]) <= 61_000
        wait_s = int(answer.headers["retry-after-ms"]) / 1000
        assert wait_s <= int(answer.headers["retry-after"]) < wait_s + 1
        assert answer.headers["x-ratelimit-limit-requests"] == "50"
        assert "x-ratelimit-limit-tokens" not in answer.headers
    assert _refusals(gateways) - counted_before == 150


def test_tokens_are_reserved_and_then_settled_by_what_was_used(
    gateways: tuple[GatewayProcess, GatewayProcess], shared_redis: RedisServer
) -> None:
    with gateways[0].client(KEYS["large"]) as client, gateways[1].client(KEYS["large"]) as other:
        # The answer ends long before it has used the 200 tokens that the request reserves.
        first = client.post("/v1/completions", json=_count(max_tokens=200, stop=[","]))
        usage = first.json()["usage"]
        reserved = usage["prompt_tokens"] + 200
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 500 - reserved
        assert usage["total_tokens"] < reserved
        assert usage["completion_tokens"] < 20
        expected = 500 - usage["total_tokens"] - usage["prompt_tokens"] - 1
        # Unused tokens are returned after the answer, without delaying it.
        until(lambda: _count_used(shared_redis, "large") == usage["total_tokens"])
        second = other.post("/v1/completions", json=_count(max_tokens=1))
        assert int(second.headers["x-ratelimit-remaining-tokens"]) == expected
        assert second.headers["x-ratelimit-limit-tokens"] == "500"
        assert second.headers["x-ratelimit-remaining-requests"] == "998"
        assert second.headers["x-ratelimit-reset-tokens"].endswith("s")


def test_a_request_that_is_too_large_and_one_that_must_wait(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    with gateways[0].client(KEYS["tokens"]) as client:
        never = client.post("/v1/completions", json=body(max_tokens=100))
        assert (never.status_code, _code(never)) == (429, "rate_limit_exceeded")
        assert never.json()["error"]["type"] == "tokens"
        assert "Request too large for the limit of tokens per minute: limit 100" in never.text
        assert never.headers["x-should-retry"] == "false"
        assert "retry-after" not in never.headers
        assert client.post("/v1/completions", json=_count(max_tokens=1)).status_code == 200
        later = client.post("/v1/completions", json=_count(max_tokens=82))
        assert later.status_code == 429
        assert later.headers["x-should-retry"] == "true"
        assert "Please try again in " in later.json()["error"]["message"]


def test_headers_come_with_a_stream_and_only_where_there_are_limits(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    with gateways[0].client(KEYS["large"]) as client:
        answer = client.post("/v1/completions", json=body(stream=True))
        assert "x-ratelimit-remaining-requests" in answer.headers
    with gateways[0].client(KEYS["free"]) as client:
        answer = client.post("/v1/completions", json=body())
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_requests_at_once_are_counted_over_all_gateways(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    with gateways[0].client(KEYS["single"]) as one, gateways[1].client(KEYS["single"]) as two:
        with one.stream("POST", "/v1/completions", json=LONG) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # keep a reference: httpx closes the stream otherwise
            assert next(lines)
            for client in (one, two):
                answer = client.post("/v1/completions", json=body())
                assert answer.status_code == 429
                assert "concurrent requests: limit 1" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"
        _until_served(two)  # the stream above was closed before its end


def test_choices_prompts_and_beams_count_as_what_they_take(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    with gateways[0].client(KEYS["pair"]) as one, gateways[1].client(KEYS["pair"]) as two:
        for fields in ({"n": 2}, {"prompt": ["a", "b"]}, {"n": 2, "use_beam_search": True}):
            assert one.post("/v1/completions", json=body() | fields).status_code == 200, fields
        with one.stream("POST", "/v1/completions", json=LONG | {"n": 2}) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # keep a reference: httpx closes the stream otherwise
            assert next(lines)
            answer = two.post("/v1/completions", json=body())
            assert answer.status_code == 429
            assert "concurrent requests: limit 2" in answer.json()["error"]["message"]
        _until_served(two)
        for fields, param in (
            ({"n": 3}, "n"),
            ({"prompt": ["a", "b", "c"]}, "prompt"),
            ({"n": 3, "use_beam_search": True}, "n"),
            ({"best_of": 3}, "n"),
        ):
            answer = one.post("/v1/completions", json=body() | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert "this key may have 2 at once" in answer.json()["error"]["message"]


def test_a_request_too_many_is_refused_before_its_prompt_is_looked_at(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    """A request above the rate limit gets that error, even if its prompt is also too long."""
    endless = body(prompt=TOO_LONG)
    with gateways[0].client(KEYS["once"]) as client:
        first = client.post("/v1/completions", json=endless)
        assert (first.status_code, _code(first)) == (400, "context_length_exceeded")
        second = client.post("/v1/completions", json=endless)
        assert (second.status_code, _code(second)) == (429, "rate_limit_exceeded")
        chat = {"model": "demo", "messages": [{"role": "user", "content": TOO_LONG}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 429


def test_places_come_back_from_a_request_that_fails_on_its_way(
    gateways: tuple[GatewayProcess, GatewayProcess],
) -> None:
    with gateways[0].client(KEYS["single"]) as client:
        for _ in range(3):
            answer = client.post("/v1/completions", json=body(prompt=TOO_LONG))
            assert answer.status_code == 400
        assert client.post("/v1/completions", json=body()).status_code == 200


def _until_served(client: httpx.Client) -> None:
    until(lambda: client.post("/v1/completions", json=body()).status_code == 200)


def _count_used(redis_server: RedisServer, name: str) -> int:
    """Return the tokens of a tenant that were reported as used in the last minute."""
    with redis_server.client() as client:
        fields: Any = client.hgetall(f"limits:{{{name}}}")
    return sum([int(value) for field, value in fields.items() if field.startswith(b"t:")])


@pytest.mark.slow
def test_a_long_answer_is_booked_as_it_runs_and_ends_where_its_minute_or_day_is_full(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Tokens of a long answer without max_tokens are counted as they come.

    The engine sends 150 tokens per second, and up to about 2000 in total.
    """
    engine = paced_engine(tmp_path / "engine", tokens_per_second=150.0, first_token_ms=10.0)
    config = write_config(
        tmp_path / "c.yaml",
        tenant("t", KEYS["large"], tokens_per_minute=1700),
        tenant("d", KEYS["tokens"], tokens_per_day=1700),
    )
    with (
        tritons(tmp_path, engine, 1) as one,
        GatewayProcess(
            tmp_path / "g", one, config=config, redis_url=redis_server.url, redis_timeout=PATIENT_S
        ) as gateway,
        gateway.client(KEYS["large"]) as client,
        gateway.client(KEYS["tokens"]) as other,
    ):
        endless = _count(max_tokens=None, stream=True)
        with (
            client.stream("POST", "/v1/completions", json=endless) as running,
            other.stream("POST", "/v1/completions", json=endless) as running_too,
        ):
            assert (running.status_code, running_too.status_code) == (200, 200)
            lines = running.iter_lines()
            assert next(lines)
            until(lambda: len(_seconds(redis_server, "t")) >= 3)
            assert sum(_seconds(redis_server, "t").values()) <= 1700
            at_once = 0
            for stream in (lines, running_too.iter_lines()):
                events = [line for line in stream if line.startswith("data: {")]
                assert '"finish_reason":"length"' in events[-1]
                at_once = max(at_once, *(event.count("Z") for event in events))
        used = sum(_seconds(redis_server, "t").values())
        # Tokens that arrive together after a pause of a process are counted together.
        assert 1024 + 9 < used < 1700 + 150 + at_once
        refused = client.post("/v1/completions", json=_count(max_tokens=500))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        exhausted = other.post("/v1/completions", json=_count(max_tokens=500))
        assert (exhausted.status_code, _code(exhausted)) == (429, "insufficient_quota")


def _seconds(redis_server: RedisServer, name: str) -> dict[str, int]:
    """Return the tokens of a tenant that are counted in each second."""
    with redis_server.client() as client:
        fields: Any = client.hgetall(f"limits:{{{name}}}")
    return {k.decode(): int(v) for k, v in fields.items() if k.startswith(b"t:") and int(v)}


@pytest.mark.slow
def test_a_gateway_that_dies_gives_its_requests_back(
    long_stack: Stack, redis_server: RedisServer, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("t", KEYS["single"], concurrent_requests=1))
    common: dict[str, object] = {
        "config": config,
        "redis_url": redis_server.url,
        "redis_timeout": PATIENT_S,
    }
    with (
        GatewayProcess(tmp_path / "1", long_stack, **common) as first,
        GatewayProcess(tmp_path / "2", long_stack, **common) as second,
        first.client(KEYS["single"]) as one,
        second.client(KEYS["single"]) as two,
    ):
        with one.stream("POST", "/v1/completions", json=LONG) as running:
            lines = running.iter_lines()  # keep a reference: httpx closes the stream otherwise
            assert next(lines)
            assert two.post("/v1/completions", json=body()).status_code == 429
            first.process.kill()
        _until_served(two)  # the dead gateway's lease ends after 15 s


def test_limits_change_with_the_configuration(
    stack: Stack, redis_server: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    config = write_config(path, tenant("t", "sk-t-key", requests_per_minute=1))
    with (
        GatewayProcess(
            tmp_path, stack, config=config, redis_url=redis_server.url, redis_timeout=PATIENT_S
        ) as gateway,
        gateway.client("sk-t-key") as client,
    ):
        statuses = [client.post("/v1/completions", json=body()).status_code for _ in range(2)]
        write_config(path, tenant("t", "sk-t-key", requests_per_minute=2))
        gateway.wait_for("is in force")
        statuses += [client.post("/v1/completions", json=body()).status_code for _ in range(2)]
        assert statuses == [200, 429, 200, 429]
