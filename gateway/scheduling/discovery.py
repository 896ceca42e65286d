"""What is configured of replicas. ``dns:///host:port`` stands for every address of that name now.

With TLS it is ``grpcs+dns:///host:port``, and each address is trusted as ``host``.
(gRPC's naming syntax, https://github.com/grpc/grpc/blob/master/doc/naming.md; a headless service of
Kubernetes has one address for each pod.)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple

from gateway.triton.transport import Endpoint

log = logging.getLogger(__name__)

_SCHEME = "dns:///"
_TLS_SCHEME = "grpcs+dns:///"
DEFAULT_WEIGHT = 100.0


class Target(NamedTuple):
    """An endpoint as configured; all addresses of a name have its weight."""

    endpoint: str
    weight: float = DEFAULT_WEIGHT
    drain: bool = False


def is_name(endpoint: str) -> bool:
    """Whether the endpoint has to be looked up, again and again."""
    return endpoint.startswith((_SCHEME, _TLS_SCHEME))


def checked(endpoint: str) -> str:
    """The endpoint, if it is one. Raises ValueError."""
    address = endpoint.removeprefix(_TLS_SCHEME).removeprefix(_SCHEME)
    try:
        if is_name(endpoint) and "/" in address:
            raise ValueError
        Endpoint.parse(address)
    except ValueError:
        raise ValueError("must be host:port, grpcs://host:port or dns:///host:port") from None
    return endpoint


async def resolve(targets: Sequence[Target]) -> tuple[dict[str, Target], bool]:
    """What is configured, by endpoint: each name's addresses in place of it, sorted. Of an endpoint
    that is there twice the first counts.

    And whether a name could not be looked up: what was known of it stays in force, since a name
    server that is away says nothing about the replicas. A name without addresses has no replicas.
    """
    found: dict[str, Target] = {}
    away = False
    for target in targets:
        addresses: list[str] | None = [target.endpoint]
        if is_name(target.endpoint):
            addresses = await _addresses(target.endpoint)
        if addresses is None:
            away = True
            continue
        for address in addresses:
            found.setdefault(address, target)
    return found, away


async def _addresses(endpoint: str) -> list[str] | None:
    scheme, _, name = endpoint.partition(_SCHEME)
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        log.warning("looking up %s failed: %s", host, error)
        return None
    hosts = sorted({str(info[4][0]) for info in infos})
    places = [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in hosts]
    return [f"grpcs://{place}#{host}" for place in places] if scheme else places
