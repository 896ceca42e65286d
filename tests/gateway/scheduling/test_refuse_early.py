"""Early refusal of requests whose first token cannot come in time, and of no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.settings import Settings
from gateway.scheduling.forecast import MIN_SAMPLES
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

URL = "/v1/completions"
KEYS = {"flood": "sk-flood-key", "other": "sk-other-key", "any": "sk-any-key"}
WITHIN_S = 5.0
# Of the 40 requests, about 20 can get a slot within WITHIN_S.
PLACES, FLOOD = 2, 40


@dataclass
class Case:
    """A gateway with two slots per tenant, and an engine that takes half a second per answer."""

    engine: FakeTriton
    client: httpx.AsyncClient
    service: Any
    clock: EventClock

    def ask(self, name: str, url: str = URL, **headers: str) -> asyncio.Task[httpx.Response]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 40}
        if url == URL:
            body["prompt"] = "xyz"
        else:
            body["messages"] = [{"role": "user", "content": "x"}]
        headers |= {"authorization": f"Bearer {KEYS[name]}"}
        return asyncio.create_task(self.client.post(url, json=body, headers=headers, timeout=120))

    async def learn(self, name: str) -> None:
        """Send requests until the gateway has measured how long answers take."""
        for _ in range(4):
            answers = await asyncio.gather(*[self.ask(name) for _ in range(PLACES)])
            assert {answer.status_code for answer in answers} == {200}

    def hold(self) -> None:
        """Make the engine hold back all answers until `go_on`."""
        self.engine.released.clear()
        self.engine.fault = "slow"

    def go_on(self) -> None:
        self.engine.fault = None
        self.engine.released.set()

    async def flood(
        self, name: str, url: str = URL, **headers: str
    ) -> tuple[list[asyncio.Task[httpx.Response]], list[httpx.Response]]:
        """Return all requests, and the answers that were refused while no slot became free."""
        self.hold()
        admission = self.service.admission
        # Stop the clock, so that no request times out before all have arrived.
        with self.clock.standing():
            asked = [self.ask(name, url, **headers) for _ in range(FLOOD)]
            while True:
                refused = [task.result() for task in asked if task.done()]
                if admission.in_flight + admission.waiting + len(refused) == FLOOD:
                    break
                await asyncio.sleep(0)
        assert admission.in_flight == PLACES
        return asked, refused

    def refused(self, name: str, cause: str) -> float:
        labels = {"tenant": name, "cause": cause}
        return metric_of(self.service, "gateway_queue_refusals_total", **labels)


@asynccontextmanager
async def case(folder: Path, **settings: Any) -> AsyncIterator[Case]:
    clock = EventClock()
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "!", "chat_template": "{{ messages[0].content }}"}'
    )
    engine = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    engine.pause_s = 0.1
    config = write_config(
        folder / "c.yaml",
        tenant("flood", KEYS["flood"], first_token_within=WITHIN_S),
        tenant("other", KEYS["other"], first_token_within=WITHIN_S),
        tenant("any", KEYS["any"]),
    )
    settings = {"config": config, "max_in_flight": 2 * PLACES, "tenant_share": 0.5} | settings
    async with serving(engine) as endpoint, running(folder, endpoint, **settings) as started:
        client, service, _ = started
        yield Case(engine, client, service, clock)
        engine.released.set()


async def test_what_cannot_come_in_time_is_refused_at_once(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        await it.learn("flood")
        await it.learn("other")
        asked, refused = await it.flood("flood")
        assert 0 < len(refused) < FLOOD - PLACES
        assert {answer.status_code for answer in refused} == {503}
        assert it.refused("flood", "expected_wait") == len(refused)
        told = refused[0].json()["error"]
        assert (told["code"], told["type"]) == ("overloaded", "server_error")
        after_s = max(int(answer.headers["retry-after"]) for answer in refused)
        assert after_s > 1, "it is no forecast"
        # The flood does not delay another tenant's request.
        other = it.ask("other")
        while it.service.admission.in_flight == PLACES:
            assert not other.done()
            await asyncio.sleep(0.01)
        it.go_on()
        assert (await other).status_code == 200
        await asyncio.sleep(after_s)
        assert (await it.ask("flood")).status_code == 200
        assert (await it.ask("flood", "/v1/chat/completions")).status_code == 200
        await asyncio.gather(*asked)
        assert it.refused("other", "expected_wait") == 0


async def test_each_protocol_says_it_in_its_words(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        await it.learn("flood")
        asked, refused = await it.flood("flood", "/v1/messages")
        assert refused[0].status_code == 503
        assert int(refused[0].headers["retry-after"]) >= 1
        assert refused[0].json()["error"]["type"] == "overloaded_error"
        it.go_on()
        await asyncio.gather(*asked)


async def test_by_default_too_long_a_wait_is_refused_at_once_and_a_late_turn_is_kept(
    tmp_path: Path,
) -> None:
    async with case(tmp_path, max_expected_wait=WITHIN_S, queue_timeout=600) as it:
        await it.learn("any")
        asked, refused = await it.flood("any")
        assert 0 < len(refused) < FLOOD - PLACES
        assert it.refused("any", "expected_wait") == len(refused)
        assert all(int(answer.headers["retry-after"]) >= WITHIN_S for answer in refused)
        # The wait becomes much longer than the forecast. Requests in the queue stay there.
        it.clock.leap(60)
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert sum(task.done() for task in asked) == len(refused)
        it.go_on()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers].count(200) == FLOOD - len(refused)
        assert it.refused("any", "queue_timeout") + it.refused("any", "too_late") == 0


async def test_a_flood_at_the_start_of_a_gateway_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing is known of the tenant's requests yet, and none of them ends soon."""
    async with case(tmp_path) as it:
        asked, refused = await it.flood("any")
        assert MIN_SAMPLES <= it.service.admission.waiting < FLOOD / 2
        assert it.refused("any", "expected_wait") == len(refused) > FLOOD / 2
        it.go_on()
        await asyncio.gather(*asked)


