"""Creation of redis-py clients for one server, for servers with sentinels, and for a cluster.

The three types of clients accept the same commands, as long as each command has only one key.
Clients do not retry commands. If the answer to a command was lost, only the caller knows if the
command may be repeated.

Importing redis-py, with all modules that it imports, takes 9 MiB of memory. A gateway without Redis
saves this memory, because redis-py is imported only in `load`.

`list_undocumented` lists the undocumented names of redis-py that this module uses.

See decisions 046 and 077 in docs/decisions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

from lora_store.redis_role import agreeing_sentinels, greet, make_checked_class
from lora_store.redis_tls import with_memory_files
from lora_store.redis_url import RedisUrl


@cache
def load() -> Any:
    """Import redis-py with the modules `asyncio`, `cluster` and `sentinel`. Return the package."""
    redis = import_module("redis")
    for part in ("asyncio", "cluster", "sentinel"):
        import_module(f"redis.{part}")
    return redis


def list_undocumented() -> Mapping[type, tuple[str, ...]]:
    """Return the undocumented attributes of redis-py that this module uses, by class.

    A test checks that these attributes exist, because a new release of redis-py may change them.
    The result does not list `redis.connection.parse_url`, an undocumented function that this module
    also uses. The function converts a URL to the arguments of a connection.
    """
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
    """Return redis-py's module of exceptions."""
    return load().exceptions


def connect(
    url: RedisUrl,
    *,
    timeout_s: float,
    connect_timeout_s: float,
    connections: WeakSet[Any] | None = None,
) -> Any:
    """Return a redis-py client that several threads may use.

    For a cluster, this function already connects, to read the list of the cluster's servers. It
    raises redis-py's error if this fails. The other clients connect with their first command.

    Args:
        url: the server, the sentinels or the cluster.
        timeout_s: timeout of each command at one server, in seconds.
        connect_timeout_s: timeout of each connect, in seconds.
        connections: set to which the client adds each connection that it opens. The client of a
            cluster does not use this set.
    """
    redis = load()
    server = with_memory_files(url.server)
    direct = redis.connection.parse_url(server)
    begin = partial(greet, WeakSet() if connections is None else connections)
    # Annotate the returned client as Any. In some releases of redis-py, the annotated result of
    # each command includes types that these clients never return, such as an awaitable.
    timeouts: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    retry = make_no_retry()
    if url.kind == "server":
        kind = make_checked_class(direct.get("connection_class", redis.Connection))
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
    # Use the connect timeout for commands to sentinels, too: each connect queries the sentinels.
    to_sentinels = {
        "socket_timeout": connect_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": retry,
        **url.sentinel_login,
        **tls,
    }
    sentinel = agreeing_sentinels()(url.hosts, sentinel_kwargs=to_sentinels)
    roles = {"connection_class": make_checked_class(managed), "redis_connect_func": begin}
    return sentinel.master_for(url.service, **options, **roles, retry=retry)


def make_no_retry() -> Any:
    """Return a redis-py `Retry` object that never retries."""
    redis = load()
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)


def close(client: Any) -> None:
    """Close every connection of `client`, including its connections to sentinels."""
    client.close()
    finder = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in [] if finder is None else finder.sentinels:
        sentinel.close()


def server_of(client: Any, key: str) -> Any:
    """Return a client of the server that stores `key`.

    In a cluster, the server is looked up in the client's slot table, which may be out of date.
    """
    if isinstance(client, load().RedisCluster):
        node = client.get_node_from_key(key)
        return client.get_redis_connection(node)
    return client


def channel_url(url: RedisUrl, client: Any) -> str:
    """Return the URL of a server on which the caller can subscribe to pub/sub channels.

    In a cluster, this is a random server, because the servers forward all published messages to
    each other. With sentinels, this function asks the sentinels for the master's current address.
    """
    if url.kind == "server":
        return with_memory_files(url.server)
    if url.kind == "cluster":
        node = random.choice(client.get_nodes())
        return with_memory_files(url.at(node.host, node.port))
    return with_memory_files(url.at(*client.connection_pool.get_master_address()))
