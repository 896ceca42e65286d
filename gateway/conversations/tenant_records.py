"""Reading and writing of tenants' records (conversations and responses) in Redis.

All keys of a tenant begin with ``conversations:{.TENANT}:``. ``records.lua`` describes the keys.

Each record belongs to a unit: its group (all records of a conversation or response), or the record
itself if it has no group. All records of a unit are renewed, expired and evicted together.

No command or script may block Redis for more than about 2 ms. Large groups are therefore read,
renewed and removed by several scripts, one after the other. Large values are not passed to scripts,
but read and written by separate commands. Other programs may have written values to the same keys.
Values that are not valid records are counted and left unchanged.
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
# Argument of put.lua that says: the next argument is only the length of the record's value.
_LENGTH_ONLY = "#"


class Copy(NamedTuple):
    """A record that was read from Redis or this gateway's disk.

    `epoch` is the `RedisState.epoch` at the time at which a client's request stored the record in
    Redis. `epoch` is 0 if a gateway has uploaded the record from its disk, or if the record was
    read from the disk.
    """

    record: Record
    epoch: int

    @property
    def may_change(self) -> bool:
        """True if the record is mutable, so that another copy may have a higher version."""
        return self.record.version < FINAL


class Members(NamedTuple):
    """Records of a group, as read from Redis.

    A group also has a head record, whose id is the group's id.

    Attributes:
        ids: Ids of the group's records, sorted by the records' `order`.
        copies: The records with these ids that Redis has, by id.
        epoch: `Copy.epoch` of the head record; -1 if the head record is missing.
        began: `order` of the head record, which is its time of creation; 0 if the head record is
            missing.
    """

    ids: list[str]
    copies: dict[str, Copy]
    epoch: int
    began: int


class SharedPut(NamedTuple):
    """Result of `TenantRecords.put`.

    Attributes:
        done: True if all batches were processed. If False, the call has evicted other records, but
            the new records still do not fit. The caller must repeat the call.
        evicted: Number of records that this call has evicted.
        accepted: True if Redis has all records, or higher versions of them. False if a record could
            not be stored, for example because its key in Redis has an invalid value.
        higher: Ids of the records of which Redis has a higher version.
    """

    done: bool
    evicted: int
    accepted: bool
    higher: list[str]


class TenantRecords:
    """Access to tenants' records in Redis.

    Methods block on I/O and may run in any thread. They raise the exceptions that
    `lora_store.primary.failure_types` lists.
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
            ttl_ms: Milliseconds after which an unused unit (conversation or response) expires.
            tenant_bytes: Maximum number of bytes that the records of one tenant may have.
            renew_ms: Minimum milliseconds between two updates of a unit's time of last use.
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
        """Store records in Redis, in the given order, in batches of 64. Each batch is atomic.

        If the records together exceed a limit, no record is stored.

        Args:
            tenant: The tenant that owns the records.
            records: The records to store.
            epoch: `RedisState.epoch` at the last poll; 0 for records that are uploaded from a disk.
            used_ms: Time at which the records were last used, in ms since 1970; -1 for now.

        Raises:
            ConversationTooLarge: A conversation or response would exceed the tenant's limit, even
                if all other records of the tenant were evicted.
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
                # Run the script twice. The first run gets only the lengths of the values. It checks
                # the limits and the stored versions, and returns which records are new. For the
                # second run, send only the large values of new records.
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
        """Run put.lua for one piece of the records, and return the script's result.

        The script gets the value of each record as an argument, unless `tokens` has an entry for
        the record's index. The entry is the token of a temporary key if `_stage` has written the
        value to this key. The entry is `_LENGTH_ONLY` if the script must get only the length of the
        value.
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
        """Return a group's records whose `order` is above `after`, at most `limit` of them.

        The records are read in batches. If the group is removed meanwhile, `epoch` in the result is
        -1. Raise ConversationTooLarge if the records have more than `MAX_READ_BYTES` bytes.
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
            tenant: The tenant that owns the records.
            ids: Ids of the records.
            bytes_left: Maximum bytes of all values together.
            values: Results of read.lua for the first ids, if they have been read already. Instead
                of a large value, read.lua returns its length, which is negative if the value is
                stored as a hash.
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
        """Read a record's large value with several commands. Return None if it was removed.

        `value` is the result of read.lua for this record. For a large value, read.lua returns only
        the length. If the record's value is replaced while it is read, read the new value instead.
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
        """Set the time of last use of large units to `when`, in ms since 1970.

        A script runs several times for each unit: a single run would block Redis for too long.
        """
        for unit in units:
            after = b""
            while after := self.renew_some(client, tenant, unit, when, after):
                pass

    def renew_some(self, client: Any, tenant: str, unit: bytes, when: int, after: bytes) -> bytes:
        """Extend the time to live of some records of a large unit.

        `after` is b"" in the first call, and the result of the previous call in each further call.
        The result is b"" when the last record is done. This last call also sets the unit's time of
        last use to `when`, in ms since 1970.
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

        If a command fails because a key has an unexpected type, count the invalid value, and leave
        the `with` block without an exception. The caller must return a default after the block.
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

    `length` is the length of the value in bytes. It is negative if the value is stored as a hash.
    """
    parts: list[bytes] = []
    for start in range(0, abs(length), MAX_COPIED_BYTES):
        if length > 0:
            parts.append(client.getrange(key, start, start + MAX_COPIED_BYTES - 1))
        else:
            parts.append(client.hget(key, str(start // MAX_COPIED_BYTES)) or b"")
    joined = b"".join(parts)
    # Read the first line of the value again. The line contains the record's version. If the value
    # was replaced meanwhile, the line therefore differs from the first line of `joined`.
    head = client.getrange(key, 0, _MAX_HEAD_BYTES - 1) if length > 0 else client.hget(key, "head")
    return joined if len(joined) == abs(length) and joined.startswith(head or b"-") else None
