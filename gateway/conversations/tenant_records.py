"""Records of tenants in Redis.

``conversations:{.TENANT}:``  prefix of a tenant's keys: see ``records.lua``

A record belongs to a unit: its group (all records of a conversation or response), or the record
itself if it has no group. A unit is always renewed, expired and evicted completely.

No command or script may block Redis for more than about 2 ms. Large groups are therefore read,
renewed and removed in several steps, and large values are written and read by separate commands
outside the scripts. Redis may contain values of other programs. Invalid values are counted and left
unchanged.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gateway.conversations.notices import announce, max_notices
from gateway.conversations.pieces import (
    MAX_COPIED_BYTES,
    MAX_RECORDS,
    Piece,
    first_piece,
)
from gateway.conversations.record import (
    FINAL,
    MAX_MEMBERS,
    MAX_READ_BYTES,
    TOO_LARGE,
    Record,
    is_id,
)
from gateway.conversations.scripts import PUT, READ, RENEW, STAGE
from gateway.errors import ConversationsUnavailable, ConversationTooLarge
from lora_store import redis_url
from lora_store.connect import errors
from lora_store.primary import Primary, write_verified
from lora_store.refusals import RefusedValues

_HEAD = re.compile(rb"c1 (\d{20}) (\d{20}) (\d{20}) ([A-Za-z0-9_/-]{0,160})\n")
_MAX_HEAD_BYTES = 300  # maximum length of a match of `_HEAD`
_ORDER_CHARS = 21  # length of the order and the separator before the id of a member
_STAGED_MS = 60_000
_TORN_READS = 10
# Results of put.lua for a record.
_NEW, _HIGHER, _FOREIGN, _GONE = 1, 2, 3, 4
# Argument of put.lua that announces the length of a record's value instead of the value itself.
_LENGTH_ONLY = "#"


class Copy(NamedTuple):
    """A copy of a record, and the Redis epoch in which the record was put to Redis.

    The epoch is 0 if the record was uploaded from a gateway's disk, or read from this disk.
    """

    record: Record
    epoch: int

    @property
    def may_change(self) -> bool:
        """True if the record is mutable, so another copy may have a later version."""
        return self.record.version < FINAL


class Members(NamedTuple):
    """Members of a group, as read from Redis.

    Attributes:
        ids: Ids of the members, by order.
        copies: The existing records of these ids.
        epoch: The epoch of the group's head record; -1 if the head is missing.
        began: The order of the head record; 0 if the head is missing.
    """

    ids: list[str]
    copies: dict[str, Copy]
    epoch: int
    began: int


class SharedPut(NamedTuple):
    """Result of a put.

    Attributes:
        done: False if the put must be repeated, because it has only evicted records so far.
        evicted: The number of evicted records.
        accepted: True if Redis has all records, or higher versions of them; False if a key in Redis
            has an invalid value.
        higher: The ids of records with a higher version in Redis.
    """

    done: bool
    evicted: int
    accepted: bool
    higher: list[str]


class TenantRecords:
    """Access to records in Redis.

    Methods block on I/O and may run in any thread. They raise `lora_store.primary.failure_types`.
    """

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
        """Prepare a connection, which the first call opens.

        Args:
            url: URL of Redis, in a form that `lora_store.redis_url` describes.
            timeout_s: Timeout of each command in seconds.
            ttl_ms: Milliseconds after which an unused unit expires.
            tenant_bytes: Maximum bytes of one tenant.
            renew_ms: Minimum milliseconds between two renewals of a unit.
            on_refused: Called for each key in Redis with an invalid value.
        """
        self._primary = Primary(redis_url.parse(url), timeout_s)
        self._times = (ttl_ms, renew_ms)
        self._tenant_bytes = tenant_bytes
        self._refusals = RefusedValues(on_refused)

    def close(self) -> None:
        self._primary.close()

    def put(
        self, tenant: str, records: Sequence[Record], epoch: int = 0, used_ms: int = -1
    ) -> SharedPut:
        """Put records, in order and in atomic batches of 64.

        Put nothing if the limits do not allow all records.

        Args:
            tenant: The owner.
            records: The records to put.
            epoch: The epoch last seen; 0 for records uploaded from a disk.
            used_ms: The last use of the records; -1 for now.

        Raises:
            ConversationTooLarge: A unit would exceed the tenant's limit.
        """
        with self._guarded_client(tenant) as client, write_verified(client) as bound:
            return self._put_pieces(bound, tenant, records, epoch, used_ms)
        return SharedPut(True, 0, False, [])

    def _put_pieces(
        self, client: Any, tenant: str, records: Sequence[Record], epoch: int, used_ms: int
    ) -> SharedPut:
        evicted, states = 0, list[int]()
        while len(states) < len(records):
            piece = first_piece(records[len(states) :], with_later=not states)
            given: Mapping[int, str] = {}
            if piece.staged:
                # Run the script first with only the lengths of the values, to check the limits and
                # the stored versions. Large values are then sent only if they will be stored.
                lengths = dict.fromkeys(range(len(piece.records)), _LENGTH_ONLY)
                trial = self._put_piece(client, tenant, piece, epoch, used_ms, lengths)
                evicted += trial[1]
                if trial[0] == 0:
                    return SharedPut(False, evicted, False, [])
                given = {
                    number: self._stage(client, tenant, _build_value(piece.records[number], epoch))
                    if trial[5][number] == _NEW
                    else _LENGTH_ONLY
                    for number in piece.staged
                }
            answer = self._put_piece(client, tenant, piece, epoch, used_ms, given)
            evicted += answer[1]
            if answer[0] == 0:
                return SharedPut(False, evicted, False, [])
            _, _, _, when, due, some = answer
            states += [
                _GONE if state == _NEW and given.get(number) == _LENGTH_ONLY else state
                for number, state in enumerate(some)
            ]
            self._renew(client, tenant, due, when)
        found = list(zip([each.id for each in records], states, strict=True))
        for id_ in [id_ for id_, state in found if state == _FOREIGN]:
            self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
        higher = [id_ for id_, state in found if state == _HIGHER]
        return SharedPut(True, evicted, not {_FOREIGN, _GONE} & {*states}, higher)

    def _put_piece(
        self,
        client: Any,
        tenant: str,
        piece: Piece,
        epoch: int,
        used_ms: int,
        tokens: Mapping[int, str],
    ) -> list[Any]:
        """Run put.lua for one piece, and return the script's result.

        `tokens` has an entry for each record whose value is not an argument of the script. The key
        is the record's index; the value is a token from `_stage`, or `_LENGTH_ONLY`.
        """
        arguments: list[object] = [*self._times, self._tenant_bytes, MAX_MEMBERS, used_ms]
        arguments += [piece.later_bytes, len(piece.later_units), max_notices(self._tenant_bytes)]
        for unit, more in piece.later_units.items():
            arguments += [unit, more]
        for number, record in enumerate(piece.records):
            token = tokens.get(number, "")
            value: object = b""
            if token == _LENGTH_ONLY:
                value = len(_build_head(record, epoch)) + len(record.data)
            elif not token:
                value = _build_value(record, epoch)
            version, order = b"%020d" % record.version, b"%020d" % record.order
            arguments += (record.id, version, record.group, order, token, value)
        answer: list[Any] = PUT.run(client, [self._key(tenant, "")], arguments)
        if answer[0] < 0:
            raise ConversationTooLarge(TOO_LARGE.format(self._tenant_bytes))
        if answer[2] > 0:
            announce(client, tenant, sum(self._times))
        return answer

    def _stage(self, client: Any, tenant: str, value: bytes) -> str:
        """Write a large value to a temporary key in Redis, and return the key's token.

        put.lua later renames the temporary key to the key of the record.
        """
        token = secrets.token_hex(8)
        key = self._key(tenant, f"s:{token}")
        if len(value) <= MAX_COPIED_BYTES:
            client.set(key, value, px=_STAGED_MS)
            return token
        head = value[: value.index(b"\n") + 1]
        STAGE.run(client, [key], [head, len(value), _STAGED_MS])
        for start in range(0, len(value), MAX_COPIED_BYTES):
            part = value[start : start + MAX_COPIED_BYTES]
            client.hset(key, str(start // MAX_COPIED_BYTES), part)
        return token

    def get(self, tenant: str, ids: Sequence[str]) -> dict[str, Copy]:
        """Return the existing records of these ids, including tombstones, by id.

        Raise ConversationTooLarge if the records exceed `MAX_READ_BYTES`.
        """
        with self._guarded_client(tenant) as client:
            bytes_left = MAX_READ_BYTES + _MAX_HEAD_BYTES * len(ids)
            return self._parse_records(
                tenant, ids, self._read_values(client, tenant, ids, bytes_left)
            )
        return {}

    def members(self, tenant: str, group: str, after: int, limit: int) -> Members:
        """Return at most `limit` members of a group with an order above `after`.

        The members are read in batches. If the group is removed meanwhile, the result has no head
        (`epoch` is -1). Raise ConversationTooLarge if the members exceed `MAX_READ_BYTES`.
        """
        ids, copies, heads = list[str](), dict[str, Copy](), list[bytes]()
        with self._guarded_client(tenant) as client:
            first, bytes_left = b"[%020d" % (after + 1), MAX_READ_BYTES + _MAX_HEAD_BYTES * limit
            while True:
                count = min(limit - len(ids), MAX_RECORDS)
                values, names, head = self._run_read(client, tenant, "members", group, first, count)
                some = [name[_ORDER_CHARS:].decode(errors="replace") for name in names]
                found = self._read_values(client, tenant, some, bytes_left, values)
                bytes_left -= sum([len(value) for value in found if value is not None])
                ids += some
                copies |= self._parse_records(tenant, some, found)
                heads.append(head)
                if len(names) < count or len(ids) == limit:
                    break
                first = b"(" + names[-1]
        own = {id_: copy for id_, copy in copies.items() if copy.record.group == group}
        read = [_HEAD.match(head) for head in heads or [b""]]
        epoch = min([-1 if each is None else int(each[1]) for each in read])
        return Members(ids, own, epoch, int(read[-1][3]) if read[-1] else 0)

    def _read_values(
        self,
        client: Any,
        tenant: str,
        ids: Sequence[str],
        bytes_left: int,
        values: Sequence[bytes | int | None] = (),
    ) -> list[bytes | None]:
        """Return the values of records in Redis, with None for each missing record.

        Args:
            client: The Redis client.
            tenant: The owner.
            ids: Ids of the records.
            bytes_left: Maximum bytes of all values together.
            values: Results of read.lua for the first ids. A large value is represented by its
                length, which is negative if the value is stored as a hash.
        """
        found: list[bytes | None] = []
        while True:
            for id_, value in zip(ids[len(found) :], values, strict=False):
                bytes_left -= abs(value) if isinstance(value, int) else len(value or b"")
                if bytes_left < 0:
                    raise ConversationTooLarge("It is too large to be read at once.")
                found.append(
                    self._read_large(client, tenant, id_, value)
                    if isinstance(value, int)
                    else value
                )
            if len(found) == len(ids):
                return found
            more = ids[len(found) : len(found) + MAX_RECORDS]
            values, _, _ = self._run_read(client, tenant, "get", *more)

    def _read_large(
        self, client: Any, tenant: str, id_: str, value: bytes | int | None
    ) -> bytes | None:
        """Read a large value with several commands. Return None if the value was removed.

        `value` is the length of the value, as read.lua returns it. If the value is replaced during
        the read, the new value is read.
        """
        for _ in range(_TORN_READS):
            if not isinstance(value, int):
                return value
            try:
                if (
                    joined := _read_parts(client, self._key(tenant, f"r:{id_}"), value)
                ) is not None:
                    return joined
            except errors().ResponseError as error:
                if "WRONGTYPE" not in str(
                    error
                ):  # a string has replaced a hash, or a hash a string
                    raise
            [value], _, _ = self._run_read(client, tenant, "get", id_)
        raise ConversationsUnavailable(
            f"{id_} is being replaced all the time and cannot be read: try again."
        )

    def _run_read(
        self, client: Any, tenant: str, *arguments: object
    ) -> tuple[list[bytes | int | None], list[bytes], bytes]:
        key = self._key(tenant, "")
        when, due, values, names, head = READ.run(client, [key], [*self._times, *arguments])
        self._renew(client, tenant, due, when)
        return values, names, head

    def _renew(self, client: Any, tenant: str, units: Sequence[bytes], when: int) -> None:
        """Set the last use of large units to `when` (ms since 1970), in several short steps."""
        for unit in units:
            after = b""
            while after := self.renew_some(client, tenant, unit, when, after):
                pass

    def renew_some(self, client: Any, tenant: str, unit: bytes, when: int, after: bytes) -> bytes:
        """Renew a limited number of members of a large unit: the members after `after`.

        Returns the last renewed member, which is `after` for the next call. Returns b"" when all
        members are renewed; the time of the unit's last use is then `when`.
        """
        arguments = [*self._times, unit, when, after]
        last: bytes = RENEW.run(client, [self._key(tenant, "")], arguments)
        return last

    def _key(self, tenant: str, name: str) -> str:
        # Put a dot before the tenant's name. On a gateway without tenants, the name is empty, and
        # Redis would not treat `{}` as a hash tag. Tenants' names never begin with a dot, so keys
        # of two tenants never clash.
        return f"conversations:{{.{tenant}}}:{name}"

    @contextmanager
    def _guarded_client(self, tenant: str) -> Iterator[Any]:
        """Yield a client of Redis.

        If a key has an unexpected type, count the invalid value and end the `with` block early. The
        caller's code after the block then returns a default.
        """
        try:
            with self._primary.use() as client:
                yield client
        except errors().ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._refusals.add(self._key(tenant, ""), error)

    def _parse_records(
        self, tenant: str, ids: Sequence[str], values: Sequence[bytes | None]
    ) -> dict[str, Copy]:
        found: dict[str, Copy] = {}
        for id_, raw in zip(ids, values, strict=True):
            if raw is None:
                continue
            head = _HEAD.match(raw)
            epoch, version, order = map(int, head.groups()[:3]) if head else (0, 2**63, 0)
            if head is None or not is_id(id_) or max(version, order) >= 2**63:
                self._refusals.add(self._key(tenant, f"r:{id_}"), "no record")
                continue
            record = Record(id_, raw[head.end() :], version, head[4].decode(), order)
            found[id_] = Copy(record, epoch)
        return found


def _build_head(record: Record, epoch: int) -> bytes:
    fields = (epoch, record.version, record.order, record.group.encode())
    return b"c1 %020d %020d %020d %b\n" % fields


def _build_value(record: Record, epoch: int) -> bytes:
    return _build_head(record, epoch) + record.data


def _read_parts(client: Any, key: str, length: int) -> bytes | None:
    """Read a large value with several commands. Return None if it was replaced meanwhile.

    `length` is the length of the value, negative if the value is stored as a hash.
    """
    parts: list[bytes] = []
    for start in range(0, abs(length), MAX_COPIED_BYTES):
        if length > 0:
            parts.append(client.getrange(key, start, start + MAX_COPIED_BYTES - 1))
        else:
            parts.append(client.hget(key, str(start // MAX_COPIED_BYTES)) or b"")
    joined = b"".join(parts)
    # Read the head again at the end. The head contains the version, so it has changed if the value
    # was replaced.
    head = client.getrange(key, 0, _MAX_HEAD_BYTES - 1) if length > 0 else client.hget(key, "head")
    return joined if len(joined) == abs(length) and joined.startswith(head or b"-") else None
