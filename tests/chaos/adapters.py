"""Adapters of the chaos run: contents, expected answers, and the name that changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from tests.chaos.gateway import PLAIN, WORKERS, Gateway
from tests.support.generated_adapters import convert_folder, expected_answers, write_adapter

LIVE = "live"
"""The adapter name whose content changes while clients use it."""
ADMIN_KEY = "the-admin-key-of-the-gateways-in-chaos"
_ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
# Redis notifies all workers of a change. A worker that missed the message polls twice a second.
_LATE_S = 3.0
_AGREED_WITHIN_S = 300.0
_ASKED_PER_WORKER = 4
_RANK, _SCALE = 16, 0.2


@dataclass(frozen=True)
class Content:
    """An adapter's weights: a PEFT folder, and the digest under which the gateway serves it."""

    name: str
    folder: Path


def demo_contents() -> list[Content]:
    return [Content(name, DEMO_ADAPTERS / name) for name in ("zh", "ja")]


def generated_contents(folder: Path, engine: Path, count: int) -> dict[Content, str]:
    """Return `count` contents with their answers to `GENERATED`, all different."""
    made = [
        write_adapter(folder / f"made-{seed}", DEMO_MODEL, seed, rank=_RANK, scale=_SCALE)
        for seed in range(count * 3 // 2)
    ]
    tensors = [convert_folder(path, engine) for path in made]
    by_answer = dict(zip(expected_answers(engine, DEMO_MODEL, tensors), made, strict=True))
    told_apart = [(text, path) for text, path in by_answer.items() if text][:count]
    assert len(told_apart) == count
    return {Content(path.name, path): text.strip() for text, path in told_apart}


@dataclass
class LiveHistory:
    """History of the digests that LIVE may serve. `None` means that the name is removed."""

    _history: list[tuple[float, frozenset[str | None]]] = field(default_factory=list)

    @property
    def now(self) -> str | None:
        [served] = self._history[-1][1]
        return served

    def may_be(self, digests: Collection[str | None]) -> None:
        self._history.append((time.monotonic(), frozenset(digests)))

    def allowed_digests(self, started: float, ended: float) -> set[str | None]:
        """Return the digests that were valid during a request or shortly before it."""
        ends = [since for since, _ in self._history[1:]] + [float("inf")]
        return {
            digest
            for (since, digests), end in zip(self._history, ends, strict=True)
            if since <= ended and started - _LATE_S < end
            for digest in digests
        }


async def add(gateway: Gateway, name: str, content: Content) -> httpx.Response:
    paths = [content.folder / part for part in ("adapter_config.json", "adapter_model.safetensors")]
    files = [("file", (path.name, path.read_bytes())) for path in paths]
    data = {"name": name, "base": "demo"}
    return await call(gateway, "POST", "", data=data, files=files)


async def call(gateway: Gateway, method: str, path: str, **more: Any) -> httpx.Response:
    """Call the admin API on a new connection, so any worker may accept it."""
    async with httpx.AsyncClient(timeout=_AGREED_WITHIN_S, headers=_ADMIN, verify=PLAIN) as client:
        url = f"http://127.0.0.1:{gateway.process.admin_port}/v1/adapters{path}"
        return await client.request(method, url, **more)


async def wait_until_agreed(
    gateways: Collection[Gateway], live: Collection[str | None] | None = None
) -> dict[str, str]:
    """Return the served digests by name, once all workers report the same. Fail after a time limit.

    Args:
        gateways: gateways to ask, several times as often as they have workers.
        live: allowed digests of LIVE, or None for any. Other digests are waited out until the
            deadline: after a change without Redis only one worker knows it at first.
    """
    deadline = time.monotonic() + _AGREED_WITHIN_S
    while True:
        said = [
            await _read_served(gateway)
            for gateway in gateways
            for _ in range(_ASKED_PER_WORKER * WORKERS)
        ]
        agree, late = all(each == said[0] for each in said), time.monotonic() >= deadline
        if agree and (late or live is None or said[0].get(LIVE) in live):
            return said[0]
        assert not late, f"the gateways never agree: {said}"
        await asyncio.sleep(0.2)


async def _read_served(gateway: Gateway) -> dict[str, str]:
    """Return the served digest by name, as one of the gateway's workers reports it."""
    answer = await call(gateway, "GET", "")
    assert answer.status_code == 200, answer.text
    return {adapter["name"]: adapter["served"] for adapter in answer.json()["data"]}
