"""Background responses through OpenAI's own package, against the real stack."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types.responses import Response

from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.limit_requests import PATIENT_S
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer
from tests.support.triton_server import LONG_ANSWER

CAPITAL = "What is the capital of France?"
COUNT = "Count from 1 to 300"
ENDED = ("completed", "incomplete", "failed", "cancelled")
WITHIN_S = 300.0  # a longer wait means that something hangs


def asked(said: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": said, "temperature": 0, "max_output_tokens": 40} | fields


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(client: openai.OpenAI, response_id: str) -> Response:
    found: Response = client.responses.retrieve(response_id)
    deadline = time.monotonic() + WITHIN_S
    while found.status not in ENDED:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.05)
        found = client.responses.retrieve(response_id)
    return found


def events(stream: Any) -> list[dict[str, Any]]:
    return [event.to_dict() for event in stream]


def test_it_is_polled_for(client: openai.OpenAI) -> None:
    made = client.responses.create(**asked(CAPITAL), background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    found = ended(client, made.id)
    same = client.responses.create(**asked(CAPITAL))
    assert (found.status, found.output_text) == ("completed", same.output_text)
    assert found.usage.input_tokens == same.usage.input_tokens
    assert (found.id, found.created_at) == (made.id, made.created_at)
    again = client.responses.create(**asked("And of Italy?"), previous_response_id=made.id)
    assert "Italy" in again.output_text
    # Cancelling a completed response changes nothing and returns the response.
    assert client.responses.cancel(made.id).to_dict() == found.to_dict()


def test_its_events_can_be_had_again_from_any_on(client: openai.OpenAI) -> None:
    live = events(client.responses.create(**asked(CAPITAL), background=True, stream=True))
    assert [event["sequence_number"] for event in live] == list(range(len(live)))
    kinds = [event["type"] for event in live]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    whole = client.responses.create(**asked(CAPITAL))
    assert live[-1]["response"]["output"][0]["content"] == whole.to_dict()["output"][0]["content"]
    foreground = events(client.responses.create(**asked(CAPITAL), stream=True))
    # Several tokens may arrive in one event, so only the order of event types is compared.
    told = [kind for kind, _ in itertools.groupby(kinds) if kind != "response.queued"]
    assert told == [kind for kind, _ in itertools.groupby(event["type"] for event in foreground)]
    response_id = live[0]["response"]["id"]
    assert events(client.responses.retrieve(response_id, stream=True)) == live
    for number in range(len(live)):
        rest = client.responses.retrieve(response_id, stream=True, starting_after=number)
        assert events(rest) == live[number + 1 :]
    client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id, stream=True)


@pytest.mark.slow
def test_who_leaves_its_stream_can_come_back_to_it(client: openai.OpenAI) -> None:
    wanted = asked(COUNT, max_output_tokens=200)
    with client.responses.create(**wanted, background=True, stream=True) as stream:
        seen = [next(stream).to_dict() for _ in range(5)]
    response_id = seen[0]["response"]["id"]
    rest = client.responses.retrieve(response_id, stream=True, starting_after=4)
    told = seen + events(rest)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    text = "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta")
    assert text == client.responses.create(**wanted).output_text
    assert told[-1]["response"] == client.responses.retrieve(response_id).to_dict()


def test_its_items_come_to_its_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    answer = client.responses.create(**asked(CAPITAL), background=True, conversation=made.id)
    found = ended(client, answer.id)
    items = client.conversations.items.list(made.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant"]
    assert items[1].id == found.output[0].id


def test_what_cannot_be_asked_of_it(client: openai.OpenAI) -> None:
    made = client.responses.create(**asked(CAPITAL))
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(made.id, stream=True)
    assert refused.value.param == "stream"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(made.id, extra_query={"starting_after": 1})
    assert refused.value.param == "starting_after"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_" + "0" * 32)
    with pytest.raises(openai.BadRequestError):  # refused at once, and nothing is stored
        client.responses.create(**asked("a " * 9000), background=True)


@pytest.fixture(scope="module")
def shared(
    long_stack: Stack, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Yield a gateway of two workers with long answers. Tenant `one` may have two requests in
    flight.
    """
    folder = tmp_path_factory.mktemp("background")
    config = write_config(
        folder / "c.yaml", tenant("one", "sk-one", concurrent_requests=2), tenant("two", "sk-two")
    )
    # If Redis did not answer in time, each worker would count the tenant's requests separately.
    settings = {"workers": 2, "redis_url": shared_redis.url, "redis_timeout": PATIENT_S}
    settings |= {"usage_log": folder / "usage"}
    with GatewayProcess(folder / "g", long_stack, config=config, **settings) as gateway:
        yield gateway


def of_tenant(gateway: GatewayProcess, name: str) -> openai.OpenAI:
    """Return a client that opens a connection per request, so any worker may accept the request."""
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1",
        api_key=f"sk-{name}",
        max_retries=0,
        default_headers={"connection": "close"},
        timeout=PATIENCE_S,
    )


# These answers outlast every test, even if the machine stops the test's process for a while.
LONG = asked(COUNT, max_output_tokens=LONG_ANSWER, extra_body={"ignore_eos": True})
never_ends = pytest.mark.token_mode_only(
    "llmapi has no `ignore_eos`, others no metrics", of=["bls", "ensemble", "llmapi"]
)


def _active(stack: Stack) -> float:
    return metric(
        stack.triton_metrics,
        "nv_trt_llm_request_metrics",
        model="tensorrt_llm",
        request_type="active",
    )


