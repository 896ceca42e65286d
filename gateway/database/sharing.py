"""Detection of gateways that share a Redis but not a database.

Each gateway registers the identity of its database in Redis, in the sorted set `DATABASES`. Its
scores are times of Redis' clock, in seconds since 1970. If a gateway with SQLite finds another
identity, each of several gateways has a database of its own. A key that one of them creates would
then be unknown to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gateway.database.database import Database, read_identity
from gateway.errors import DatabaseUnavailable, SwitchedOff
from gateway.troubles import Troubles
from lora_store import redis_url
from lora_store.primary import Primary, failure_types

DATABASES = "gateway:databases"
_POLL_INTERVAL_S = 2.0
_EXPIRY_S = 15.0
"""Seconds after which a gateway that no longer registers itself counts as ended."""
_TIMEOUT_S = 2.0
SETTING = "GATEWAY_DATABASE_URL"


class Sharing:
    """Detection of gateways that share this process' Redis but not its database.

    Use an instance as an async context manager. While the context is open, `follow` must run in a
    task.
    """

    def __init__(self, database: Database, url: str | None, *, ephemeral: bool = False) -> None:
        """Create the object without connecting.

        Args:
            database: The database of this process.
            url: The URL of Redis in the syntax of `lora_store.redis_url`; None without Redis.
            ephemeral: True if the state folder is deleted when the gateway ends.
        """
        self._ephemeral = ephemeral and not database.is_shared
        self._database = database
        self._primary = None if url is None else Primary(redis_url.parse(url), _TIMEOUT_S)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sharing")
        self._identity: str | None = None
        self._has_others = False

    async def __aenter__(self) -> Sharing:
        await self.poll()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        if self._primary is not None:
            self._primary.close()

    @property
    def problem(self) -> str:
        """Text for operators while gateways have databases of their own; else empty."""
        if self._database.is_shared or not self._has_others:
            return ""
        return (
            "several gateways with databases of their own share this Redis: making keys and "
            f"changing weights and drains are refused until all have the same {SETTING}"
        )

    def require(self, feature: str) -> None:
        """Raise SwitchedOff if a feature needs another database than this process has.

        This is the case if other gateways have another database, or if this gateway's database ends
        with it. `feature` begins the message: "Creating keys".
        """
        reason = ""
        if self.problem:
            reason = "all gateways share, and each of the gateways here has its own"
        elif self._ephemeral:
            reason = "outlasts this gateway (GATEWAY_STORE_EPHEMERAL is true)"
        if reason:
            raise SwitchedOff(
                f"{feature} needs a database that {reason}: copy the keys to a PostgreSQL, and set "
                f"{SETTING} to it at all gateways (docs/database.md).",
                setting=SETTING,
            )

    async def follow(self, troubles: Troubles) -> None:
        """Poll every 2 s until cancelled. Return at once without Redis."""
        while self._primary is not None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            try:
                await self.poll()
            except Exception as error:  # continue to poll after any error
                text = f"other gateways cannot be found: {error!r}"
                troubles.hold("sharing_poll", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("sharing_poll")

    async def poll(self) -> None:
        """Register this gateway, and look for others. Change nothing if Redis fails."""
        if self._primary is None:
            return
        with suppress(DatabaseUnavailable):
            self._identity = await self._database.read(read_identity)
        if self._identity is not None:
            await self._in_thread(self._register)

    def _register(self) -> None:
        assert self._primary is not None
        with self._primary.use() as client:
            now = client.time()[0]
            with client.pipeline(transaction=False) as pipeline:
                pipeline.zremrangebyscore(DATABASES, "-inf", f"({now - _EXPIRY_S}")
                # The clock was set back, or another server has become the primary.
                pipeline.zremrangebyscore(DATABASES, f"({now + _EXPIRY_S}", "+inf")
                pipeline.zadd(DATABASES, {self._identity: now})
                pipeline.expire(DATABASES, 3600)
                pipeline.zcard(DATABASES)
                self._has_others = pipeline.execute()[-1] > 1

    async def _in_thread(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(*failure_types()):
            await loop.run_in_executor(self._thread, work)
