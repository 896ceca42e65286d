"""The copy in Redis, for all gateways that share it.

``conversations:{.TENANT}:``  what the keys of one tenant begin with: see ``script.lua``
``conversations:{all}:epoch``  when Redis was last found empty, its own ms of 1970
``conversations:{all}:since``  since when it has taken all writes, likewise
``conversations:{all}:filling``  sorted set: gateways that have yet to bring what their disks keep
``conversations:{all}:deleted``  stream: TENANT and ID of what was deleted, for the others' disks

What is there was perhaps written by somebody else: what does not fit is counted and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from gateway.conversations.record import DELETED, MAX_MEMBERS, MAX_READ, TOO_LARGE, Record, is_id
from gateway.errors import ConversationTooLarge
from lora_store import redis_url
from lora_store.connect import LazyClient
from lora_store.refusals import Refusals

_SCRIPT = files(__package__).joinpath("script.lua").read_text(encoding="utf-8")
_LOOK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function number(key)
  local found = redis.call('GET', key)
  if found and #found <= 15 and found:match('^[1-9]%d*$') then return found end
  local made = string.format('%.0f', now)
  redis.call('SET', key, made)
  return made
end
local epoch = number(KEYS[1])
-- A Redis that is full takes no SET, but a DEL: what it refuses meanwhile is on disks alone.
local taken = redis.pcall('SET', KEYS[3], string.format('%.0f', now), 'NX')
if taken and taken.err then
  redis.call('DEL', KEYS[3])
  return {epoch, 0, 1}
end
local since = number(KEYS[3])
if ARGV[2] == 'filling' then redis.call('ZADD', KEYS[2], now, ARGV[1]) end
if ARGV[2] == 'filled' then redis.call('ZREM', KEYS[2], ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[3]))
return {epoch, now - since, redis.call('ZCARD', KEYS[2])}
"""
_ALL = "conversations:{all}:"
_HEAD = re.compile(rb"c1 (\d{20}) (\d{20}) ([A-Za-z0-9_/-]{0,160})\n")
_SLACK = 300  # bytes of HEAD, with the longest of names
_TOLD = 100_000  # deletions that a gateway which was away can still be told of
_SILENT_MS = 10_000  # after which a gateway that was filling is given up
# All gateways look each second: by then whoever has something to bring has said so.
_SETTLED_MS = 3000


class Look(NamedTuple):
    """
    Attributes:
        epoch: changes when Redis has lost everything; never 0.
        settled: whether what Redis lacks is nowhere else, as far as is known.
    """

    epoch: int
    settled: bool


class SharedPut(NamedTuple):
    """What became of a put.

    Attributes:
        done: else it has to be asked again, as there was much to remove.
        evicted: how many records were.
        taken: whether Redis has all of them, or higher versions; else there is what does not fit.
        higher: the ids of which it has higher versions.
    """

    done: bool
    evicted: int
    taken: bool
    higher: list[str]


