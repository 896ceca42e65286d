"""Rate limits while Redis is slow or unavailable: each gateway counts alone and does not wait."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from gateway.config.file import Configuration
from gateway.config.tenants import Tenant
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import Decision, LimitRequest, Settlement, Spending
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S, limit_request, until
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer

GIVEN_UP = "Redis has not answered within"


async def test_an_answer_that_trickles_is_not_waited_for(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A Redis that sends its answer byte by byte is given up, although no read times out."""
    trickles = asyncio.Event()
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        path = redis_server.url.removeprefix("unix://")
        from_redis, to_redis = await asyncio.open_unix_connection(path)

        async def there() -> None:
            while data := await reader.read(65536):
                to_redis.write(data)
            to_redis.close()

        sending = asyncio.create_task(there())
        while data := await from_redis.read(65536):
            while trickles.is_set() and data:
                writer.write(data[:1])
                data = data[1:]
                await asyncio.sleep(0.05)
            writer.write(data)
        await sending
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ask = limit_request("t", requests=100, concurrent=1)
    async with server:
        async with SharedLimits(f"redis://127.0.0.1:{port}", timeout_s=1.0) as limits:
            async with asyncio.timeout(300):
                while not limits.up:
                    await asyncio.sleep(0.05)
            before = caplog.text.count(GIVEN_UP)
            trickles.set()
            *_, last = await asyncio.gather(*[limits.take(ask) for _ in range(30)])
            assert last is None
            assert caplog.text.count(GIVEN_UP) == before + 1
            trickles.clear()
            # Units that Redis counted for abandoned calls are returned.
            async with asyncio.timeout(300):
                while (decision := await limits.take(ask)) is None or decision.refused is not None:
                    await asyncio.sleep(0.05)
        await asyncio.gather(*[task for task in serving if task is not None])


async def test_while_redis_is_late_it_is_told_and_one_request_alone_waits(
    redis_server: RedisServer,
) -> None:
    """Only one request waits for a slow Redis. The following requests are counted locally.

    The Redis connection's timeout is longer than a request's maximum wait, so it stays open.
    """
    ups: list[bool] = []
    ask = limit_request("t", requests=100)
    async with SharedLimits(redis_server.url, ups.append, timeout_s=PATIENT_S) as limits:
        assert await limits.take(ask) is not None
        limits._max_wait_s = 0.01
        redis_server.signal(signal.SIGSTOP)
        assert await limits.take(ask) is None
        assert (ups, limits.up) == ([True, False], False)
        limits._max_wait_s = PATIENT_S
        assert await limits.take(ask) is None, "it is waited for again"
        redis_server.signal(signal.SIGCONT)
        async with asyncio.timeout(300):
            while not limits.up:
                await asyncio.sleep(0.02)
        assert ups == [True, False, True]
        assert await limits.take(ask) is not None


async def test_what_ends_as_redis_is_lost_holds_nothing_afterwards(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settlement that is lost because the role check fails is sent later."""
    for module in ("primary", "redis_role"):
        monkeypatch.setattr(f"lora_store.{module}.ROLE_CHECK_S", 0.0)
    ask, other = limit_request("t", concurrent=1), limit_request("other", requests=100)
    budget = limit_request("spender", day=100)
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as limits:

        async def take(request: LimitRequest) -> Decision:
            async with asyncio.timeout(300):
                while (decision := await limits.take(request)) is None:
                    await asyncio.sleep(0.02)
            return decision

        assert (await take(ask)).refused is None
        redis_server.kill()
        limits.settle(Settlement(ask, slots=1))
        limits.spend(Spending("spender", budget.budgets, 30))
        redis_server.start()
        for _ in range(2):  # the first call after the outage also sends settlements and spending
            await take(other)
        assert (await take(ask)).refused is None
        assert (await take(budget)).quotas["tokens_per_day"].used == 30


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_redis_away_costs_nobody_a_wait(
    stack: Stack, redis_server: RedisServer, tmp_path: Path, how: str
) -> None:
    """Each gateway counts alone while Redis is down, and counts with others once it is back."""
    config = write_config(tmp_path / "c.yaml", tenant("t", "sk-t-key", requests_per_minute=3))
    with (
        GatewayProcess(
            tmp_path,
            stack,
            config=config,
            redis_url=redis_server.url,
            redis_timeout=6,
            admin_port=0,
        ) as gateway,
        gateway.client("sk-t-key") as client,
    ):
        metrics = f"http://127.0.0.1:{gateway.admin_port}/metrics"
        until(lambda: metric(metrics, "gateway_limits_shared") == 1)
        assert client.post("/v1/completions", json=body()).status_code == 200
        if how == "stopped":
            redis_server.signal(signal.SIGSTOP)
        else:
            redis_server.kill()
        # All requests are answered while Redis is down.
        statuses = [client.post("/v1/completions", json=body()).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        assert metric(metrics, "gateway_limits_shared") == 0
        assert metric(metrics, "gateway_limits_alone_total") >= 5
        if how == "stopped":
            redis_server.signal(signal.SIGCONT)
        else:
            redis_server.start()
        until(lambda: metric(metrics, "gateway_limits_shared") == 1)
        answer = client.post("/v1/completions", json=body())
        assert answer.status_code == 200
        # A stopped Redis still has the first request. A killed one may have got the gateway's
        # report before or after its death.
        left = int(answer.headers["x-ratelimit-remaining-requests"])
        assert left in ((1, 2) if how == "killed" else (1,))


def _tenant() -> Tenant:
    return Tenant(
        name="t", keys=[], models=[], requests_per_minute=1, tokens_per_minute=1000,
        concurrent_requests=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("away", "outcomes"),
    [
        ({}, ["passed", "RateLimited"]),
        ({"requests_per_minute": "allow"}, ["passed", "RateLimited"]),
        ({"requests_per_minute": "allow", "concurrent_requests": "allow"}, ["passed", "passed"]),
        # A request is counted before its tokens are.
        ({"tokens_per_minute": "refuse"}, ["LimitsUnavailable", "RateLimited"]),
        ({"requests_per_minute": "refuse"}, ["LimitsUnavailable", "LimitsUnavailable"]),
    ],
)
async def test_each_limit_has_its_own_choice(away: dict[str, str], outcomes: list[str]) -> None:
    configuration = Configuration.model_validate({"limits": {"when_redis_is_away": away}})
    async with SharedLimits("unix:///nowhere/redis.sock") as nowhere:
        limits = Limits(nowhere)
        limits.update(configuration)
        found = []
        for _ in range(2):
            try:
                reservation = await limits.count(_tenant(), 1)
                await reservation.reserve(10)
                found.append("passed")
            except Exception as error:
                found.append(type(error).__name__)
    assert found == outcomes
