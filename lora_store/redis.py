"""The shared tier: tensors as a cache, records and their change notices for every gateway.

Keys, under one prefix, of which each command takes one, so that a cluster may spread them:

``<prefix>:version:<digest>``    "<size> <chunk size> <time put>"; exists only when all chunks do
``<prefix>:version:<digest>:N``  chunk N of the encoded version (`lora_store.codec`)
``<prefix>:names``               hash: record JSON by name, and ``@epoch`` and ``@revision``
``<prefix>:changes``             channel: "changed", or "wanted <digest>"

``@revision`` grows by a random step with each change and ``@epoch`` is drawn anew whenever the hash
starts empty, so a reader that compares both notices every change it was not told of, the loss of
all data, and another server that lacks the last changes and has taken others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from adapters.adapter import Converted
from adapters.errors import StoreError, StoreUnavailable, WritesRefused
from adapters.record import Record, is_digest
from lora_store import redis_url
from lora_store.codec import CorruptBlob, encode, encoded_bytes
from lora_store.connect import channel_url, errors, load, never_again
from lora_store.primary import (
    Primary,
    RedisUnavailable,
    describe,
    is_unavailable,
    refuses_writes,
    writing,
)
from lora_store.redis_hashes import read_hash
from lora_store.redis_values import (
    Description,
    StoredRecord,
    dump,
    read_description,
    read_record,
)
from lora_store.refusals import Refusals

# The client copies each value while it holds the interpreter lock; at 8 MiB that alone stalls the
# event loop for 10 ms.
_CHUNK_BYTES = 1024 * 1024
_CLAIM_S = 10
_DESCRIPTIONS_AT_ONCE = 256
_SPARE = 0.05  # of its memory, for what keys take besides, and for other writers
_MAX_STEP = 2**20  # of the revision
# How long a listener that hears nothing believes that there is nothing to hear.
_QUIET_S = 2.0
# What can be refused (a revision that is no number, a channel that this user may not use) comes
# before the record: a script that fails takes nothing back.
_SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[1], '@revision', ARGV[6])
redis.call('PUBLISH', ARGV[5], 'changed')
redis.call('HSETNX', KEYS[1], '@epoch', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

Position = tuple[bytes | None, bytes | None]
_NONE: Mapping[str, Record] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`url` in a form of `lora_store.redis_url`.

    `ttl_s`: seconds after its last use that a version stays; None leaves it to Redis' own memory
    policy. Records never expire. `timeout_s` bounds each connect and each command.
    """

    url: str
    prefix: str = "lora"
    ttl_s: int | None = None
    timeout_s: float = 2.0


