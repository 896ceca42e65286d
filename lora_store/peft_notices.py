"""Reports that agents and gateways send each other through Redis about adapters on disks.

Agents (`peft_agent`) report the adapter versions that their disks have. Gateways report the
versions that running requests use. This module uses the following keys, one key in each command:

``<prefix>:peft:base``      JSON of the base model for which adapters were converted
``<prefix>:peft:beats``     hash: for each agent, a text that differs for every report
``<prefix>:peft:agents``    hash: for each agent, its last report (`AgentState`) as JSON
``<prefix>:peft:gateways``  hash: for each gateway, its last report (`GatewayState`) as JSON

The clocks of different machines are never compared. A reader polls the reports, and measures with
its own clock for how long a report has not changed. If this time is too long, the reader considers
the agent or gateway gone.
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
from lora_store.refusals import RefusedValues

_MAX_BYTES = 64 * 1024 * 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """Report of one agent.

    Attributes:
        boot: random value that the agent chooses when it starts.
        revision: number that grows with each change of the report since the agent's start.
        replicas: endpoints (``host:port``) of the replicas that read the agent's folder.
        path: path of the agent's folder in the replicas' file system.
        holds: digests of the versions that requests may use on these replicas.
        refused: reasons why the agent will never store some versions, by the version's digest.
        lacks: reasons why the agent cannot store some versions now, by the version's digest. Empty
            in reports of earlier releases.
    """

    boot: str
    revision: int
    replicas: tuple[str, ...]
    path: str
    holds: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState:
    """Report of one gateway.

    Attributes:
        beat: number that changes with every report.
        seen: for each agent, `boot` and `revision` of the last report that the gateway has read.
            The gateway starts requests only with versions that this report lists.
        in_use: endpoints (``host:port``) of the replicas that run requests with a version, by the
            version's digest.
    """

    beat: int
    seen: Mapping[str, tuple[str, int]]
    in_use: Mapping[str, frozenset[str]]


class PeftNotices:
    """Reports of agents and gateways in Redis.

    All methods block, and raise the same errors as `lora_store.redis.RedisTier`.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._primary = Primary(redis_url.parse(settings.url), settings.timeout_s)
        self._prefix = f"{settings.prefix}:peft"
        self.refusals = RefusedValues()

    def close(self) -> None:
        self._primary.close()

    # The base model.

    def put_base(self, base: BaseModel) -> None:
        with use(self._primary) as client:
            client.set(f"{self._prefix}:base", dump(base))

    def read_base(self) -> BaseModel | None:
        with use(self._primary) as client:
            raw: bytes | None = client.get(f"{self._prefix}:base")
        return None if raw is None else self._parse("base", raw, parse)

    # Agents.

    def put_agent_state(self, agent: str, held: AgentState, beat: str) -> None:
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
            # Write this key last. A gateway polls this key, and reads the report when the text has
            # changed. The report must already be stored at that time.
            told = f"{held.boot} {held.revision} {beat}"
            client.hset(f"{self._prefix}:beats", agent, told)

    def read_beats(self) -> dict[str, str]:
        """Return, for each agent, a text that changes with every report of the agent.

        The text has the form "<boot> <revision> <random value>".
        """
        return {agent: _decode(raw) for agent, raw in self._read_hash("beats").items()}

    def read_agent_state(self, agent: str) -> AgentState | None:
        with use(self._primary) as client:
            raw: bytes | None = client.hget(f"{self._prefix}:agents", agent)
        return None if raw is None else self._parse(f"agents {agent}", raw, _parse_agent_state)

    # Gateways.

    def put_gateway_state(self, gateway: str, named: GatewayState) -> None:
        value = {
            "beat": named.beat,
            "seen": named.seen,
            "in_use": {digest: sorted(where) for digest, where in named.in_use.items()},
        }
        with use(self._primary) as client:
            client.hset(f"{self._prefix}:gateways", gateway, json.dumps(value))

    def read_gateway_states(self) -> dict[str, GatewayState]:
        """Return the last report of each gateway.

        `refusals` logs each unreadable report. In the result, such a report has an empty `seen`. An
        agent deletes a version only when `seen` of each active gateway shows that the gateway knows
        of the deletion. An empty `seen` therefore prevents all deletions while the gateway is
        active.
        """
        found = {}
        for gateway, raw in self._read_hash("gateways").items():
            named = self._parse(f"gateways {gateway}", raw, _parse_gateway_state)
            found[gateway] = named or GatewayState(beat=zlib.crc32(raw), seen={}, in_use={})
        return found

    def forget_agent(self, agent: str) -> None:
        """Remove the reports of an agent that has not reported for long."""
        with use(self._primary) as client:
            client.hdel(f"{self._prefix}:beats", agent)
            client.hdel(f"{self._prefix}:agents", agent)

    def forget_gateway(self, gateway: str) -> None:
        """Remove the report of a gateway that has ended, or has not reported for long."""
        with use(self._primary) as client:
            client.hdel(f"{self._prefix}:gateways", gateway)

    def _read_hash(self, name: str) -> dict[str, bytes]:
        with use(self._primary) as client:
            found = read_hash(client, f"{self._prefix}:{name}")
        return {_decode(key): raw for key, raw in found.items()}

    def _parse(self, key: str, raw: bytes, read: Callable[[bytes], T]) -> T | None:
        try:
            if len(raw) > _MAX_BYTES:
                raise ValueError(f"{len(raw)} bytes")
            return read(raw)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.refusals.add(f"{self._prefix}:{key}", error)
            return None


