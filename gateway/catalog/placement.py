"""Placement of LoRA adapter versions: their folders on the disks of replicas.

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

    The name after # is the name that the endpoint's TLS certificate must have.
    """
    return endpoint.rpartition("://")[2].partition("#")[0]


class Placement:
    """The adapter versions on replicas' disks, as found by the last poll of this process.

    The task that polls the disks calls `set`. Not thread-safe: use an instance in one event loop
    only.
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
        """Replace everything that is known about the adapter versions on the disks.

        Args:
            folders: paths of versions' folders in the replica's file system, by the replica's
                address and the version's digest.
            everywhere: paths of versions' folders on a volume that all replicas mount, by digest.
            refused: reasons why versions will never be on any replica's disk, by digest.
            lacks: reasons why versions are not on a replica's disk now, by the replica's address
                and the version's digest.
        """
        self._folders, self._everywhere, self._refused = folders, everywhere, refused
        self._lacks = lacks

    def wake(self) -> None:
        """Wake all requests in `wait_for_poll`. They then look for a replica with their version."""
        self._polled.set()
        self._polled = asyncio.Event()

    def of(self, digest: str) -> VersionFolders:
        """Return the folders of the version with this digest."""
        return VersionFolders(self, digest)

    def in_use(self) -> dict[str, frozenset[str]]:
        """Return the addresses of the replicas on which a version is in use, by version digest.

        A version is in use on a replica while the replica runs a request with this version.
        """
        found: dict[str, set[str]] = {}
        for address, digest in self._in_use:
            found.setdefault(digest, set()).add(address)
        return {digest: frozenset(where) for digest, where in found.items()}

    def at(self, digest: str, endpoint: str) -> str | None:
        """Return the path of the version's folder in the replica's file system.

        Return None if the version is not on the replica's disk.
        """
        found = self._folders.get(address_of(endpoint), {}).get(digest)
        return self._everywhere.get(digest) if found is None else found

    def count(self, endpoint: str) -> int:
        """Return how many versions are on the replica's disk."""
        return len({*self._folders.get(address_of(endpoint), {}), *self._everywhere})

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses of the replicas whose disks are reported by agents."""
        return frozenset(self._folders)

    def state(self, digest: str, endpoint: str) -> str:
        """Return the state of a version on a replica, as text for operators.

        The text is "held" (on the replica's disk), "on its way", or "not held: REASON".
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
        """Return the number of versions that are not on the replica's disk, for each reason."""
        return Counter(self._lacks.get(address_of(endpoint), self._refused).values())

    @contextlib.contextmanager
    def using(self, digest: str, endpoint: str) -> Iterator[None]:
        """Return a context manager that marks the version as in use on the replica.

        A version in use is not removed from the replica's disk.
        """
        key = address_of(endpoint), digest
        self._in_use[key] += 1
        try:
            yield
        finally:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]

    async def wait_for_poll(self, digest: str) -> None:
        """Wait for the next poll of the disks.

        Raise EngineError if the version will never be on any replica's disk.
        """
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
