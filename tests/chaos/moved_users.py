"""Users of Redis and of the database, through the HTTP API while the address of Redis moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos import adapters
from tests.chaos.adapters import ADMIN_KEY, LIVE, Content
from tests.chaos.gateway import PLAIN, WORKERS, Gateway
from tests.chaos.questions import CAPITALS, SHORT, text_of

KEY = "sk-acme-key"
NEED_NO_REDIS = ("keys", "weights and drains")
"""Names of the users whose changes are rows of the database."""
_PAUSE_S = 0.25
# Time until another gateway sees a change: notifications may be lost, and it polls every 0.5 s.
_LATE_S = 2.0


@dataclass
class Act:
    """An action of a user. `is_shared` is True if it succeeded and other gateways see it."""

    started: float
    ended: float
    is_shared: bool


@dataclass
class User:
    """A repeated action. `act` gets its number and returns True if other gateways see it."""

    name: str
    act: Callable[[int], Awaitable[bool]]
    acts: list[Act] = field(default_factory=list)
    is_ending: bool = False

    async def run(self) -> None:
        """Repeat the action until `is_ending`. A cancelled action would have an unknown outcome."""
        while not self.is_ending:
            started = time.monotonic()
            is_shared = await self.act(len(self.acts))
            self.acts.append(Act(started, time.monotonic(), is_shared))
            await asyncio.sleep(_PAUSE_S)

    def failures(self, since: float) -> int:
        return sum(not act.is_shared for act in self.acts if act.ended >= since)

    def recovered_at(self, since: float) -> float | None:
        """Return when the first action after the last failure ended, or None."""
        after = [act for act in self.acts if act.started >= since]
        failed = [n for n, act in enumerate(after) if not act.is_shared]
        first = failed[-1] + 1 if failed else 0
        return after[first].ended if first < len(after) else None


@dataclass
class Upload:
    content: str
    answered: float
    is_shared: bool


@dataclass
class Answer:
    started: float
    status: int
    content: str | None
    error: str = ""

    @property
    def is_refused(self) -> bool:
        """True if the gateway could not fetch the version from Redis, so the client may retry."""
        return self.status == 503 and "adapter_store_unavailable" in self.error


class Users:
    """All users, as an async context manager."""

    def __init__(
        self, gateways: list[Gateway], endpoint: str, contents: dict[str, Content]
    ) -> None:
        self._gateways = gateways
        self._endpoint = endpoint
        self._contents = contents
        self.answers: list[Answer] = []
        self.uploads: list[Upload] = []
        self.names: set[str] = set()
        self.conversations: list[str] = []
        self.keys: list[str] = []
        self.weight = 0.0
        self.users = [
            User("adapters", self._adapters),
            User("limits", self._limits),
            User("conversations", self._conversations),
            User("keys", self._keys),
            User("weights and drains", self._overrides),
        ]

    async def __aenter__(self) -> Users:
        self._stack = AsyncExitStack()
        for_all = {"timeout": 60, "verify": PLAIN}
        self.clients = [
            await self._stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, headers=_bearer(KEY), **for_all)
            )
            for gateway in self._gateways
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, number: int) -> None:
        """Request the adapter that changes, until the task is cancelled."""
        body = SHORT.body(LIVE, stream=False)
        by_text = {text: content for content, text in CAPITALS.items()}
        while True:
            started = time.monotonic()
            answer = await self.clients[number % len(self.clients)].post(SHORT.path, json=body)
            content = by_text.get(text_of([answer.json()])) if answer.is_success else None
            error = "" if answer.is_success else answer.text
            self.answers.append(Answer(started, answer.status_code, content, error))
            await asyncio.sleep(0.02)

    async def upload(self, number: int) -> bool:
        """Upload other content under the name LIVE. Return True if it is shared."""
        content = "ja" if self.uploads and self.uploads[-1].content == "zh" else "zh"
        gateway = self._gateways[number // 2 % 2]
        answer = await adapters.add(gateway, LIVE, self._contents[content])
        if answer.status_code != 201:
            return False
        self.uploads.append(Upload(content, time.monotonic(), answer.json()["shared"]))
        return bool(answer.json()["shared"])

    async def _adapters(self, number: int) -> bool:
        """Upload, every fourth time under a new name, so that a lost name is noticed."""
        if number % 4:
            return await self.upload(number)
        name = f"moved-{number}"
        gateway = self._gateways[number // 4 % 2]
        answer = await adapters.add(gateway, name, self._contents["zh"])
        if answer.status_code == 201:
            self.names.add(name)
        return answer.status_code == 201 and bool(answer.json()["shared"])

    async def _limits(self, _: int) -> bool:
        pages = [asyncio.to_thread(gateway.metrics) for gateway in self._gateways]
        found = await asyncio.gather(*pages)
        return all(page["gateway_limits_shared"] == WORKERS for page in found)

    async def _conversations(self, number: int) -> bool:
        first, second = self.clients[number % 2], self.clients[1 - number % 2]
        item = {"type": "message", "role": "user", "content": f"number {number}"}
        made = await first.post("/v1/conversations", json={"items": [item]})
        if made.status_code != 200:
            return False
        self.conversations.append(made.json()["id"])
        return await self._has_items(second, made.json()["id"])

    async def _has_items(self, client: httpx.AsyncClient, conversation: str) -> bool:
        read = await client.get(f"/v1/conversations/{conversation}/items")
        return read.status_code == 200 and len(read.json()["data"]) == 1

    async def _keys(self, number: int) -> bool:
        wanted = {"tenant": "acme", "note": f"number {number}"}
        made = await self._admin(number, "POST", "/v1/keys", json=wanted)
        if made.status_code == 201:
            self.keys.append(made.json()["value"])
        return made.status_code == 201

    async def _overrides(self, number: int) -> bool:
        weight = float(50 + number % 50)
        path = f"/v1/admin/replicas/{self._endpoint}"
        said = await self._admin(number, "POST", path, json={"weight": weight})
        if said.status_code == 200:
            self.weight = weight
        return said.status_code == 200

    async def _admin(self, number: int, method: str, path: str, **more: Any) -> httpx.Response:
        port = self._gateways[number % 2].process.admin_port
        url = f"http://127.0.0.1:{port}{path}"
        return await self.clients[0].request(method, url, headers=_bearer(ADMIN_KEY), **more)

    # Checks after the move:

    async def let_in(self, key: str, requests: int) -> int:
        """Return how many of concurrent requests at both gateways the tenant's limit admits."""
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
        asked = [
            self.clients[n % 2].post(SHORT.path, json=body, headers=_bearer(key))
            for n in range(requests)
        ]
        found = [answer.status_code for answer in await asyncio.gather(*asked)]
        return found.count(200)

    async def lost(self) -> dict[str, int]:
        """Return the number of acknowledged changes that a gateway lacks, by type."""
        served = await adapters.wait_until_agreed(self._gateways)
        known = [await self._with_key(client, key) for key in self.keys for client in self.clients]
        conversations = [
            await self._has_items(client, conversation)
            for conversation in self.conversations
            for client in self.clients
        ]
        weights = [await self._weight(number) for number in range(len(self.clients))]
        return {
            "adapters": len(self.names - set(served)),
            "conversations": conversations.count(False),
            "keys": known.count(False),
            "weights and drains": sum(weight != self.weight for weight in weights),
        }

    async def _with_key(self, client: httpx.AsyncClient, key: str) -> bool:
        return (await client.get("/v1/models", headers=_bearer(key))).status_code == 200

    async def _weight(self, number: int) -> float:
        state = (await self._admin(number, "GET", "/v1/admin/state")).json()
        return float(state["replicas"][self._endpoint]["weight"])

    def old_answers(self, since: float) -> tuple[int, int]:
        """Return the number of answers of an old version, and of all answers with a known version.

        Only answers after an upload that was acknowledged at `since` or later count.
        """
        old = certain = 0
        for upload, following in zip(self.uploads, [*self.uploads[1:], None], strict=True):
            if upload.answered < since:
                continue
            ends = float("inf") if following is None else following.answered - _LATE_S
            for answer in self.answers:
                if upload.answered + _LATE_S <= answer.started < ends and answer.status == 200:
                    certain += 1
                    old += answer.content != upload.content
        return old, certain


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