def test_the_default_wait_is_one_that_people_accept() -> None:
    fields = Settings.model_fields
    assert fields["max_expected_wait"].default <= 10 < fields["queue_timeout"].default


@pytest.mark.parametrize("name", ["flood", "any"])
async def test_in_the_background_nobody_waits_for_a_first_token(tmp_path: Path, name: str) -> None:
    async with case(tmp_path, max_expected_wait=WITHIN_S) as it:
        await it.learn(name)
        asked, _ = await it.flood(name)
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        body = {"model": "m", "input": "x", "max_output_tokens": 40, "background": True}
        begun = await it.client.post("/v1/responses", json=body, headers=headers)
        url, status = f"/v1/responses/{begun.json()['id']}", begun.json()["status"]
        it.go_on()
        while status in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
            answer = (await it.client.get(url, headers=headers)).json()
            status = answer["status"]
        assert status == "completed", str(answer["error"])
        await asyncio.gather(*asked)


async def test_nobody_is_refused_of_whom_nothing_is_known(tmp_path: Path) -> None:
    """Without measured durations, requests wait until their first token would be too late.

    The gateway then does not send them to the engine.
    """
    async with case(tmp_path, queue_timeout=600) as it:
        it.hold()
        asked = [it.ask("flood") for _ in range(3 * PLACES)]
        done, _ = await asyncio.wait(asked, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().status_code for task in done} == {503}
        assert it.refused("flood", "expected_wait") == 0
        assert it.refused("flood", "too_late") >= 1
        assert len(it.engine.requests) == PLACES
        it.engine.released.set()
        await asyncio.gather(*asked)


async def test_nobody_is_refused_who_need_not_wait(tmp_path: Path) -> None:
    """A request that gets a slot at once is not refused, however short its deadline is."""
    async with case(tmp_path) as it:
        await it.learn("flood")
        asked = it.ask("flood", **{"x-request-timeout": "0.05"})
        assert (await asked).status_code == 504
        assert it.refused("flood", "expected_wait") + it.refused("flood", "too_late") == 0


@pytest.mark.parametrize(("asked_s", "counted"), [("3", "499"), ("45", "503")])
async def test_a_deadline_of_the_clients_own_pages_nobody(
    tmp_path: Path, asked_s: str, counted: str
) -> None:
    """A refusal counts as 499 only if the client's deadline is below the queue timeout.

    Alerts ignore 499, because a short deadline is the client's own choice.
    """
    async with case(tmp_path, queue_timeout=4) as it:
        await it.learn("any")
        asked, refused = await it.flood("any", **{"x-request-timeout": asked_s})
        assert {answer.status_code for answer in refused} == {503}
        assert "retry-after" in refused[0].headers
        labels = {"path": URL, "status": counted}
        assert metric_of(it.service, "gateway_requests_total", **labels) == len(refused)
        # Operators see the same cause as in the metric.
        assert it.refused("any", "expected_wait") == len(refused)
        assert it.service.monitor.demand.refused["any"] == {"expected_wait": len(refused)}
        it.go_on()
        await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("waits", "warned"),
    [
        ({"queue_timeout": 5, "max_expected_wait": 6}, True),
        ({"queue_timeout": 5, "max_expected_wait": 5}, False),
        ({"queue_timeout": 5}, False),
    ],
)
async def test_an_expected_wait_without_effect_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: dict[str, float], warned: bool
) -> None:
    async with case(tmp_path, **waits):
        pass
    told = "GATEWAY_MAX_EXPECTED_WAIT, 6 s, has no effect above GATEWAY_QUEUE_TIMEOUT, 5 s"
    assert (told in caplog.text) is warned


async def test_where_it_is_off_all_wait(tmp_path: Path) -> None:
    async with case(tmp_path, refuse_early=False) as it:
        await it.learn("flood")
        asked, refused = await it.flood("flood")
        assert not refused
        it.go_on()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
