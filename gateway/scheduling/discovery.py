"""Endpoints by name: ``dns:///host:port`` stands for every address that the name has now.

With TLS it is ``grpcs+dns:///host:port``, and each address is trusted as ``host``.
(gRPC's naming syntax, https://github.com/grpc/grpc/blob/master/doc/naming.md; a headless service of
Kubernetes has one address for each pod.)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from gateway.triton.transport import Endpoint

log = logging.getLogger(__name__)

_SCHEME = "dns:///"
_TLS_SCHEME = "grpcs+dns:///"


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


async def resolve(endpoints: Sequence[str]) -> list[str] | None:
    """The endpoints with each name in place of its addresses, sorted; without duplicates.

    None when a name could not be looked up: what was known stays in force, since a name server that
    is away says nothing about the replicas. A name without addresses has no replicas.
    """
    found: dict[str, None] = {}
    for endpoint in endpoints:
        if not is_name(endpoint):
            found[endpoint] = None
            continue
        addresses = await _addresses(endpoint)
        if addresses is None:
            return None
        found.update(dict.fromkeys(addresses))
    return list(found)


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
