"""Redis copy of the store of conversations, shared by gateways.

``conversations:{all}:NAME``  state of Redis and of all gateways' disks: see ``look.lua``

See `tenant_records` for the Redis keys of records, and `notices` for the keys of deletions.

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
"""Time without a poll after which a gateway is considered lost, together with its disk."""
EPHEMERAL_PREFIX = "ephemeral:"
"""Prefix of the names of gateways whose disks are deleted when they end."""
# Maximum time of lost writes for which the epoch of Redis does not change. Each gateway then
# uploads only its latest records again, not all of them.
_BEHIND_MS = 30_000
# Time after a change of the state of Redis in which all gateways report if they have records to
# upload. Gateways poll every second.
_SETTLED_MS = 3000


class RedisState(NamedTuple):
    """State of Redis at the last poll of a process. All times are in ms of Redis' clock.

    Attributes:
        epoch: Number that changes when Redis has lost all or many records; 0 before the first poll.
        since: Number that changes when Redis may have lost some records.
        seen: Time of the poll.
        departed_ms: Time at which a gateway last ended permanently and its disk was deleted.
        lost: Time from which on restored records are complete. A record that was created earlier
            may be incomplete, because the disk of a gateway with newer versions was deleted.
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
        state: The state of Redis now.
        settled: True if Redis has the records of all gateways' disks: all gateways had time to
            report missing records, and none has reported any.
        is_complete: True if Redis has all records of the polling gateway's disk. After the report
            "bye", True only if in addition no other gateway waits for the polling gateway.
        dirty: Number of times that the polling gateway has reported new records on its disk.
        at: Time of this poll, in ms of Redis' clock.
        oldest: Earliest time of the gateways' last polls, in ms of Redis' clock; `at` if there are
            no gateways.
    """

    state: RedisState
    settled: bool
    is_complete: bool
    dirty: int
    at: int
    oldest: int


class SharedConversations(TenantRecords):
    """Redis copy of the store.

    Methods block on I/O and may run in any thread. They raise `lora_store.primary.failure_types`.
    """

    def __init__(self, url: str, *, timeout_s: float, **bounds: Any) -> None:
        """Prepare a connection, which the first call opens. See `TenantRecords` for `bounds`."""
        super().__init__(url, timeout_s=timeout_s, **bounds)
        self.stale_s = ROLE_CHECK_S + timeout_s
        """Maximum time in seconds for which a process may write to a former primary of Redis."""
        self._notices = NoticeReader(sum(self._times))
        self._since = 0

    def poll(
        self,
        state: RedisState,
        gateway: str = "",
        report: str = "",
        report_of: tuple[int, int] = (0, 0),
    ) -> PollResult:
        """Poll the state of Redis. If `gateway` is set, report the state of that gateway's disk.

        Args:
            state: The state from the last poll.
            gateway: Name of the polling gateway; "" to report nothing.
            report: State of the gateway's disk. "dirty": it has new records that Redis lacks.
                "open": the upload of its records is not finished. "whole": Redis has all records.
                "bye": Redis has all records, and the gateway ends permanently.
            report_of: The epoch and the `dirty` count of the poll on which the report is based.
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
        """Return at most `limit` deletions that were not returned before.

        The caller must apply the deletions to this gateway's disk. The list is empty if there are
        no further deletions.
        """
        with self._primary.use() as client:
            return self._notices.read(client, limit)