class RedisTier:
    """All methods but `listen` block; call them from threads.

    Raises `StoreUnavailable` when Redis does not answer in time and `StoreError` when it refuses.
    """

    def __init__(self, settings: RedisSettings) -> None:
        """Raises ValueError for a URL of no known form."""
        self._settings = settings
        self._prefix = settings.prefix
        self.refusals = Refusals()
        # Records that were read last, by name, and digests of what they were read from.
        self._parsed: dict[str, tuple[bytes, Record]] = {}
        self._primary = Primary(redis_url.parse(settings.url), settings.timeout_s)

    def close(self) -> None:
        self._primary.close()

    def _use(self) -> contextlib.AbstractContextManager[Any]:
        return use(self._primary)

    # Versions.

    def has(self, digests: Sequence[str]) -> set[str]:
        """Return those of the versions that Redis has."""
        with self._use() as client:
            return {digest for digest, _ in self._descriptions(client, digests)}

    def put(self, converted: Converted) -> None:
        """Chunk by chunk, so that no value comes near Redis' limit of 512 MB.

        A version that is there already only becomes younger.
        """
        digest, ttl = converted.digest, self._settings.ttl_s
        new = Description(encoded_bytes(converted), _CHUNK_BYTES, int(time.time()))
        with self._use() as shared, writing(shared) as client:
            old = self._description(client, digest)
            same = old is not None and (old.size, old.chunk_bytes) == (new.size, new.chunk_bytes)
            if same and client.set(self._version(digest), new.dump(), ex=ttl, xx=True):
                return
            for number, chunk in enumerate(_chunks(converted)):
                client.set(self._chunk(digest, number), chunk, ex=ttl)
            client.set(self._version(digest), new.dump(), ex=ttl)

    def fetch(self, digest: str) -> Iterator[bytes] | None:
        """The chunks of a version, read as the iterator goes; None when Redis does not have it.

        The iterator raises `StoreError` when a chunk is gone (Redis' memory policy takes single
        keys): then the description is deleted too, and the version counts as absent. It raises
        `CorruptBlob` when one has another length than it should.
        """
        with self._use() as client:
            description = self._description(client, digest)
        return None if description is None else self._fetch(digest, description)

    def _fetch(self, digest: str, description: Description) -> Iterator[bytes]:
        key, ttl = self._version(digest), self._settings.ttl_s
        with self._use() as client:
            for number in description.chunks:
                chunk_key = self._chunk(digest, number)
                chunk = client.getex(chunk_key, ex=ttl) if ttl else client.get(chunk_key)
                if chunk is None:
                    client.delete(key)
                    raise StoreError(f"chunk {number} of version {digest[:12]} is gone from Redis")
                if len(chunk) != description.length(number):
                    raise CorruptBlob(f"chunk {number} has {len(chunk)} bytes")
                yield chunk
            if ttl:
                client.expire(key, ttl)

    def delete(self, digest: str, *, older_than_s: float = -math.inf) -> None:
        """Unless it was put since."""
        limit = time.time() - older_than_s
        with self._use() as client:
            description = self._description(client, digest)
            if description is not None and description.put_at > limit:
                return
            client.delete(self._version(digest))
            for number in description.chunks if description is not None else ():
                client.unlink(self._chunk(digest, number))

    def digests(self, older_than_s: float) -> set[str]:
        """Versions that were put at least so long ago."""
        limit = time.time() - older_than_s
        found: list[str] = []
        with self._use() as client:
            for key in client.scan_iter(match=f"{self._prefix}:version:*", count=1000):
                digest = _text(key).removeprefix(f"{self._prefix}:version:")
                if ":" in digest:
                    continue  # a chunk
                if not is_digest(digest):
                    self.refusals.add(_text(key), "not the digest of a version")
                    continue
                found.append(digest)
            return {d for d, each in self._descriptions(client, found) if each.put_at <= limit}

    def _description(self, client: Any, digest: str) -> Description | None:
        return next((found for _, found in self._descriptions(client, [digest])), None)

    def _descriptions(
        self, client: Any, digests: Sequence[str]
    ) -> Iterator[tuple[str, Description]]:
        """The versions that there are of many, asked for in few round trips."""
        for start in range(0, len(digests), _DESCRIPTIONS_AT_ONCE):
            some = digests[start : start + _DESCRIPTIONS_AT_ONCE]
            together = client.pipeline(transaction=False)
            for digest in some:
                together.get(self._version(digest))
            for digest, raw in zip(some, together.execute(raise_on_error=False), strict=True):
                if (found := self._read_description(digest, raw)) is not None:
                    yield digest, found

    def _read_description(self, digest: str, raw: bytes | Exception | None) -> Description | None:
        try:
            if isinstance(raw, Exception):
                raise raw
            return None if raw is None else read_description(raw)
        except (ValueError, errors().ResponseError) as error:
            refused = not isinstance(error, ValueError)
            if refused and "WRONGTYPE" not in str(error):
                raise
            self.refusals.add(self._version(digest), error)
            return None

    def room(self) -> int | None:
        """Return how many bytes can be put before Redis drops other versions for them.

        Return None if it drops none, and for a cluster, whose servers each have their own memory.
        """
        with self._use() as client:
            if isinstance(client, load().RedisCluster):
                return None
            memory = client.info("memory")
        policy, most = memory["maxmemory_policy"], int(memory["maxmemory"])
        expire = self._settings.ttl_s is not None
        drops = policy.startswith("allkeys") or (expire and policy.startswith("volatile"))
        if most == 0 or not drops:
            return None
        return int(most * (1 - _SPARE)) - int(memory["used_memory"])

    def claim(self, digest: str) -> bool:
        """True for one caller at a time: the one who shall put this version now."""
        with self._use() as client:
            key = f"{self._prefix}:filling:{digest}"
            return bool(client.set(key, "1", nx=True, ex=_CLAIM_S))

    def release(self, digest: str) -> None:
        with self._use() as client:
            client.delete(f"{self._prefix}:filling:{digest}")

    def want(self, digest: str) -> None:
        """Ask whoever has this version on disk to put it."""
        with self._use() as client:
            client.publish(self._channel, f"wanted {digest}")

    # Records.

    def position(self) -> Position:
        """(epoch, revision) of the records; (None, None) when there are none."""
        with self._use() as client:
            return self._position(client)

    def _position(self, client: Any) -> Position:
        epoch, revision = client.hmget(self._names, ["@epoch", "@revision"])
        return epoch, revision

    def records(
        self, known: Mapping[str, Record] = _NONE
    ) -> tuple[Position, dict[str, StoredRecord]]:
        """Return the position, and every record as it is then or later.

        A record that is the one in `known`, or that was read before, is not parsed.
        """
        with self._use() as client:
            position = self._position(client)
            found = read_hash(client, self._names)
        for field in (b"@epoch", b"@revision"):
            found.pop(field, None)
        records: dict[str, StoredRecord] = {}
        parsed: dict[str, tuple[bytes, Record]] = {}
        for field, raw in found.items():
            name, digest = _text(field), blake2b(raw, digest_size=16).digest()
            last_digest, record = self._parsed.get(name, (b"", None))
            if record is None or digest != last_digest:
                record = known.get(name)
                if record is None or dump(record) != raw:
                    record = self._stored(name, raw).record
            if record is not None:
                parsed[name] = digest, record
            records[name] = StoredRecord(raw, record)
        self._parsed = parsed
        return position, records

    def record(self, name: str) -> StoredRecord | None:
        with self._use() as client:
            found: bytes | None = client.hget(self._names, name)
        return None if found is None else self._stored(name, found)

    def _stored(self, name: str, raw: bytes) -> StoredRecord:
        try:
            return StoredRecord(raw, read_record(name, raw))
        except ValueError as error:
            self.refusals.add(f"{self._names} {name}", error)
            return StoredRecord(raw, None)

    def swap(self, expected: StoredRecord | None, record: Record) -> bool:
        """Store a record if what is stored is still `expected`; tells every listener.

        What Redis refuses it has not stored; after `StoreUnavailable` it may have.
        """
        epoch = secrets.token_hex(8)
        with self._use() as shared, writing(shared) as client:
            old = b"" if expected is None else expected.raw
            step = 1 + secrets.randbelow(_MAX_STEP)
            arguments = (record.name, old, dump(record), epoch, self._channel, step)
            return bool(client.eval(_SWAP, 1, self._names, *arguments))

    async def listen(self) -> AsyncGenerator[str, None]:
        """Messages of the channel, from now on. Ends with `StoreError`, never by itself.

        A server that neither tells nor answers is given up, and so is one whose client was
        dropped, so that its successor is listened to.
        """
        with translated():
            generation, url = await asyncio.to_thread(self._channel_server)
            timeout_s = self._settings.timeout_s
            async with (
                load().asyncio.Redis.from_url(
                    url,
                    socket_connect_timeout=timeout_s,
                    socket_timeout=None,
                    retry=never_again(),
                ) as client,
                client.pubsub() as pubsub,
            ):
                # Its own timeout for reading is none, as a listener has nothing to read for long.
                async with asyncio.timeout(timeout_s):
                    await pubsub.subscribe(self._channel)
                asked = False
                while True:
                    if self._primary.generation != generation:
                        raise StoreUnavailable("another Redis may be the primary now")
                    message = await pubsub.get_message(timeout=timeout_s if asked else _QUIET_S)
                    if message is None:
                        if asked:
                            raise StoreUnavailable("the Redis that tells of changes is silent")
                        await pubsub.ping()
                    elif message["type"] == "message":
                        yield message["data"].decode(errors="replace")
                    asked = message is None

    def _channel_server(self) -> tuple[int, str]:
        with self._use() as client:
            return self._primary.generation, channel_url(self._primary.url, client)

    @property
    def _names(self) -> str:
        return f"{self._prefix}:names"

    @property
    def _channel(self) -> str:
        return f"{self._prefix}:changes"

    def _version(self, digest: str) -> str:
        return f"{self._prefix}:version:{digest}"

    def _chunk(self, digest: str, number: int) -> str:
        return f"{self._prefix}:version:{digest}:{number}"


def _text(name: bytes) -> str:
    """What is not UTF-8 becomes something that is no name either."""
    return name.decode(errors="backslashreplace")


def _chunks(converted: Converted) -> Iterator[bytes | memoryview]:
    head, weights = encode(converted)
    first = _CHUNK_BYTES - len(head)
    yield head + bytes(weights[:first])
    for start in range(first, len(weights), _CHUNK_BYTES):
        yield weights[start : start + _CHUNK_BYTES]


@contextlib.contextmanager
def use(primary: Primary) -> Iterator[Any]:
    """Give the client of `primary`. Raises as the methods of `RedisTier`."""
    with translated(), primary.use() as client:
        yield client


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of `RedisTier` for those of a client."""
    try:
        yield
    except (errors().RedisError, RedisUnavailable, OSError) as error:
        if is_unavailable(error):
            raise StoreUnavailable(f"Redis cannot be used: {describe(error)}") from error
        if refuses_writes(error):
            raise WritesRefused(f"Redis refuses: {describe(error)}") from error
        raise StoreError(f"Redis refuses: {error}") from error