@pytest.mark.slow
@never_ends
@pytest.mark.parametrize("stream", [False, True])
def test_who_cancels_it_frees_the_engine_whichever_worker_runs_it(
    shared: GatewayProcess, long_stack: Stack, stream: bool
) -> None:
    before = _billed(shared)
    with of_tenant(shared, "one") as client, of_tenant(shared, "two") as other:
        for _ in range(6):
            until(lambda: _active(long_stack) == 0)
            response_id = _begun(client, stream=stream)
            until(lambda: _active(long_stack) == 1)
            for reach in (other.responses.cancel, other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    reach(response_id)
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(response_id, stream=True)
            with pytest.raises(openai.BadRequestError, match="queued"):
                client.responses.create(**asked("x"), previous_response_id=response_id)
            assert client.responses.cancel(response_id).status == "cancelled"
            assert client.responses.retrieve(response_id).status == "cancelled"
            until(lambda: _active(long_stack) == 0)
            assert client.responses.retrieve(response_id).status == "cancelled"
            if stream:
                rest = events(client.responses.retrieve(response_id, stream=True))
                assert rest[-1]["type"] != "response.completed"
    # Each cancelled response is billed once, with the status of a client that disconnected.
    until(lambda: _billed(shared) == before + 6)


def _billed(gateway: GatewayProcess) -> int:
    """Return the number of usage log lines with status 499 (client closed request)."""
    lines = (gateway.log.parent.parent / "usage").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["status"] == 499 for line in lines)


def _begun(client: openai.OpenAI, *, stream: bool) -> str:
    made = client.responses.create(**LONG, background=True, stream=stream)
    if not stream:
        assert made.status == "queued"
        return str(made.id)
    with made as live:
        return str(next(live).response.id)


@never_ends
def test_a_tenants_places_hold_in_the_background(shared: GatewayProcess) -> None:
    with of_tenant(shared, "one") as client:
        running = [_begun(client, stream=False) for _ in range(2)]
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**LONG, background=True)
        for response_id in running:
            client.responses.delete(response_id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)

        def has_room() -> bool:
            try:
                return bool(client.responses.create(**asked("x", max_output_tokens=1)).id)
            except openai.RateLimitError:
                return False

        until(has_room)


@pytest.mark.slow
def test_nothing_comes_back_to_a_conversation_that_was_deleted(shared: GatewayProcess) -> None:
    with of_tenant(shared, "two") as client:
        made = client.conversations.create()
        wanted = asked(COUNT, max_output_tokens=300, conversation=made.id, store=False)
        with client.responses.create(**wanted, stream=True) as live:
            next(live)
            client.conversations.delete(made.id)
            *_, last = live
        [item] = last.response.output
        reference = {"type": "item_reference", "id": item.id}
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**asked("x") | {"input": [reference]})


@pytest.mark.slow
def test_a_live_stream_goes_on_at_any_worker(shared: GatewayProcess) -> None:
    with of_tenant(shared, "one") as client:
        wanted = asked(COUNT, max_output_tokens=300)
        made = client.responses.create(**wanted, background=True, stream=True)
        with made as live:
            told = [next(live).to_dict()]
        response_id = told[0]["response"]["id"]
        while _more(told):
            number = told[-1]["sequence_number"]
            with client.responses.retrieve(
                response_id, stream=True, starting_after=number
            ) as stream:
                told += [event.to_dict() for event in itertools.islice(stream, 50)]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        text = "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta")
        assert text == told[-1]["response"]["output"][0]["content"][0]["text"]


def _more(told: list[dict[str, Any]]) -> bool:
    return told[-1]["type"] not in ("response.completed", "response.incomplete")


@never_ends
@pytest.mark.slow
def test_one_whose_gateway_was_killed_has_failed(long_stack: Stack, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "g", long_stack) as gateway:
        with of_tenant(gateway, "any") as client:
            streamed = _begun(client, stream=True)
            polled = _begun(client, stream=False)
            until(lambda: client.responses.retrieve(polled).status == "in_progress")
        for process in [psutil.Process(gateway.process.pid)]:
            process.send_signal(signal.SIGKILL)
        gateway.process.wait(60)
    with (
        GatewayProcess(tmp_path / "g", long_stack) as gateway,
        of_tenant(gateway, "any") as client,
    ):
        found = ended(client, polled)
        assert (found.status, found.error.code) == ("failed", "server_error")
        told = events(client.responses.retrieve(streamed, stream=True))
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"] == client.responses.retrieve(streamed).to_dict()
        with pytest.raises(openai.BadRequestError, match="failed"):
            client.responses.create(**asked("x"), previous_response_id=polled)


@pytest.mark.slow
@never_ends
def test_it_has_the_grace_of_all_requests_when_its_gateway_ends(
    long_stack: Stack, tmp_path: Path
) -> None:
    with GatewayProcess(tmp_path / "g", long_stack) as gateway:
        with of_tenant(gateway, "any") as client:
            short = client.responses.create(**asked(COUNT, max_output_tokens=200), background=True)
    with GatewayProcess(tmp_path / "g", long_stack, shutdown_grace=1) as gateway:
        with of_tenant(gateway, "any") as client:
            assert client.responses.retrieve(short.id).status == "incomplete"
            long = _begun(client, stream=False)
    with GatewayProcess(tmp_path / "g", long_stack) as gateway:
        with of_tenant(gateway, "any") as client:
            found = client.responses.retrieve(long)
            assert (found.status, found.error.code) == ("failed", "server_error")
    assert httpx.get(long_stack.gateway + "/health/ready", timeout=PATIENCE_S).status_code == 200
