"""The copy in Redis, for all gateways that share it.

``conversations:{all}:NAME``  what the gateways know of each other: see ``look.lua``

The records are in `tenant_records`, and what is told of deletions in `notices`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.conversations.notices import Deletion, NoticeReader
from gateway.conversations.scripts import POLL
from gateway.conversations.tenant_records import TenantRecords
from lora_store.redis_role import ROLE_CHECK_S

_COMMON_PREFIX = "conversations:{all}:"
_KEY_NAMES = ("epoch", "since", "run", "seen", "kept", "gateways", "dirty", "left", "lost")
GATEWAY_TIMEOUT_MS = 3600 * 1000
"""After which a gateway that does not look any more, and what its disk has, is given up."""
EPHEMERAL_PREFIX = "ephemeral:"
"""What the name of a gateway begins with whose disk ends with it."""
_BEHIND_MS = 30_000  # which each gateway still knows to bring again
# All gateways look each second: by then whoever has something to bring has said so.
_SETTLED_MS = 3000


class RedisState(NamedTuple):
    """What a process knows of Redis from its last look.

    Attributes:
        epoch: changes when Redis has lost everything, or much; 0 before the first look.
        since: changes when it may have lost something.
        seen: the time of Redis.
        left: when the last gateway went for good, with its disk.
        lost: what was brought is all there is of it only if it began later: else a part may have
            gone with such a gateway.
        gateways: those that share it.
    """

    epoch: int = 0
    since: int = 0
    seen: int = 0
    departed_ms: int = 0
    lost: int = 0
    gateways: tuple[str, ...] = ()


class PollResult(NamedTuple):
    """
    Attributes:
        known: as it is now.
        settled: whether what Redis lacks is nowhere else, as far as is known.
        whole: whether it has all that the disk of the gateway that looks has; of one that has said
            goodbye, whether that is so and it is waited for no more.
        dirty: how often that one has said that there is more.
        at: when this was, in ms of Redis' clock.
        oldest: when the gateway that shares it and has not looked for longest did so; `at` where
            there is none.
    """

    state: RedisState
    settled: bool
    is_complete: bool
    dirty: int
    at: int
    oldest: int


class SharedConversations(TenantRecords):
    """Blocks; for any thread. Raises `lora_store.primary.failures`."""

    def __init__(self, url: str, *, timeout_s: float, **bounds: Any) -> None:
        """See `TenantRecords`."""
        super().__init__(url, timeout_s=timeout_s, **bounds)
        self.stale_s = ROLE_CHECK_S + timeout_s
        """Seconds for which another process may still write to a server that was replaced."""
        self._notices = NoticeReader(sum(self._times))
        self._since = 0

    def poll(
        self,
        state: RedisState,
        gateway: str = "",
        report: str = "",
        report_of: tuple[int, int] = (0, 0),
    ) -> PollResult:
        """`gateway` says of itself that its disk has more, "dirty", or is not all brought yet,
        "open", or is: "whole", or that it goes for good, with all of that in Redis: "bye"; `of` the
        epoch and number that it was told before."""
        keys = [f"{_COMMON_PREFIX}{name}" for name in _KEY_NAMES]
        seen_arguments = (
            state.epoch,
            state.since,
            state.seen,
            state.departed_ms,
            _BEHIND_MS,
            GATEWAY_TIMEOUT_MS,
        )
        report_arguments = (gateway, report, *report_of, *state.gateways)
        with self._primary.use() as client:
            answer = POLL.run(client, keys, (*seen_arguments, *report_arguments))
        epoch, since, age_ms, seen, left, lost, others, dirty, whole, at, oldest = map(
            int, answer[:-1]
        )
        names = tuple(sorted(raw.decode(errors="replace") for raw in answer[-1]))
        settled = age_ms >= _SETTLED_MS and others == 0
        if since != self._since:
            self._since = since
            self._notices.restart()
        now = RedisState(
            epoch=epoch, since=since, seen=seen, departed_ms=left, lost=lost, gateways=names
        )
        return PollResult(now, settled, whole == 1, dirty, at=at, oldest=oldest)

    def read_deletions(self, limit: int = 128) -> list[Deletion]:
        """Return some of what went since the last call, none once all is told."""
        with self._primary.use() as client:
            return self._notices.read(client, limit)