class Heartbeats(Generic[T]):
    """Last reports of agents or gateways, with the time at which each report has last changed.

    With these times, a reader finds agents and gateways that no longer send reports.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, tuple[T, float]] = {}
        self._dropped: dict[str, T] = {}

    def update(self, values: Mapping[str, T]) -> None:
        """Store the reports that were just read from Redis, by name of the agent or gateway.

        If `values` lacks a name, the name's old report is retained: Redis may have lost the report.
        """
        now = self._clock()
        # Redis may still have a report that `drop` has removed here. Ignore the report until it
        # changes, which shows that its sender is active again.
        self._dropped = {who: old for who, old in self._dropped.items() if values.get(who) == old}
        for who, value in values.items():
            known = who in self._dropped or (who in self._values and self._values[who][0] == value)
            if not known:
                self._values[who] = value, now

    def drop(self, older_than_s: float) -> list[str]:
        """Remove the reports that have not changed for `older_than_s` seconds.

        Return the names of the agents or gateways that sent these reports.
        """
        since = self._clock() - older_than_s
        gone = [who for who, (_, heard) in self._values.items() if heard < since]
        for who in gone:
            self._dropped[who] = self._values.pop(who)[0]
        return gone

    def recent(self, within_s: float = float("inf")) -> dict[str, T]:
        since = self._clock() - within_s
        return {who: value for who, (value, heard) in self._values.items() if heard >= since}


def _parse_agent_state(raw: bytes) -> AgentState:
    value = json.loads(raw)
    holds = frozenset(value["holds"])
    if not all(is_digest(digest) for digest in holds):
        raise ValueError("holds: not digests")
    path = _check_str(value["path"])
    if not path.startswith("/"):
        raise ValueError("path: not an absolute one")
    return AgentState(
        boot=_check_str(value["boot"]),
        revision=_check_int(value["revision"]),
        replicas=tuple(_check_str(replica) for replica in value["replicas"]),
        path=path,
        holds=holds,
        refused=_parse_reasons(value["refused"]),
        lacks=_parse_reasons(value.get("lacks", {})),
    )


def _parse_reasons(value: Any) -> dict[str, str]:
    return {_check_str(digest): _check_str(why) for digest, why in value.items()}


def _parse_gateway_state(raw: bytes) -> GatewayState:
    value = json.loads(raw)
    seen = {
        _check_str(who): (_check_str(boot), _check_int(n))
        for who, (boot, n) in value["seen"].items()
    }
    in_use = {
        _check_str(d): frozenset(map(_check_str, where)) for d, where in value["in_use"].items()
    }
    return GatewayState(beat=_check_int(value["beat"]), seen=seen, in_use=in_use)


def _check_str(value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError("not a text")
    return value


def _check_int(value: object) -> int:
    if type(value) is not int:
        raise ValueError("not an integer")
    return value


def _decode(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
