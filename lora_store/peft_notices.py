"""What agents hold and what gateways name, told through Redis.

Keys, under the prefix of the store's own, of which each command takes one:

``<prefix>:peft:base``      the base model that versions were converted for (`base_model_json`)
``<prefix>:peft:beats``     hash: by agent, text that is another every time it is told
``<prefix>:peft:agents``    hash: by agent, what it holds (`Held`)
``<prefix>:peft:gateways``  hash: by gateway, what it may have named (`Named`)

Clocks of machines are not compared. Whoever reads a hash knows by its own clock how long a value
has been the same, and takes one that is old for that of somebody who is not there any more.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from adapters.base_model import BaseModel
from adapters.base_model_json import dump, parse
from adapters.record import is_digest
from lora_store import redis_url
from lora_store.primary import Primary
from lora_store.redis import RedisSettings, use
from lora_store.redis_hashes import read_hash
from lora_store.refusals import Refusals

_MAX_BYTES = 64 * 1024 * 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one agent holds, for `replicas` (``host:port``), below `path` as they see it.

    `boot` is drawn when the agent starts; `revision` grows with each change after that.
    `refused` has the versions that it will never hold, `lacks` those that it cannot hold now, with
    the reasons; releases before this one tell no `lacks`.
    """

    boot: str
    revision: int
    replicas: tuple[str, ...]
    path: str
    holds: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What one gateway has sent to replicas (``host:port``) and not seen the end of, by digest.

    It names nothing else of what agents have withdrawn up to `seen`: the boot and the revision of
    each that it goes by. `beat` is another every time.
    """

    beat: int
    seen: Mapping[str, tuple[str, int]]
    in_use: Mapping[str, frozenset[str]]


class PeftNotices:
    """All methods block. Raises as `lora_store.redis.RedisTier`."""

    def __init__(self, settings: RedisSettings) -> None:
        self._primary = Primary(redis_url.parse(settings.url), settings.timeout_s)
        self._prefix = f"{settings.prefix}:peft"
        self.refusals = Refusals()

    def close(self) -> None:
        self._primary.close()

    # The base model.

    def tell_base(self, base: BaseModel) -> None:
        with use(self._primary) as client:
            client.set(f"{self._prefix}:base", dump(base))

    def base(self) -> BaseModel | None:
        with use(self._primary) as client:
            raw: bytes | None = client.get(f"{self._prefix}:base")
        return None if raw is None else self._read("base", raw, parse)

    # Agents.

    def tell_held(self, agent: str, held: Held, beat: str) -> None:
        value = {
            "boot": held.boot,
            "revision": held.revision,
            "replicas": held.replicas,
            "path": held.path,
            "holds": sorted(held.holds),
            "refused": dict(held.refused),
            "lacks": dict(held.lacks),
        }
        with use(self._primary) as client:
            client.hset(f"{self._prefix}:agents", agent, json.dumps(value))
            # Whoever sees this one change reads the other.
            told = f"{held.boot} {held.revision} {beat}"
            client.hset(f"{self._prefix}:beats", agent, told)

    def beats(self) -> dict[str, str]:
        """By agent: its boot, its revision and what is another each time, parted by spaces."""
        return {agent: _text(raw) for agent, raw in self._all("beats").items()}

    def held(self, agent: str) -> Held | None:
        with use(self._primary) as client:
            raw: bytes | None = client.hget(f"{self._prefix}:agents", agent)
        return None if raw is None else self._read(f"agents {agent}", raw, _held)

    # Gateways.

    def tell_named(self, gateway: str, named: Named) -> None:
        value = {
            "beat": named.beat,
            "seen": named.seen,
            "in_use": {digest: sorted(where) for digest, where in named.in_use.items()},
        }
        with use(self._primary) as client:
            client.hset(f"{self._prefix}:gateways", gateway, json.dumps(value))

    def named(self) -> dict[str, Named]:
        """By gateway. One that cannot be read is of a gateway that has seen nothing: whatever was
        withdrawn it may name, for as long as it goes on telling. See `refusals`.
        """
        found = {}
        for gateway, raw in self._all("gateways").items():
            named = self._read(f"gateways {gateway}", raw, _named)
            found[gateway] = named or Named(beat=zlib.crc32(raw), seen={}, in_use={})
        return found

    def forget_agent(self, agent: str) -> None:
        """Of one that has not been there for long."""
        with use(self._primary) as client:
            client.hdel(f"{self._prefix}:beats", agent)
            client.hdel(f"{self._prefix}:agents", agent)

    def forget_gateway(self, gateway: str) -> None:
        """Of one that has ended, or has not been there for long."""
        with use(self._primary) as client:
            client.hdel(f"{self._prefix}:gateways", gateway)

    def _all(self, name: str) -> dict[str, bytes]:
        with use(self._primary) as client:
            found = read_hash(client, f"{self._prefix}:{name}")
        return {_text(key): raw for key, raw in found.items()}

    def _read(self, place: str, raw: bytes, read: Callable[[bytes], T]) -> T | None:
        try:
            if len(raw) > _MAX_BYTES:
                raise ValueError(f"{len(raw)} bytes")
            return read(raw)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.refusals.add(f"{self._prefix}:{place}", error)
            return None


class Heard(Generic[T]):
    """Values that others tell again and again, and how long ago each was another, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, tuple[T, float]] = {}
        self._dropped: dict[str, T] = {}

    def take(self, values: Mapping[str, T]) -> None:
        """What is told now. Those that are missing stay: Redis may have lost them."""
        now = self._clock()
        # What was dropped and is told still is what it was.
        self._dropped = {who: old for who, old in self._dropped.items() if values.get(who) == old}
        for who, value in values.items():
            known = who in self._dropped or (who in self._values and self._values[who][0] == value)
            if not known:
                self._values[who] = value, now

    def drop(self, older_than_s: float) -> list[str]:
        """Forgets those that have told nothing for so long; who they were."""
        since = self._clock() - older_than_s
        gone = [who for who, (_, heard) in self._values.items() if heard < since]
        for who in gone:
            self._dropped[who] = self._values.pop(who)[0]
        return gone

    def recent(self, within_s: float = float("inf")) -> dict[str, T]:
        since = self._clock() - within_s
        return {who: value for who, (value, heard) in self._values.items() if heard >= since}


def _held(raw: bytes) -> Held:
    value = json.loads(raw)
    holds = frozenset(value["holds"])
    if not all(is_digest(digest) for digest in holds):
        raise ValueError("holds: not digests")
    path = _str(value["path"])
    if not path.startswith("/"):
        raise ValueError("path: not an absolute one")
    return Held(
        boot=_str(value["boot"]),
        revision=_int(value["revision"]),
        replicas=tuple(_str(replica) for replica in value["replicas"]),
        path=path,
        holds=holds,
        refused=_reasons(value["refused"]),
        lacks=_reasons(value.get("lacks", {})),
    )


def _reasons(value: Any) -> dict[str, str]:
    return {_str(digest): _str(why) for digest, why in value.items()}


def _named(raw: bytes) -> Named:
    value = json.loads(raw)
    seen = {_str(who): (_str(boot), _int(n)) for who, (boot, n) in value["seen"].items()}
    in_use = {_str(d): frozenset(map(_str, where)) for d, where in value["in_use"].items()}
    return Named(beat=_int(value["beat"]), seen=seen, in_use=in_use)


def _str(value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError("not a text")
    return value


def _int(value: object) -> int:
    if type(value) is not int:
        raise ValueError("not a whole number")
    return value


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
