"""Clients for what a `RedisUrl` names: one server, the master of a sentinel's service, a cluster.

The redis-py clients differ by kind, but take the same commands on one key each. None of them tries
again by itself: whoever uses them knows what a lost answer means.

Nothing here or elsewhere loads redis-py before it is used: a gateway alone has no Redis, and it is
9 MiB, with what it imports for its own metrics. `load` does so sooner, where that is better.

`undocumented` lists what this file uses of redis-py that its documentation does not promise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

from lora_store.redis_role import agreeing_sentinels, checked, greet
from lora_store.redis_tls import with_memory_files
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
        redis.Connection: ("check_health", "on_connect", "send_command", "read_response"),
        redis.sentinel.SentinelConnectionPool: ("get_master_address", "sentinel_manager"),
        redis.sentinel.SentinelManagedConnection: ("connection_pool",),
        redis.sentinel.Sentinel: ("sentinels", "check_master_state", "discover_master"),
        redis.RedisCluster: ("get_node_from_key", "get_nodes", "get_redis_connection"),
        redis.cluster.ClusterNode: ("host", "port"),
    }


def errors() -> Any:
    """redis-py's exceptions."""
    return load().exceptions


def connect(
    url: RedisUrl,
    *,
    timeout_s: float,
    connect_timeout_s: float,
    connections: WeakSet[Any] | None = None,
) -> Any:
    """A client for threads. `timeout_s` bounds each command at one server.

    `connections` gets those that it makes, but of a cluster's client none.
    A cluster is asked for its servers here, so this raises redis-py's errors; the others connect
    with their first command.
    """
    redis = load()
    server = with_memory_files(url.server)
    direct = redis.connection.parse_url(server)
    begin = partial(greet, WeakSet() if connections is None else connections)
    # redis-py's annotations promise str or awaitables, by version; these clients give neither.
    timeouts: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    retry = never_again()
    if url.kind == "server":
        kind = checked(direct.get("connection_class", redis.Connection))
        roles = {"connection_class": kind, "redis_connect_func": begin}
        return redis.Redis.from_url(server, **timeouts, **roles, retry=retry)
    if url.kind == "cluster":
        nodes = [redis.cluster.ClusterNode(*host) for host in url.hosts[1:]]
        return redis.RedisCluster(url=server, startup_nodes=nodes, **timeouts, retry=retry)
    options = {**timeouts, **direct}
    for replaced in ("host", "port"):
        del options[replaced]
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    managed = redis.sentinel.SentinelManagedConnection
    if options.pop("connection_class", None) is not None:
        tls["ssl"] = True
        managed = redis.sentinel.SentinelManagedSSLConnection
    # A sentinel is asked when a connection is made, so it has the time that connecting has.
    to_sentinels = {
        "socket_timeout": connect_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": retry,
        **url.sentinel_login,
        **tls,
    }
    sentinel = agreeing_sentinels()(url.hosts, sentinel_kwargs=to_sentinels)
    roles = {"connection_class": checked(managed), "redis_connect_func": begin}
    return sentinel.master_for(url.service, **options, **roles, retry=retry)


def never_again() -> Any:
    """The `Retry` of a client that tries nothing twice."""
    redis = load()
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)


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

    In a cluster every server passes on what was published at any.
    """
    if url.kind == "server":
        return with_memory_files(url.server)
    if url.kind == "cluster":
        node = random.choice(client.get_nodes())
        return with_memory_files(url.at(node.host, node.port))
    return with_memory_files(url.at(*client.connection_pool.get_master_address()))
