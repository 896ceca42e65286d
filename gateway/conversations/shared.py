"""The Redis copy, shared by gateways.

``conversations:{all}:NAME``  what the gateways know of each other: see ``look.lua``

`tenant_records` has the records, and `notices` the notices of deletions.

See decision 067 in docs/decisions.
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
"""A gateway that has not polled for this long is considered lost, with what only its disk has."""
EPHEMERAL_PREFIX = "ephemeral:"
"""Name prefix of a gateway whose disk is deleted when it ends."""
# how far Redis may be behind and still have its epoch: each gateway knows what to upload again
_BEHIND_MS = 30_000
# All gateways poll each second, so a gateway with records to upload has reported by then.
_SETTLED_MS = 3000


class RedisState(NamedTuple):
    """The state of Redis at the last poll of a process.

    Attributes:
        epoch: Changes when Redis has lost everything, or much; 0 before the first poll.
        since: Changes when Redis may have lost something.
        seen: The time of Redis, in ms.
        departed_ms: When the last gateway left for good, with its disk.
        lost: A restored record is complete only if it began after this time; part of an older one
            may have been lost with such a gateway.
        gateways: The gateways that share this Redis.
    """

    epoch: int = 0
    since: int = 0
    seen: int = 0
    departed_ms: int = 0
    lost: int = 0
    gateways: tuple[str, ...] = ()


class PollResult(NamedTuple):
    """Result of a poll.

    Attributes:
        state: The state of Redis now.
        settled: True if, as reported so far, no other disk has records that Redis lacks.
        is_complete: True if Redis has all records of the polling gateway's disk. For a gateway that
            says goodbye, True if in addition the others no longer wait for it.
        dirty: How often the polling gateway has reported more records.
        at: The time of the poll, in ms of Redis' clock.
        oldest: The oldest last poll among the gateways, in the same clock; `at` without gateways.
    """

    state: RedisState
    settled: bool
    is_complete: bool
    dirty: int
    at: int
    oldest: int


class SharedConversations(TenantRecords):
    """The Redis copy. Methods block, may run in any thread, and raise
    `lora_store.primary.failure_types`."""

    def __init__(self, url: str, *, timeout_s: float, **bounds: Any) -> None:
        """Connect lazily; for `bounds`, see `TenantRecords`."""
        super().__init__(url, timeout_s=timeout_s, **bounds)
        self.stale_s = ROLE_CHECK_S + timeout_s
        """Seconds for which another process may still write to a replaced server."""
        self._notices = NoticeReader(sum(self._times))
        self._since = 0

    def poll(
        self,
        state: RedisState,
        gateway: str = "",
        report: str = "",
        report_of: tuple[int, int] = (0, 0),
    ) -> PollResult:
        """Poll the state of Redis and, with `gateway`, report the state of that gateway's disk.

        Args:
            state: The state from the last poll.
            gateway: The name of the polling gateway; "" to report nothing.
            report: "dirty" if its disk has new records for Redis, "open" if the upload is not
                finished, "whole" if it is, "bye" if it is and the gateway leaves for good.
            report_of: The epoch and `dirty` count that the report is based on.
        """
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
        """Return some deletions since the last call; empty if all were returned."""
        with self._primary.use() as client:
            return self._notices.read(client, limit)
