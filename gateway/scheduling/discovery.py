"""Endpoints of replicas as operators configure them, and DNS lookups of their host names.

``dns:///host:port`` stands for all addresses that a DNS lookup of the host name returns. With TLS,
write ``grpcs+dns:///host:port``; the certificate at each address must then be valid for ``host``.
The syntax follows gRPC (https://github.com/grpc/grpc/blob/master/doc/naming.md). The name of a
headless Kubernetes Service has one address for each pod.
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
    """A configured endpoint with its weight and drain flag.

    If the endpoint is a DNS name, the weight and the flag apply to each of its addresses.
    """

    endpoint: str
    weight: float = DEFAULT_WEIGHT
    drain: bool = False


def is_name(endpoint: str) -> bool:
    """Return True if the endpoint is a DNS name, which has to be resolved repeatedly."""
    return endpoint.startswith((_SCHEME, _TLS_SCHEME))


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` unchanged. Raise ValueError if its syntax is not valid."""
    address = endpoint.removeprefix(_TLS_SCHEME).removeprefix(_SCHEME)
    try:
        if is_name(endpoint) and "/" in address:
            raise ValueError
        Endpoint.parse(address)
    except ValueError:
        raise ValueError("must be host:port, grpcs://host:port or dns:///host:port") from None
    return endpoint


async def resolve(targets: Sequence[Target]) -> tuple[dict[str, Target], bool]:
    """Look up the DNS names in `targets`. Return the targets by endpoint, and a failure flag.

    The flag is True if a DNS lookup failed. The result then lacks the addresses of the failed name,
    so the caller should keep the replicas that it already knows. A name that does not exist in DNS
    is not a failure: it has no addresses. If several targets have the same address, the first of
    them is returned.
    """
    found: dict[str, Target] = {}
    away = False
    for target in targets:
        addresses: list[str] | None = [target.endpoint]
        if is_name(target.endpoint):
            addresses = await _resolve_name(target.endpoint)
        if addresses is None:
            away = True
            continue
        for address in addresses:
            found.setdefault(address, target)
    return found, away


async def _resolve_name(endpoint: str) -> list[str] | None:
    """Return the endpoints of a DNS name, sorted. Return None if the lookup fails.

    The list is empty if the name does not exist.
    """
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
    endpoints = [
        f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in hosts
    ]
    return [f"grpcs://{each}#{host}" for each in endpoints] if scheme else endpoints