class SharedConversations:
    """Blocks; for any thread. Raises redis-py's errors, of `lora_store.connect.FAILURES`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        ttl_ms: int,
        tenant_bytes: int,
        renew_ms: int,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        """`url` in a form of `lora_store.redis_url`; `timeout_s` bounds each call."""
        self._lazy = LazyClient(redis_url.parse(url), timeout_s)
        self._times = (ttl_ms, renew_ms)
        self._tenant_bytes = tenant_bytes
        self._refusals = Refusals(on_refused)
        self._deleted_after = "0"

    def close(self) -> None:
        self._lazy.close()

    def put(self, tenant: str, records: Sequence[Record], used_ms: int = -1) -> SharedPut:
        """`used_ms`: when they were used last, for those that are brought again; else now.

        Raises ConversationTooLarge.
        """
        arguments: list[object] = [self._tenant_bytes, MAX_MEMBERS, used_ms]
        for record in records:
            version, order = b"%020d" % record.version, b"%020d" % record.order
            head = b"c1 %b %b %b\n" % (version, order, record.group.encode())
            arguments += (record.id, version, record.group, order, head + record.data)
        answer = self._run(tenant, "put", arguments)
        if answer is None:
            return SharedPut(True, 0, False, [])
        if answer[0] < 0:
            raise ConversationTooLarge(TOO_LARGE.format(self._tenant_bytes))
        # There are none where it is not done.
        states = [(each.id, state) for each, state in zip(records, answer[2:], strict=False)]
        unfit = [id_ for id_, state in states if state == 3]
        for id_ in unfit:
            self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
        done = answer[0] == 1
        if done:
            self._tell_deleted(tenant, [each.id for each in records if each.version == DELETED])
        higher = [id_ for id_, state in states if state == 2]
        return SharedPut(done, answer[1], not unfit, higher)

    def get(self, tenant: str, ids: Sequence[str]) -> dict[str, Record]:
        """What there is of these, tombstones too. Raises ConversationTooLarge."""
        answer = self._run(tenant, "get", [MAX_READ + _SLACK * len(ids), *ids])
        return self._records(tenant, ids, answer)

    def members(
        self, tenant: str, group: str, after: int, limit: int
    ) -> tuple[list[str], dict[str, Record]]:
        """The ids by order, and what there is of them. Raises ConversationTooLarge."""
        bound = MAX_READ + _SLACK * limit
        answer = self._run(tenant, "members", [bound, group, b"%020d" % (after + 1), limit])
        told = answer[1] if answer is not None and answer[0] > 0 else ()
        ids = [raw.decode(errors="replace") for raw in told]
        records = self._records(tenant, ids, answer)
        return ids, {id_: each for id_, each in records.items() if each.group == group}

    def look(self, gateway: str = "", state: str = "") -> Look:
        """`gateway` says of itself that it is "filling" or "filled"."""
        keys = (f"{_ALL}epoch", f"{_ALL}filling", f"{_ALL}since")
        raw, age_ms, filling = self._lazy.client.eval(_LOOK, 3, *keys, gateway, state, _SILENT_MS)
        return Look(int(raw), age_ms >= _SETTLED_MS and filling == 0)

    def deleted(self, limit: int = 1000) -> list[tuple[str, str]]:
        """Tenants and ids of some that were deleted since the last call."""
        entries = self._lazy.client.xrange(
            f"{_ALL}deleted", min=f"({self._deleted_after}", count=limit
        )
        found: list[tuple[str, str]] = []
        for position, fields in entries:
            self._deleted_after = position.decode()
            tenant, id_ = (fields.get(name, b"").decode(errors="replace") for name in (b"t", b"i"))
            if is_id(id_):
                found.append((tenant, id_))
        return found

    def _tell_deleted(self, tenant: str, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._lazy.client.xadd(
                f"{_ALL}deleted", {"t": tenant, "i": id_}, maxlen=_TOLD, approximate=True
            )

    def _key(self, tenant: str, name: str) -> str:
        # No tenant's name begins with a dot, and an empty one would be no hash tag.
        return f"conversations:{{.{tenant}}}:{name}"

    def _run(self, tenant: str, operation: str, arguments: Sequence[object]) -> list[Any] | None:
        """None where a key is of another kind."""
        key = self._key(tenant, "")
        try:
            answer: list[Any] = self._lazy.client.eval(
                _SCRIPT, 1, key, operation, *self._times, *arguments
            )
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._refusals.add(key, error)
            return None
        return answer

    def _records(
        self, tenant: str, ids: Sequence[str], answer: list[Any] | None
    ) -> dict[str, Record]:
        if answer is None:
            return {}
        if answer[0] < 0:
            raise ConversationTooLarge("It is too large to be read at once.")
        found: dict[str, Record] = {}
        for id_, raw in zip(ids, answer[2], strict=False):
            if raw is None:
                continue
            head = _HEAD.match(raw)
            version, order = map(int, head.groups()[:2]) if head else (2**63, 0)
            if head is None or not is_id(id_) or max(version, order) >= 2**63:
                self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
                continue
            found[id_] = Record(id_, raw[head.end() :], version, head[3].decode(), order)
        return found
