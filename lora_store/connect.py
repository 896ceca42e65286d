"""Clients for what a `RedisUrl` names: one server, the master of a sentinel's service, a cluster.

The redis-py clients differ by kind, but take the same commands on one key each. None of them tries
again by itself: whoever uses them knows what a lost answer means.

`UNDOCUMENTED` lists what this file uses of redis-py that its documentation does not promise.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    ClusterError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from lora_store.redis_url import RedisUrl

UNDOCUMENTED: Mapping[type, tuple[str, ...]] = {
    redis.Redis: ("connection_pool",),
    SentinelConnectionPool: ("get_master_address", "sentinel_manager"),
    Sentinel: ("sentinels",),
    RedisCluster: ("get_node_from_key", "get_nodes", "get_redis_connection"),
    ClusterNode: ("host", "port"),
}
"""And `parse_url`, which makes a connection's arguments of a URL."""

AWAY = (RedisConnectionError, RedisTimeoutError, OSError, ClusterError, RedisClusterException)
"""Nobody answers, or nobody who may: a part of a cluster waits for its next master."""
FAILURES = (RedisError, *AWAY)
"""Everything that a command can fail with."""


def reason(error: BaseException | None) -> str:
    """Why a command failed, in words for operators.

    Not the client's own, which may hold the sentinels' passwords.
    """
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(each, AuthenticationError) for each in chain):
        return "it refuses the user or password of its URL"
    if any(isinstance(each, RedisTimeoutError) for each in chain):
        return "no answer in time"
    for each in chain:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror.lower()
    return type(chain[0]).__name__


def connect(url: RedisUrl, *, timeout_s: float, connect_timeout_s: float) -> Any:
    """A client for threads. `timeout_s` bounds each command at one server.

    A cluster is asked for its servers here, so this raises one of AWAY; the others connect with
    their first command.
    """
    # redis-py's annotations promise str or awaitables, by version; these clients give neither.
    timeouts: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    retry = Retry(NoBackoff(), 0)
    if url.kind == "server":
        return redis.Redis.from_url(url.server, **timeouts, retry=retry)
    if url.kind == "cluster":
        nodes = [ClusterNode(*host) for host in url.hosts[1:]]  # type: ignore[no-untyped-call]
        return RedisCluster(url=url.server, startup_nodes=nodes, **timeouts, retry=retry)
    options = {**timeouts, **parse_url(url.server)}  # type: ignore[no-untyped-call]
    for replaced in ("host", "port"):
        del options[replaced]
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    if options.pop("connection_class", None) is not None:
        options["ssl"] = tls["ssl"] = True
    # A sentinel is asked when a connection is made, so it has the time that connecting has.
    to_sentinels = {
        "socket_timeout": connect_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": retry,
        **url.sentinel_login,
        **tls,
    }
    sentinel: Any = Sentinel(url.hosts, sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]
    return sentinel.master_for(url.service, **options, retry=retry)


class LazyClient:
    """A client that is made when it is first asked for, and again after a failure. For threads."""

    def __init__(self, url: RedisUrl, timeout_s: float) -> None:
        """As `connect`, which `client` raises as; `timeout_s` bounds each connect, too."""
        self._url = url
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def client(self) -> Any:
        with self._lock:
            if self._made is None:
                timeout_s = self._timeout_s
                self._made = connect(self._url, timeout_s=timeout_s, connect_timeout_s=timeout_s)
            return self._made

    def close(self) -> None:
        if self._made is not None:
            close(self._made)


def close(client: Any) -> None:
    """Every connection, those to the sentinels too."""
    client.close()
    finder = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in [] if finder is None else finder.sentinels:
        sentinel.close()


def server_of(client: Any, key: str) -> Any:
    """The client of the one server that has `key` now, as far as `client` knows."""
    if isinstance(client, RedisCluster):
        node = client.get_node_from_key(key)  # type: ignore[no-untyped-call]
        return client.get_redis_connection(node)
    return client


def channel_url(url: RedisUrl, client: Any) -> str:
    """One server at which everything that is published can be heard; asks who that is now.

    In a cluster every server passes on what was published at any. A master that the sentinels
    replaced loses the idle connections of `client` by this.
    """
    if url.kind == "server":
        return url.server
    if url.kind == "cluster":
        node = random.choice(client.get_nodes())
        return url.at(node.host, node.port)
    return url.at(*client.connection_pool.get_master_address())
