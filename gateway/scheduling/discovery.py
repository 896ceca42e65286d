"""Configured endpoints of replicas, and their resolution by DNS.

``dns:///host:port`` means all current addresses of a host name. With TLS, write
``grpcs+dns:///host:port``; the certificate at each address must then be valid for ``host``. The
syntax follows gRPC (https://github.com/grpc/grpc/blob/master/doc/naming.md). The name of a headless
Kubernetes Service has one address for each pod.
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

    If the endpoint is a DNS name, they apply to each of its addresses.
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
    """Resolve the names in `targets`. Return the targets by endpoint, and a flag.

    The flag is True if the lookup of some name failed. Such names are left out of the result, and
    the caller should keep the replicas that it already knows. A name that does not exist in DNS has
    no endpoints, and does not set the flag. If an endpoint occurs repeatedly, its first target is
    returned.
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
