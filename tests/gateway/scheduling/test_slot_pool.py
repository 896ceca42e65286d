"""Requests with more choices than slots: their choices run in turns and block no other tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.limit_requests import until
from tests.support.local_stack import Stack
from tests.support.metrics import metric

KEYS = {"many": "sk-many-key", "other": "sk-other-key"}
PLACES, SHARE = 8, 6
QUEUE_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("places")
    config = write_config(folder / "c.yaml", *[tenant(*pair) for pair in KEYS.items()])
    with GatewayProcess(
        folder,
        stack,
        config=config,
        replica_in_flight=PLACES,
        queue_timeout=QUEUE_TIMEOUT_S,
        admin_port=0,
    ) as gateway:
        yield gateway


def _taken(gateway: GatewayProcess) -> float:
    return metric(f"http://127.0.0.1:{gateway.admin_port}/metrics", "gateway_places_taken")


def test_another_tenant_is_served_beside_requests_of_128_choices(gateway: GatewayProcess) -> None:
    """A tenant gets slots beside another tenant's requests that exceed the queue timeout."""
    endless = body(
        prompt="Count from 1 to 300", n=128, max_tokens=1900, ignore_eos=True, stream=True
    )
    with gateway.client(KEYS["many"]) as many, gateway.client(KEYS["other"]) as other:
        with (
            many.stream("POST", "/v1/completions", json=endless) as first,
            gateway.client(KEYS["many"]) as more,
        ):
            assert first.status_code == 200
            lines = first.iter_lines()  # keep a reference: httpx closes the stream otherwise
            assert next(lines)
            # Choices start one by one: the first may have a token before the last one has its slot.
            until(lambda: _taken(gateway) == SHARE)
            with pytest.raises(Exception, match="timed out"):
                more.post("/v1/completions", json=endless, timeout=2)
            assert _taken(gateway) == SHARE
            answer = other.post("/v1/completions", json=body(n=2))
            assert answer.status_code == 200
            assert len(answer.json()["choices"]) == 2
            assert any("delta" in line or "text" in line for line in lines)


@pytest.mark.parametrize("stream", [True, False])
def test_more_choices_than_places_run_in_turns(gateway: GatewayProcess, stream: bool) -> None:
    asked = body(n=20, max_tokens=3, ignore_eos=True, stream=stream)
    with gateway.client(KEYS["many"]) as many:
        answer = many.post("/v1/completions", json=asked)
        assert answer.status_code == 200
        if stream:
            assert answer.text.count('"finish_reason":"length"') == 20
        else:
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(20))
            assert answer.json()["usage"]["completion_tokens"] == 60
    assert _taken(gateway) == 0


def test_beams_that_can_never_run_at_once_are_refused_by_number(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """More beams than slots are refused, but beam searches of several prompts run in turns."""
    folder = tmp_path_factory.mktemp("beams")
    with (
        GatewayProcess(folder, stack, replica_in_flight=2) as gateway,
        gateway.client() as client,
    ):
        beams = body(n=2, max_tokens=3, use_beam_search=True, temperature=0)
        answer = client.post("/v1/completions", json=beams | {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 6
        refused = client.post("/v1/completions", json=beams | {"n": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "found 3 beams; allowed: 2" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("requests", "choices"), [(6, 1), (1, 6)])
async def test_a_gateway_takes_no_more_than_it_may_of_many_places(
    tmp_path: Path, requests: int, choices: int
) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault="slow", step=0)
    wanted = {"model": "m", "prompt": "xyz", "max_tokens": 40, "n": choices, "temperature": 1}
    settings: dict[str, Any] = {"replica_in_flight": 16, "max_in_flight": 2}
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, **settings) as (client, service, _),
        asyncio.timeout(300),
    ):
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=wanted))
            for _ in range(requests)
        ]
        admission = service.admission
        while admission.in_flight + admission.waiting < (requests if choices == 1 else 2):
            await asyncio.sleep(0.01)
        assert admission.in_flight == 2
        engine.fault = None
        engine.released.set()
        answers = await asyncio.gather(*asked)
    assert [len(answer.json()["choices"]) for answer in answers] == [choices] * requests
