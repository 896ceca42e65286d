"""Clients for what a `RedisUrl` names: one server, the master of a sentinel's service, a cluster.

The redis-py clients differ by kind, but take the same commands on one key each. None of them tries
again by itself: whoever uses them knows what a lost answer means.

Nothing here or elsewhere loads redis-py before it is used: a gateway alone has no Redis, and it is
9 MiB, with what it imports for its own metrics. `load` does so sooner, where that is better.

`undocumented` lists what this file uses of redis-py that its documentation does not promise.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from lora_store.redis_tls import with_kept_files
from lora_store.redis_url import RedisUrl


@cache
def load() -> Any:
    """redis-py, with `asyncio`, `cluster`, `exceptions` and `sentinel` in it."""
    redis = import_module("redis")
    for part in ("asyncio", "cluster", "sentinel"):
        import_module(f"redis.{part}")
    return redis


def undocumented() -> Mapping[type, tuple[str, ...]]:
    """And `redis.connection.parse_url`, which makes a connection's arguments of a URL."""
    redis = load()
    return {
        redis.Redis: ("connection_pool",),
        redis.sentinel.SentinelConnectionPool: ("get_master_address", "sentinel_manager"),
        redis.sentinel.Sentinel: ("sentinels",),
        redis.RedisCluster: ("get_node_from_key", "get_nodes", "get_redis_connection"),
        redis.cluster.ClusterNode: ("host", "port"),
    }


def errors() -> Any:
    """redis-py's exceptions."""
    return load().exceptions


def away() -> tuple[type[Exception], ...]:
    """Nobody answers, or nobody who may: a part of a cluster waits for its next master."""
    known = errors()
    answers_not = (known.ConnectionError, known.TimeoutError, OSError)
    return (*answers_not, known.ClusterError, known.RedisClusterException)


def failures() -> tuple[type[Exception], ...]:
    """Everything that a command can fail with."""
    return (errors().RedisError, *away())


def reason(error: BaseException | None) -> str:
    """Why a command failed, in words for operators.

    Not the client's own, which may hold the sentinels' passwords.
    """
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    known = errors()
    if any(isinstance(each, known.AuthenticationError) for each in chain):
        return "it refuses the user or password of its URL"
    if any(isinstance(each, known.TimeoutError) for each in chain):
        return "no answer in time"
    for each in chain:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror.lower()
    return type(chain[0]).__name__


def connect(url: RedisUrl, *, timeout_s: float, connect_timeout_s: float) -> Any:
    """A client for threads. `timeout_s` bounds each command at one server.

    A cluster is asked for its servers here, so this raises one of `away`; the others connect with
    their first command.
    """
    redis = load()
    # redis-py's annotations promise str or awaitables, by version; these clients give neither.
    timeouts: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    retry = never_again()
    server = with_kept_files(url.server)
    if url.kind == "server":
        return redis.Redis.from_url(server, **timeouts, retry=retry)
    if url.kind == "cluster":
        nodes = [redis.cluster.ClusterNode(*host) for host in url.hosts[1:]]
        return redis.RedisCluster(url=server, startup_nodes=nodes, **timeouts, retry=retry)
    options = {**timeouts, **redis.connection.parse_url(server)}
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
    sentinel = redis.Sentinel(url.hosts, sentinel_kwargs=to_sentinels)
    return sentinel.master_for(url.service, **options, retry=retry)


def never_again() -> Any:
    """The `Retry` of a client that tries nothing twice."""
    redis = load()
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)


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
    if isinstance(client, load().RedisCluster):
        node = client.get_node_from_key(key)
        return client.get_redis_connection(node)
    return client


def channel_url(url: RedisUrl, client: Any) -> str:
    """One server at which everything that is published can be heard; asks who that is now.

    In a cluster every server passes on what was published at any. A master that the sentinels
    replaced loses the idle connections of `client` by this.
    """
    if url.kind == "server":
        return with_kept_files(url.server)
    if url.kind == "cluster":
        node = random.choice(client.get_nodes())
        return with_kept_files(url.at(node.host, node.port))
    return with_kept_files(url.at(*client.connection_pool.get_master_address()))
