"""The console's API: the state, the events that update it, cancellation, and access control."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.config.tenants import new_key
from tests.support.consoles import State, state_of, states, until
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer
from tests.support.triton_server import LONG_ANSWER

ACME, OTHER, ADMIN = "sk-the-key-of-acme", "sk-the-key-of-other", new_key()
TRIES = 4
STREAM = {"model": "demo", "stream": True, "ignore_eos": True, "max_tokens": LONG_ANSWER}


@pytest.fixture(scope="module")
def gateway(
    long_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Run a gateway with one slot, so that a second request waits."""
    folder = tmp_path_factory.mktemp("console")
    config = write_config(
        folder / "c.yaml",
        tenant("acme", ACME, requests_per_minute=1000),
        tenant("other", OTHER, requests_per_minute=1),
    )
    settings = {"config": config, "admin_key": ADMIN, "max_in_flight": 1, "log_format": "json"}
    with GatewayProcess(folder / "gateway", long_stack, **settings) as running:
        yield running


class Answering:
    """A long streamed answer whose first token has arrived. `rest` iterates over later lines."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.read()
        self.headers = answer.headers
        self.rest = answer.iter_lines()
        next(self.rest)


@contextmanager
def answering(gateway: GatewayProcess, key: str = ACME, **more: Any) -> Iterator[Answering]:
    asked = {**STREAM, "prompt": "Count from 1 to 300"} | more
    with (
        gateway.client(key) as client,
        client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        yield Answering(answer)


def _ms_since(moment: float) -> float:
    """Return the milliseconds since `moment`. No step that began later can have taken longer."""
    return 1000 * (time.monotonic() - moment)


def _request(seen: State, /, **facts: Any) -> dict[str, Any] | None:
    found = [r for r in seen["requests"].values() if facts.items() <= r.items()]
    return found[0] if found else None


def test_the_state_follows_a_request_through_queue_run_and_stop(gateway: GatewayProcess) -> None:
    with answering(gateway) as _answer:  # the name keeps the answer open
        running = until(gateway, ADMIN, lambda s: _request(s, state="running"))
        assert running["tenant"] == "acme"
        assert running["model"] == "demo"
        assert running["path"] == "/v1/completions"
        assert running["prompt_tokens"] > 0
        state = state_of(gateway, ADMIN)
        [replica] = state["replicas"].values()
        assert (replica["state"], replica["in_flight"]) == ("ready", 1)
        assert running["replica"] in state["replicas"]
        assert state["tenants"]["acme"]["running"] == 1
        more = until(
            gateway,
            ADMIN,
            lambda s: (
                _request(s, state="running")["completion_tokens"]  # type: ignore[index]
                > running["completion_tokens"]
            ),
        )
        assert more

        asked = threading.Thread(target=_ask, args=(gateway,))
        asked.start()
        waits = until(gateway, ADMIN, lambda s: _request(s, state="queued"))
        assert "replica" not in waits
        assert state_of(gateway, ADMIN)["tenants"]["acme"]["waiting"] == 1
        left = time.monotonic()
    asked.join()
    name = running["request_id"]
    ended = until(
        gateway,
        ADMIN,
        lambda s: [r for r in s["ended"].values() if r["request_id"] == name],
    )[0]
    assert ended["status"] == 499
    assert ended["stop"] == "disconnect"
    assert 0 < ended["stop_ms"] < _ms_since(left)
    assert state_of(gateway, ADMIN)["requests"] == {}


def test_changes_applied_are_the_state(gateway: GatewayProcess) -> None:
    with (
        gateway.client(ADMIN) as client,
        client.stream("GET", "/v1/admin/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        following = states(answer)
        next(following)
        with answering(gateway) as asked:
            name = asked.headers["x-request-id"]
            seen = next(s for s in following if _request(s, request_id=name))
            assert _request(seen, state="running")
        ended = [r["request_id"] for r in next(following)["ended"].values()]
        while name not in ended:
            ended = [r["request_id"] for r in next(following)["ended"].values()]
        # The events and the state of the same second are equal.
        for followed in following:
            now = state_of(gateway, ADMIN)
            if now["time"] == followed["time"]:
                assert now == followed
                break


def test_a_cancelled_request_frees_the_engine_and_its_client_is_told(
    gateway: GatewayProcess,
) -> None:
    with answering(gateway) as answer:
        name = answer.headers["x-request-id"]
        found = until(
            gateway,
            ADMIN,
            lambda s: [k for k, r in s["requests"].items() if r["request_id"] == name],
        )
        with gateway.client(ADMIN) as admin:
            said = time.monotonic()
            done = admin.post(f"/v1/admin/requests/{found[0]}/cancel")
            assert done.status_code == 200, done.text
            assert done.json() == {"id": found[0], "object": "request", "cancelled": True}
        lines = [line for line in answer.rest if line]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("ended_by_operator", "server_error")
    ended = until(gateway, ADMIN, lambda s: s["ended"].get(found[0]))
    assert (ended["status"], ended["stop"]) == (500, "cancelled")
    assert 0 < ended["stop_ms"] < _ms_since(said)
    state = until(gateway, ADMIN, lambda s: s if not s["in_flight"] else None)
    assert state["requests"] == {}
    assert "requests.cancel" in gateway.text
    with gateway.client(ADMIN) as admin:
        again = admin.post(f"/v1/admin/requests/{found[0]}/cancel")
    assert again.status_code == 404


@pytest.mark.parametrize(
    ("package", "path"), [("openai", "/v1/chat/completions"), ("anthropic", "/v1/messages")]
)
def test_no_package_sends_again_what_an_operator_ended(
    gateway: GatewayProcess, package: str, path: str
) -> None:
    """Client packages retry a 500 twice by default, and `x-should-retry: false` must prevent it."""
    with ThreadPoolExecutor(1) as asking, answering(gateway) as _answer:
        told = asking.submit(_refused_by, package, gateway.url)
        waits = until(
            gateway,
            ADMIN,
            lambda s: [
                k for k, r in s["requests"].items() if (r["path"], r["state"]) == (path, "queued")
            ],
        )
        with gateway.client(ADMIN) as admin:
            assert admin.post(f"/v1/admin/requests/{waits[0]}/cancel").status_code == 200
        error = told.result()
    assert (error.status_code, error.response.headers["x-should-retry"]) == (500, "false")
    assert "ended by an operator" in str(error)


def _refused_by(package: str, url: str) -> openai.APIStatusError | anthropic.APIStatusError:
    asked: list[Any] = [{"role": "user", "content": "Hello"}]
    if package == "openai":
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=ACME, timeout=PATIENCE_S) as client,
            pytest.raises(openai.APIStatusError) as refused,
        ):
            client.chat.completions.create(model="demo", messages=asked)
        return refused.value
    with (
        anthropic.Anthropic(base_url=url, api_key=ACME) as other,
        pytest.raises(anthropic.APIStatusError) as ended,
    ):
        other.messages.create(model="demo", messages=asked, max_tokens=8)
    return ended.value


def test_a_tenant_sees_when_its_own_request_was_let_go_and_no_other(
    gateway: GatewayProcess,
) -> None:
    with gateway.client(ACME) as mine, gateway.client(OTHER) as others:
        with answering(gateway) as answer:
            url = f"/v1/requests/{answer.headers['x-request-id']}"
            assert mine.get(url).json()["state"] == "running"
            assert others.get(url).status_code == 404
            left = time.monotonic()
        deadline = left + 60
        while (seen := mine.get(url).json())["state"] != "ended":
            assert time.monotonic() < deadline
        assert (seen["status"], seen["stop"]) == (499, "disconnect")
        assert 0 < seen["stop_ms"] < _ms_since(left)
        assert "replica" not in seen
        refused = others.get(url)
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith("of this key now.")
        assert httpx.get(gateway.url + url, timeout=PATIENCE_S).status_code == 401
    logged = [json.loads(line) for line in gateway.text.splitlines() if '"gateway.stops"' in line]
    [line] = [line for line in logged if url.endswith(line["request_id"])]
    assert (line["stop"], line["stop_ms"]) == ("disconnect", seen["stop_ms"])
    assert line["tenant"] == "acme"


def test_why_a_tenant_is_refused_is_told(gateway: GatewayProcess) -> None:
    with gateway.client(OTHER) as client:
        asked = [client.post("/v1/completions", json=body()).status_code for _ in range(3)]
        assert asked == [200, 429, 429]
        invented = [f"no-such-model-{number}" for number in range(5)]
        for model in invented:
            client.post("/v1/completions", json=body(model=model))
    other = until(
        gateway,
        ADMIN,
        lambda s: s["tenants"]["other"] if s["tenants"]["other"].get("refused") else None,
    )
    assert other["refused"] == {"requests_per_minute": 7}
    assert other["last_refusal"]["why"] == "requests_per_minute"
    assert other["limits"]["requests_per_minute"] == {"limit": 1, "used": 1}
    with gateway.client(ACME) as client:
        for model in invented:
            assert client.post("/v1/completions", json=body(model=model)).status_code == 404
    state = until(
        gateway,
        ADMIN,
        lambda s: s if s["tenants"]["acme"].get("refused") == {"model_not_found": 5} else None,
    )
    assert "no-such-model" not in json.dumps(state)
    refusals = {name: state["tenants"][name]["last_refusal"] for name in ("acme", "other")}
    assert refusals["acme"]["mistake"] is True
    assert "mistake" not in refusals["other"]


ADMINS_ONLY = [
    ("GET", "/v1/admin/state"),
    ("GET", "/v1/admin/events"),
    ("POST", "/v1/admin/requests/x/cancel"),
    ("POST", "/v1/admin/replicas/127.0.0.1:1"),
    ("DELETE", "/v1/admin/replicas/127.0.0.1:1"),
]


@pytest.mark.parametrize(("method", "path"), ADMINS_ONLY)
def test_nobody_else_sees_or_does_anything(gateway: GatewayProcess, method: str, path: str) -> None:
    for key in (None, ACME):
        with gateway.client(key) as client:
            answer = client.request(method, path)
        assert answer.status_code == 401, answer.text
        assert "replicas" not in answer.text


@pytest.mark.parametrize("path", ["part", "requests/x", "requests/x/cancel"])
def test_what_workers_ask_each_other_is_no_url_for_others(
    gateway: GatewayProcess, path: str
) -> None:
    method = "POST" if path.endswith("cancel") else "GET"
    with gateway.client(ADMIN) as client:
        answer = client.request(method, f"/internal/console/{path}")
        assert answer.status_code == 404
        unknown = client.request(method, "/internal/nothing").json()["error"]["message"]
        assert answer.json()["error"]["message"] == unknown.replace("nothing", f"console/{path}")


def test_any_worker_tells_and_ends_what_another_one_runs(
    long_stack: Stack, tmp_path: Path, shared_redis: RedisServer
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", ACME), tenant("other", OTHER))
    settings = {"config": config, "admin_key": ADMIN, "redis_url": shared_redis.url, "workers": 2}
    settings |= {"redis_timeout": PATIENT_S}
    with GatewayProcess(tmp_path / "g", long_stack, **settings) as two:
        until(two, ADMIN, lambda s: s["gateway"]["answering"] == 2)
        workers = set()
        for number in range(TRIES):
            with answering(two) as answer:
                name = answer.headers["x-request-id"]
                own, found = until(two, ADMIN, lambda s: _named(s, name))  # noqa: B023
                workers.add(found["worker"])
                for _ in range(TRIES):  # new connections, which any worker may accept
                    with two.client(ACME) as mine, two.client(OTHER) as others:
                        seen = mine.get(f"/v1/requests/{name}")
                        assert (seen.status_code, seen.json()["state"]) == (200, "running")
                        assert others.get(f"/v1/requests/{name}").status_code == 404
                with two.client(ADMIN) as admin:
                    done = admin.post(f"/v1/admin/requests/{own}/cancel")
                    assert done.status_code == 200, (number, done.text)
                assert "ended_by_operator" in "".join(answer.rest)
        ended = until(two, ADMIN, lambda s: s if len(s["ended"]) == TRIES else None)["ended"]
        assert {each["worker"] for each in ended.values()} == workers


def _named(state: State, request_id: str) -> tuple[str, dict[str, Any]] | None:
    found = [item for item in state["requests"].items() if item[1]["request_id"] == request_id]
    return found[0] if found else None


def test_readers_are_bounded(gateway: GatewayProcess) -> None:
    with ExitStack() as readers:
        client = readers.enter_context(gateway.client(ADMIN))
        for _ in range(16):
            answer = readers.enter_context(client.stream("GET", "/v1/admin/events"))
            assert answer.status_code == 200
        one_more = client.get("/v1/admin/events")
        assert (one_more.status_code, one_more.json()["error"]["code"]) == (503, "overloaded")
    deadline = time.monotonic() + 60
    with gateway.client(ADMIN) as client:
        while True:  # closed streams free their slots, but not at once
            with client.stream("GET", "/v1/admin/events") as answer:
                if answer.status_code == 200:
                    break
            assert time.monotonic() < deadline


def _ask(gateway: GatewayProcess) -> None:
    with gateway.client(ACME) as client:
        client.post("/v1/completions", json=body())
