"""Storage in Redis that gateways share: adapter versions, records, and notices of changes.

All keys begin with a prefix. Each command uses one key, so the keys may be on different servers of
a cluster:

``<prefix>:version:<digest>``    "<size> <chunk size> <time of storage>"; written after the chunks
``<prefix>:version:<digest>:N``  chunk N of the encoded version (`lora_store.codec`)
``<prefix>:filling:<digest>``    exists while a gateway stores the version (`RedisTier.claim`)
``<prefix>:names``               hash: record JSON by name, and ``@epoch`` and ``@revision``
``<prefix>:changes``             channel: "changed", or "wanted <digest>"

``@revision`` grows by a random step with each change of a record. ``@epoch`` is a random value that
is set when the hash is created. Readers poll both values. If one of them has changed, the reader
reads all records again. Polling also detects a change whose notice was lost, a loss of all data in
Redis, and a failover to a server without the last changes.

See decision 078 in docs/decisions.
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
from lora_store.connect import channel_url, errors, load, make_no_retry
from lora_store.primary import (
    Primary,
    RedisUnavailable,
    describe,
    is_unavailable,
    refuses_writes,
    write_verified,
)
from lora_store.redis_hashes import read_hash
from lora_store.redis_values import (
    StoredRecord,
    VersionDescription,
    dump,
    read_description,
    read_record,
)
from lora_store.refusals import RefusedValues

# Size of the chunks. redis-py copies each value while it holds the GIL: a copy of 8 MiB would block
# the event loop for 10 ms.
_CHUNK_BYTES = 1024 * 1024
_CLAIM_TTL_S = 10
_DESCRIPTIONS_AT_ONCE = 256
# Fraction of Redis' memory that is left free for the overhead of keys and for other writers.
_RESERVED_FRACTION = 0.05
_MAX_STEP = 2**20  # maximum of the random step by which the revision grows
# Seconds without a message after which a listener pings the server.
_LISTEN_CHECK_S = 2.0
# Lua script that stores a record if the stored record is still the expected one. The last command
# writes the record. An earlier command may fail, for example because the Redis user has no
# permission for PUBLISH. In this case, Redis does not undo the previous commands, but the record is
# unchanged.
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
    """Settings of the connection to Redis.

    Attributes:
        url: a URL in a format that `lora_store.redis_url` describes.
        prefix: prefix of all keys.
        ttl_s: time in seconds after which an unused version expires; None for no expiry. Redis'
            eviction policy may also remove versions. Records never expire.
        timeout_s: timeout of each connect and each command, in seconds.
    """

    url: str
    prefix: str = "lora"
    ttl_s: int | None = None
    timeout_s: float = 2.0


class RedisTier:
    """Versions and records of LoRA adapters in Redis.

    All methods except `listen` block: call them from threads.

    The methods raise `StoreUnavailable` if Redis cannot be used, for example after a timeout. They
    raise `WritesRefused` or another `StoreError` if Redis refuses the command.
    """

    def __init__(self, settings: RedisSettings) -> None:
        """Create the tier. The first command connects to Redis.

        Raise ValueError if the URL is invalid.
        """
        self._settings = settings
        self._prefix = settings.prefix
        self.refusals = RefusedValues()
        # Maps each record's name to (digest of the record's bytes, parsed record) at the last read.
        self._parsed: dict[str, tuple[bytes, Record]] = {}
        self._primary = Primary(redis_url.parse(settings.url), settings.timeout_s)

    def close(self) -> None:
        self._primary.close()

    def _use(self) -> contextlib.AbstractContextManager[Any]:
        return use(self._primary)

    # Versions.

    def has(self, digests: Sequence[str]) -> set[str]:
        """Return the members of `digests` whose adapter versions Redis has."""
        with self._use() as client:
            return {digest for digest, _ in self._descriptions(client, digests)}

    def put(self, converted: Converted) -> None:
        """Store an adapter version.

        The version is divided into chunks, because a value in Redis has at most 512 MB. If Redis
        already has the version, only its expiry and its time of storage are updated.
        """
        digest, ttl = converted.digest, self._settings.ttl_s
        new = VersionDescription(encoded_bytes(converted), _CHUNK_BYTES, int(time.time()))
        with self._use() as shared, write_verified(shared) as client:
            old = self._description(client, digest)
            same = old is not None and (old.size, old.chunk_bytes) == (new.size, new.chunk_bytes)
            if same and client.set(self._version(digest), new.dump(), ex=ttl, xx=True):
                return
            for number, chunk in enumerate(_chunks(converted)):
                client.set(self._chunk(digest, number), chunk, ex=ttl)
            client.set(self._version(digest), new.dump(), ex=ttl)

    def fetch(self, digest: str) -> Iterator[bytes] | None:
        """Return an iterator over an adapter version's chunks, or None if Redis lacks the version.

        If a chunk is missing, for example because Redis' memory was full, the iterator deletes the
        key ``<prefix>:version:<digest>`` and raises `StoreError`. Without this key, the version no
        longer exists in Redis. If a chunk has a wrong length, the iterator raises `CorruptBlob`.
        """
        with self._use() as client:
            description = self._description(client, digest)
        return None if description is None else self._fetch(digest, description)

    def _fetch(self, digest: str, description: VersionDescription) -> Iterator[bytes]:
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
        """Delete an adapter version, if it was last stored at least `older_than_s` seconds ago."""
        limit = time.time() - older_than_s
        with self._use() as client:
            description = self._description(client, digest)
            if description is not None and description.put_at > limit:
                return
            client.delete(self._version(digest))
            for number in description.chunks if description is not None else ():
                client.unlink(self._chunk(digest, number))

    def digests(self, older_than_s: float) -> set[str]:
        """Return the digests of the adapter versions in Redis, except recently stored versions.

        Omit a version if it was last stored less than `older_than_s` seconds ago.
        """
        limit = time.time() - older_than_s
        found: list[str] = []
        with self._use() as client:
            for key in client.scan_iter(match=f"{self._prefix}:version:*", count=1000):
                digest = _text(key).removeprefix(f"{self._prefix}:version:")
                if ":" in digest:
                    continue  # skip the key of a chunk
                if not is_digest(digest):
                    self.refusals.add(_text(key), "not the digest of a version")
                    continue
                found.append(digest)
            return {d for d, each in self._descriptions(client, found) if each.put_at <= limit}

    def _description(self, client: Any, digest: str) -> VersionDescription | None:
        return next((found for _, found in self._descriptions(client, [digest])), None)

    def _descriptions(
        self, client: Any, digests: Sequence[str]
    ) -> Iterator[tuple[str, VersionDescription]]:
        """Yield (digest, `VersionDescription`) for each version in `digests` that Redis has.

        The descriptions are read in batches, with one round trip per batch.
        """
        for start in range(0, len(digests), _DESCRIPTIONS_AT_ONCE):
            some = digests[start : start + _DESCRIPTIONS_AT_ONCE]
            together = client.pipeline(transaction=False)
            for digest in some:
                together.get(self._version(digest))
            for digest, raw in zip(some, together.execute(raise_on_error=False), strict=True):
                if (found := self._read_description(digest, raw)) is not None:
                    yield digest, found

    def _read_description(
        self, digest: str, raw: bytes | Exception | None
    ) -> VersionDescription | None:
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

    def free_bytes(self) -> int | None:
        """Return how many bytes can be stored before Redis removes versions to free memory.

        Return None if Redis is configured to remove no versions. Also return None for a cluster, in
        which each server has its own limit.
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
        return int(most * (1 - _RESERVED_FRACTION)) - int(memory["used_memory"])

    def claim(self, digest: str) -> bool:
        """Claim the task of storing an adapter version, so that no other process stores it.

        Return True if the caller has the claim now, and must store the version. The claim expires
        after a few seconds. Return False if another process has the claim.
        """
        with self._use() as client:
            key = f"{self._prefix}:filling:{digest}"
            return bool(client.set(key, "1", nx=True, ex=_CLAIM_TTL_S))

    def release(self, digest: str) -> None:
        with self._use() as client:
            client.delete(f"{self._prefix}:filling:{digest}")

    def want(self, digest: str) -> None:
        """Ask all gateways that have an adapter version on disk to store this version in Redis."""
        with self._use() as client:
            client.publish(self._channel, f"wanted {digest}")

    # Records.

    def position(self) -> Position:
        """Return (epoch, revision) of the adapter records.

        Each change of a record changes the revision. After Redis has lost all records, the records
        that are stored next have a new epoch. Return (None, None) if Redis has no records.
        """
        with self._use() as client:
            return self._position(client)

    def _position(self, client: Any) -> Position:
        epoch, revision = client.hmget(self._names, ["@epoch", "@revision"])
        return epoch, revision

    def records(
        self, known: Mapping[str, Record] = _NONE
    ) -> tuple[Position, dict[str, StoredRecord]]:
        """Return the result of `position` before reading the records, and the records by name.

        To save time, a record is not parsed again if its bytes are the same as at the last call, or
        the same as the encoded record of this name in `known`.
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
                    record = self._parse_stored(name, raw).record
            if record is not None:
                parsed[name] = digest, record
            records[name] = StoredRecord(raw, record)
        self._parsed = parsed
        return position, records

    def record(self, name: str) -> StoredRecord | None:
        with self._use() as client:
            found: bytes | None = client.hget(self._names, name)
        return None if found is None else self._parse_stored(name, found)

    def _parse_stored(self, name: str, raw: bytes) -> StoredRecord:
        try:
            return StoredRecord(raw, read_record(name, raw))
        except ValueError as error:
            self.refusals.add(f"{self._names} {name}", error)
            return StoredRecord(raw, None)

    def swap(self, expected: StoredRecord | None, record: Record) -> bool:
        """Store a record if Redis still has the record `expected`, and publish the change.

        Return True if the record was stored. If `StoreUnavailable` is raised, the record may or may
        not have been stored. If another `StoreError` is raised, the record was not stored.
        """
        epoch = secrets.token_hex(8)
        with self._use() as shared, write_verified(shared) as client:
            old = b"" if expected is None else expected.raw
            step = 1 + secrets.randbelow(_MAX_STEP)
            arguments = (record.name, old, dump(record), epoch, self._channel, step)
            return bool(client.eval(_SWAP, 1, self._names, *arguments))

    async def listen(self) -> AsyncGenerator[str, None]:
        """Yield each new message of the channel ``<prefix>:changes``.

        Raise `StoreError` if the connection fails, or if `Primary` has created a new client. The
        new client may use another server, so the caller must call `listen` again to connect to it.
        """
        with translate_errors():
            generation, url = await asyncio.to_thread(self._channel_server)
            timeout_s = self._settings.timeout_s
            async with (
                load().asyncio.Redis.from_url(
                    url,
                    socket_connect_timeout=timeout_s,
                    socket_timeout=None,
                    retry=make_no_retry(),
                ) as client,
                client.pubsub() as pubsub,
            ):
                # Set a timeout for the subscription here. The socket itself has no timeout, because
                # messages may be rare.
                async with asyncio.timeout(timeout_s):
                    await pubsub.subscribe(self._channel)
                asked = False
                while True:
                    if self._primary.generation != generation:
                        raise StoreUnavailable("another Redis may be the primary now")
                    message = await pubsub.get_message(
                        timeout=timeout_s if asked else _LISTEN_CHECK_S
                    )
                    if message is None:
                        if asked:
                            raise StoreUnavailable("the Redis that reports changes is silent")
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
    """Decode a name from Redis.

    Invalid UTF-8 is escaped with backslashes, which do not occur in valid names.
    """
    return name.decode(errors="backslashreplace")


def _chunks(converted: Converted) -> Iterator[bytes | memoryview]:
    head, weights = encode(converted)
    first = _CHUNK_BYTES - len(head)
    yield head + bytes(weights[:first])
    for start in range(first, len(weights), _CHUNK_BYTES):
        yield weights[start : start + _CHUNK_BYTES]


@contextlib.contextmanager
def use(primary: Primary) -> Iterator[Any]:
    """Yield the client of `primary`. Convert redis-py's errors to the errors of `RedisTier`."""
    with translate_errors(), primary.use() as client:
        yield client


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Convert errors of redis-py that are raised in the context to the errors of `RedisTier`."""
    try:
        yield
    except (errors().RedisError, RedisUnavailable, OSError) as error:
        if is_unavailable(error):
            raise StoreUnavailable(f"Redis cannot be used: {describe(error)}") from error
        if refuses_writes(error):
            raise WritesRefused(f"Redis refuses: {describe(error)}") from error
        raise StoreError(f"Redis refuses: {error}") from error
