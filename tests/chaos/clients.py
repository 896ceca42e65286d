"""Clients of the chaos run, and their checks of each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.adapters import LIVE
from tests.chaos.gateway import Gateway
from tests.chaos.questions import GENERATED, QUESTIONS, Question, Wrong, text_of
from tests.chaos.world import TENANTS, TIGHT, TIGHT_KEY, World

CLIENTS = 64
TIGHT_CLIENTS = 8
# A longer wait counts as hanging. Clients and servers share a busy machine.
HANGS_AFTER_S = 60.0
CLEAR = {429, 503, 504}
_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


@dataclass
class ObservedRequest:
    """A client's view of one request.

    `outcome` is `right`, `wrong`, `hung`, `left` (the client disconnected), `cut` (the connection
    broke), `no connection`, or else an error's status and code. `usage` is the answer's. `begun` is
    True if the response had status 200.
    """

    request_id: str
    gateway: Gateway
    tenant: str
    model: str
    question: Question
    started: float
    deadline_s: float
    ended: float = 0.0
    outcome: str = ""
    begun: bool = False
    usage: dict[str, Any] | None = None

    @property
    def took_s(self) -> float:
        return self.ended - self.started


class Load:
    """Running clients. `seen` has all their requests in the order of sending."""

    def __init__(self, world: World, name: str, clients: int) -> None:
        self._world = world
        self._name = name
        self._number = clients
        self._stop = asyncio.Event()
        self._clients: dict[str, httpx.AsyncClient] = {}
        self.seen: list[ObservedRequest] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Run the clients. An unexpected error in a client ends the context too."""
        limits = httpx.Limits(max_connections=None)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for gateway in self._world.gateways:
                client = httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits)
                self._clients[gateway.name] = await stack.enter_async_context(client)
            for number in range(self._number):
                group.create_task(self._client(number))
            yield self
            self._stop.set()

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self._name}-{number}")
        tight = number < TIGHT_CLIENTS
        owner = TIGHT if tight else chance.choice(list(TENANTS))
        own = [] if tight else [f"{owner}/own"]
        weights = [question.weight for question in QUESTIONS]
        while not self._stop.is_set():
            [question] = chance.choices(QUESTIONS, weights)
            model = chance.choice(["demo", "zh", *own])
            if chance.random() < 0.35:
                model, question = chance.choice([LIVE, LIVE, *self._world.many]), GENERATED
            leaves_s = chance.uniform(0.01, 1.5) if chance.random() < 0.1 else None
            gateway = chance.choice(self._world.gateways)
            stream = chance.random() < 0.5
            await self.ask(
                gateway, model, question, owner, chance.uniform(6, 12), leaves_s, stream=stream
            )
            await asyncio.sleep(chance.uniform(1, 6))

    async def ask(
        self, gateway: Gateway, model: str, question: Question, tenant: str, deadline_s: float,
        leaves_s: float | None = None, *, stream: bool = False,
    ) -> None:  # fmt: skip
        """Send one request, and record it in `seen`."""
        request_id = f"{self._name}-{len(self.seen)}"
        seen = ObservedRequest(
            request_id, gateway, tenant, model, question, time.monotonic(), deadline_s
        )
        self.seen.append(seen)
        headers = {
            "authorization": f"Bearer {TENANTS.get(tenant, TIGHT_KEY)}",
            "x-request-id": request_id,
            "x-request-timeout": f"{deadline_s:.3f}",
        }
        body = question.body(model, stream=stream)
        client = self._clients[gateway.name]
        request = client.build_request("POST", question.path, json=body, headers=headers)
        try:
            await self._send(client, request, seen, leaves_s)
        except Wrong as wrong:
            seen.outcome = "wrong"
            self._world.found_wrong(f"{request_id}: {model}, {question.name}: {wrong}")
        except httpx.TimeoutException:
            seen.outcome = "hung"
        except TimeoutError:
            seen.outcome = "left"
        except httpx.ConnectError:
            seen.outcome = "no connection"
        except _BROKEN:
            seen.outcome = "cut"
        seen.ended = time.monotonic()
        if seen.took_s > HANGS_AFTER_S:
            seen.outcome = "hung"

    async def _send(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        seen: ObservedRequest,
        leaves_s: float | None,
    ) -> None:
        async def begin_to_leave(event: str, _: object) -> None:
            if leaves_s is not None and event == "http11.send_request_headers.started":
                leaving.reschedule(asyncio.get_running_loop().time() + leaves_s)

        # A cancelled httpx request leaks its socket while it connects, so clients disconnect later.
        request.extensions["trace"] = begin_to_leave
        async with asyncio.timeout(None) as leaving:
            answer = await client.send(request, stream=True)
            try:
                seen.begun = answer.status_code == 200
                text = await _text(answer, seen)
            finally:
                await answer.aclose()
        if text is not None:
            self._check(answer.headers.get("x-adapter-version"), text, seen)
            seen.outcome = "right"
        elif seen.outcome == "404 model_not_found":
            self._check_version(None, seen)

    def _check(self, version: str | None, text: str, seen: ObservedRequest) -> None:
        world, model = self._world, seen.model
        name, _, digest = (version or "demo").partition("@")
        content = "demo" if version is None else world.digests.get(digest)
        if name != model or content is None or content != world.fixed.get(model, content):
            raise Wrong(f"it was answered by {version}")
        self._check_version(digest, seen)
        if text != world.answers[content, seen.question]:
            raise Wrong(f"{version} does not say {text!r}")

    def _check_version(self, digest: str | None, seen: ObservedRequest) -> None:
        """Check the served version. `digest` None means that the adapter was unknown."""
        if seen.model == LIVE:
            allowed = self._world.live.allowed_digests(seen.started, time.monotonic())
            if digest not in allowed:
                raise Wrong(f"{digest} was not in force, but {allowed}")
        elif digest is None:
            raise Wrong("it is there all the time")


async def _text(answer: httpx.Response, seen: ObservedRequest) -> str | None:
    """Return the answer's text, or None after an allowed error, which is recorded."""
    frames = [json.loads(await answer.aread())] if not _streams(answer) else await _frames(answer)
    *rest, last = frames
    if any("error" in frame for frame in rest):
        raise Wrong("something came after an error")
    if "error" in last:
        seen.outcome = _error_name(answer.status_code, last["error"])
        return None
    seen.usage = last["usage"]
    return text_of(frames)


def _streams(answer: httpx.Response) -> bool:
    return answer.headers["content-type"].startswith("text/event-stream")


async def _frames(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    events = [line for line in lines if not line.startswith(":")]
    if events.count("[DONE]") != 1 or events.pop() != "[DONE]":
        raise Wrong(f"a stream without its end: {events[-3:]}")
    return [json.loads(event) for event in events]


def _error_name(status: int, error: dict[str, Any]) -> str:
    """Return an error's name for the table. Raises Wrong for an error that clients must not see."""
    if set(error) != {"message", "type", "param", "code"}:
        raise Wrong(f"an error of no known form: {error}")
    code = error["code"]
    if status == 200:
        return f"after the headers: {code}"
    if status not in CLEAR and code != "model_not_found":
        raise Wrong(f"{status}: {error}")
    return f"{status} {code}"
