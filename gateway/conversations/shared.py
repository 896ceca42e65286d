"""Storage of tenants' conversations and responses in Redis, which several gateways share.

This module polls Redis to detect that Redis has lost records. With a poll, a gateway also reports
whether Redis has all records of the gateway's disk. The other gateways read this report. The
reports are stored in the keys ``conversations:{all}:NAME``, which ``look.lua`` describes. The
module `tenant_records` describes the Redis keys of records, and `notices` the keys for deletions.

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
"""Milliseconds without a poll after which a gateway is considered gone, together with its disk.

The other gateways then no longer wait for records that only this disk has.
"""
EPHEMERAL_PREFIX = "ephemeral:"
"""Prefix of the names of gateways whose disks are deleted when they end."""
# If Redis has lost only the writes of the last 30 s or less, its epoch does not change. Each
# gateway then uploads only its latest records again. After a larger loss, a new epoch starts, and
# each gateway uploads all records.
_BEHIND_MS = 30_000
# Time in ms after a loss of records within which each gateway reports if it has records to upload.
# Gateways report with every poll, once a second.
_SETTLED_MS = 3000


class RedisState(NamedTuple):
    """Facts about Redis that a process has read at its last poll. Times are in ms of Redis' clock.

    Attributes:
        epoch: Number that changes when Redis has lost all or many records; 0 before the first poll.
        since: Number that changes when Redis may have lost some records.
        seen: Time of the poll.
        departed_ms: Last time at which a gateway ended and its disk was deleted.
        lost: Value of `departed_ms` when Redis last lost its data. A record that was created before
            this time may be incomplete after a new upload, because its newest version may have been
            only in Redis and on the deleted disk.
        gateways: Names of the gateways that share this Redis.
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
        state: The epoch and the other facts about Redis at this poll.
        settled: True if Redis has the records of all gateways' disks. This is the case if every
            gateway had enough time to report that Redis lacks records, and no gateway reports it.
        is_complete: True if Redis has all records of the polling gateway's disk. After the report
            "bye", Redis must also have removed the gateway from the list of gateways, so that no
            other gateway waits for its records.
        dirty: Number of times that the polling gateway has sent the report "dirty".
        at: Time of this poll, in ms of Redis' clock.
        oldest: Earliest of the times at which the gateways last polled, in ms of Redis' clock; `at`
            if there are no gateways.
    """

    state: RedisState
    settled: bool
    is_complete: bool
    dirty: int
    at: int
    oldest: int


class SharedConversations(TenantRecords):
    """Access to conversations and responses in Redis.

    Methods block on I/O and may run in any thread. They raise the exceptions that
    `lora_store.primary.failure_types` lists.
    """

    def __init__(self, url: str, *, timeout_s: float, **bounds: Any) -> None:
        """Prepare a connection, which the first call opens.

        `bounds` are the other keyword arguments of `TenantRecords`.
        """
        super().__init__(url, timeout_s=timeout_s, **bounds)
        self.stale_s = ROLE_CHECK_S + timeout_s
        """Maximum seconds after a failover of Redis in which a process writes to the old primary.

        After this time, every process has detected that Redis has a new primary server.
        """
        self._notices = NoticeReader(sum(self._times))
        self._since = 0

    def poll(
        self,
        state: RedisState,
        gateway: str = "",
        report: str = "",
        report_of: tuple[int, int] = (0, 0),
    ) -> PollResult:
        """Detect if Redis has lost records, and report if Redis has all records of the disk.

        Args:
            state: The state from the last poll.
            gateway: Name of the polling gateway; "" to report nothing.
            report: "dirty" if the gateway's disk has a new record that Redis lacks; "open" if the
                gateway has not uploaded all records of its disk; "whole" if Redis has all records
                of the disk; "bye" if, in addition, the gateway ends for good.
            report_of: `state.epoch` and `dirty` of the poll on which the report is based. If one of
                these numbers has changed since then, Redis may lack records, and the report is
                ignored.
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
        """Return at most `limit` notices of deleted records that were not returned before.

        The caller must delete these records from this gateway's disk. The list is empty if there
        are no further notices.
        """
        with self._primary.use() as client:
            return self._notices.read(client, limit)
