"""Placement: which adapter versions are on which replicas' disks, and in which folders.

See decision 029 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.errors import EngineError

HELD, COMING = "held", "on its way"


def address_of(endpoint: str) -> str:
    """Return ``host:port`` of an endpoint such as ``grpcs://host:port#name``.

    The part after # is the name that the endpoint's TLS certificate must have.
    """
    return endpoint.rpartition("://")[2].partition("#")[0]


class Placement:
    """Versions on replicas' disks, as known to this process.

    The task that polls the disks calls `set`. The object must be used on one event loop.
    """

    def __init__(self) -> None:
        self._folders: Mapping[str, Mapping[str, str]] = {}
        self._everywhere: Mapping[str, str] = {}
        self._refused: Mapping[str, str] = {}
        self._lacks: Mapping[str, Mapping[str, str]] = {}
        self._in_use: Counter[tuple[str, str]] = Counter()
        self._polled = asyncio.Event()
        self.waiting = 0
        """Number of requests that wait for the next poll."""

    def set(
        self,
        folders: Mapping[str, Mapping[str, str]],
        everywhere: Mapping[str, str],
        refused: Mapping[str, str],
        lacks: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Replace all that is known about the disks.

        Args:
            folders: path of each version's folder in the replica's file system, by the replica's
                address and the version's digest.
            everywhere: folders of versions on the volume that all replicas mount, by digest.
            refused: for each version that no replica will ever hold: the reason, by digest.
            lacks: for each version that a replica cannot hold now: the reason, by address and
                digest.
        """
        self._folders, self._everywhere, self._refused = folders, everywhere, refused
        self._lacks = lacks

    def wake(self) -> None:
        """Wake all waiting requests, so that they check versions and replicas again."""
        self._polled.set()
        self._polled = asyncio.Event()

    def of(self, digest: str) -> VersionFolders:
        """Return the folders of one version."""
        return VersionFolders(self, digest)

    def in_use(self) -> dict[str, frozenset[str]]:
        """Return the addresses of replicas that run requests with a version now, by digest of the
        version.
        """
        found: dict[str, set[str]] = {}
        for address, digest in self._in_use:
            found.setdefault(digest, set()).add(address)
        return {digest: frozenset(where) for digest, where in found.items()}

    def at(self, digest: str, endpoint: str) -> str | None:
        """Return the version's folder in the replica's file system. Return None if the replica
        lacks the version.
        """
        found = self._folders.get(address_of(endpoint), {}).get(digest)
        return self._everywhere.get(digest) if found is None else found

    def count(self, endpoint: str) -> int:
        """Return how many versions are on the replica's disk."""
        return len({*self._folders.get(address_of(endpoint), {}), *self._everywhere})

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses of the replicas whose disks agents report."""
        return frozenset(self._folders)

    def state(self, digest: str, endpoint: str) -> str:
        """Return the state of a version on a replica: `HELD`, `COMING`, or "not held: " with the
        reason.
        """
        if self.at(digest, endpoint) is not None:
            return HELD
        why = self._lacks.get(address_of(endpoint), {}).get(digest) or self._refused.get(digest)
        if why is not None:
            return f"not held: {why}"
        if self._folders and address_of(endpoint) not in self._folders:
            return "not held: no agent reports this replica"
        return COMING

    def count_lacking(self, endpoint: str) -> Counter[str]:
        """Return how many versions the replica cannot hold now, by reason."""
        return Counter(self._lacks.get(address_of(endpoint), self._refused).values())

    @contextlib.contextmanager
    def using(self, digest: str, endpoint: str) -> Iterator[None]:
        """Count the version as in use on the replica while the context is entered."""
        key = address_of(endpoint), digest
        self._in_use[key] += 1
        try:
            yield
        finally:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]

    async def wait_for_poll(self, digest: str) -> None:
        """Wait for the next poll. Raise EngineError if no replica will ever hold the version."""
        if digest in self._refused:
            raise EngineError("No inference server here can run this adapter.")
        self.waiting += 1
        try:
            await self._polled.wait()
        finally:
            self.waiting -= 1


@dataclass(frozen=True, slots=True)
class VersionFolders:
    """Folders of one version on the replicas' disks. Implements `gateway.generation.Folders`."""

    placement: Placement
    digest: str

    def at(self, endpoint: str) -> str | None:
        return self.placement.at(self.digest, endpoint)

    def using(self, endpoint: str) -> contextlib.AbstractContextManager[None]:
        return self.placement.using(self.digest, endpoint)

    async def wait_for_poll(self) -> None:
        await self.placement.wait_for_poll(self.digest)
