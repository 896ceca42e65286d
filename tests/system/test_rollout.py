"""Gateways without persistent disks are replaced, like pods, and Redis loses its data."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.local_stack import Stack
from tests.support.redis_server import RedisServer

_GATEWAYS, _LEFT, _SEEN = (f"conversations:{{all}}:{name}" for name in ("gateways", "left", "seen"))
_GOODBYE = "no other gateway waits"


def _say(client: httpx.Client, text: str, **more: str) -> str:
    """Create a response and return its id."""
    body = {"model": "demo", "input": text, "max_output_tokens": 2, **more}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def _begin(client: httpx.Client) -> str:
    return str(client.post("/v1/conversations", json={}).json()["id"])


def _texts(client: httpx.Client, conversation: str) -> list[str]:
    answer = client.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"})
    assert answer.status_code == 200, answer.text
    return [item["content"][0]["text"] for item in answer.json()["data"]]


def _patiently(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat the request while the answer is 503."""
    deadline = time.monotonic() + 60
    while (answer := ask()).status_code == 503:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)
    return answer


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rollout_and_a_flush_lose_no_part_of_a_conversation(
    stack: Stack, shared_redis: RedisServer, tmp_path: Path
) -> None:
    def start(name: str, started: ExitStack) -> tuple[GatewayProcess, httpx.Client]:
        gateway = GatewayProcess(
            tmp_path / name,
            stack,
            allow_anonymous=True,
            redis_url=shared_redis.url,
            store_ephemeral=True,
            workers=2,
        )
        return started.enter_context(gateway), started.enter_context(gateway.client())

    with shared_redis.client() as at_redis, ExitStack() as new, ExitStack() as old:
        at_redis.flushall()
        (first, one), (second, two) = start("1", old), start("2", old)
        conversation = _begin(one)
        lone = _say(two, "Only the second gateway has this.")
        for client, text in ((one, "Red"), (two, "Green"), (one, "Blue")):
            _say(client, text, conversation=conversation)
        whole = _texts(two, conversation)
        assert whole[::2] == ["Red", "Green", "Blue"]
        # Two gateways replace the first two. One of them loads the conversation before they end.
        (third, three), (_, four) = start("3", new), start("4", new)
        assert three.get(f"/v1/conversations/{conversation}").status_code == 200
        old.close()
        assert [gateway.text.count(_GOODBYE) for gateway in (first, second)] == [1, 1]
        assert at_redis.hlen(_GATEWAYS) == 2
        assert _texts(four, conversation) == whole
        left = int(at_redis.get(_LEFT) or 0)
        # Each worker reports to Redis every second.
        seen = left + 3000
        _wait(lambda: int(at_redis.get(_SEEN) or 0) > seen)
        later = _begin(three)
        for client, text in ((three, "Mild"), (four, "Hot")):
            _say(client, text, conversation=later)
        told = _texts(three, later)

        at_redis.flushall()
        for client in (three, four):
            for path in (f"/v1/conversations/{conversation}", f"/v1/responses/{lone}"):
                answer = _patiently(lambda client=client, path=path: client.get(path))  # type: ignore[misc]
                assert answer.status_code == 404, answer.text
            answer = client.post(
                "/v1/responses", json={"model": "demo", "input": "x", "conversation": conversation}
            )
            assert answer.status_code == 404, answer.text
            assert _texts(client, later) == told
        # A killed gateway has not removed itself from the list in Redis.
        master = psutil.Process(third.process.pid)
        for process in (master, *master.children(recursive=True)):
            process.kill()
        third.process.wait()
        at_redis.flushall()
        _wait(lambda: at_redis.hlen(_GATEWAYS) == 2)
        assert four.get(f"/v1/responses/{lone}").status_code == 503
