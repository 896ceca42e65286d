"""Adapter agents beside Tritons, run in threads of the test, and the gateways' messages to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from lora_store.peft_agent import Agent
from lora_store.peft_folders import PeftFolders
from lora_store.peft_keeper import EngineLimits
from lora_store.peft_notices import AgentState, GatewayState, PeftNotices
from lora_store.redis import RedisSettings, RedisTier

PLENTY = 2**30


@contextlib.contextmanager
def running_agent(
    root: Path,
    redis: RedisSettings,
    *replicas: str,
    max_bytes: int = PLENTY,
    grace_s: float = 3600.0,
    settle_s: float = 0.0,
    limits: EngineLimits | None = None,
) -> Iterator[None]:
    """Run an agent that stores versions in `root`, which its replicas see under the same path."""
    tier, notices = RedisTier(redis), PeftNotices(redis)
    agent = Agent(
        PeftFolders(root),
        tier,
        notices,
        replicas=replicas or ("triton:8001",),
        path=str(root),
        max_bytes=max_bytes,
        grace_s=grace_s,
        settle_s=settle_s,
        limits=limits,
    )
    ended = threading.Event()
    thread = threading.Thread(target=agent.run, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        notices.close()
        tier.close()


class AgentNotices:
    """Messages in Redis from agents, and from a gateway to agents."""

    def __init__(self, redis: RedisSettings) -> None:
        self.notices = PeftNotices(redis)
        self._beat = 0

    def agents(self) -> dict[str, AgentState]:
        found = {agent: self.notices.read_agent_state(agent) for agent in self.notices.read_beats()}
        return {agent: held for agent, held in found.items() if held is not None}

    def holds(self) -> set[str]:
        """Return the digests that at least one agent holds."""
        return {digest for held in self.agents().values() for digest in held.holds}

    def beat(self, gateway: str = "g", in_use: dict[str, frozenset[str]] | None = None) -> None:
        """Send a heartbeat of a gateway that has seen all agents' messages."""
        self._beat += 1
        seen = {agent: (held.boot, held.revision) for agent, held in self.agents().items()}
        self.notices.put_gateway_state(
            gateway, GatewayState(beat=self._beat, seen=seen, in_use=in_use or {})
        )
