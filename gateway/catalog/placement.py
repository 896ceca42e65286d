"""Which replicas have which adapter versions on their disks, as requests ask it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.errors import EngineError

HELD, COMING = "held", "on its way"


def address_of(endpoint: str) -> str:
    """``host:port`` of an endpoint, however it is connected to."""
    return endpoint.rpartition("://")[2]


class Placement:
    """Of one process. Whoever follows the disks calls `set`; belongs to one event loop."""

    def __init__(self) -> None:
        self._folders: Mapping[str, Mapping[str, str]] = {}
        self._everywhere: Mapping[str, str] = {}
        self._refused: Mapping[str, str] = {}
        self._lacks: Mapping[str, Mapping[str, str]] = {}
        self._in_use: Counter[tuple[str, str]] = Counter()
        self._looked = asyncio.Event()
        self.waiting = 0
        """How many wait for the next look."""

    def set(
        self,
        folders: Mapping[str, Mapping[str, str]],
        everywhere: Mapping[str, str],
        refused: Mapping[str, str],
        lacks: Mapping[str, Mapping[str, str]],
    ) -> None:
        """What was found: by a replica's address and the digest, the folder as it sees it;
        `everywhere`, what all see. `refused`: versions that no replica will ever have, with the
        reason; `lacks`: by address, those that it cannot have now."""
        self._folders, self._everywhere, self._refused = folders, everywhere, refused
        self._lacks = lacks

    def wake(self) -> None:
        """Whoever waits looks again: also at which replicas there are."""
        self._looked.set()
        self._looked = asyncio.Event()

    def of(self, digest: str) -> VersionFolders:
        return VersionFolders(self, digest)

    def in_use(self) -> dict[str, frozenset[str]]:
        """The addresses where requests run now, by the digest of the version that they name."""
        found: dict[str, set[str]] = {}
        for address, digest in self._in_use:
            found.setdefault(digest, set()).add(address)
        return {digest: frozenset(where) for digest, where in found.items()}

    def at(self, digest: str, endpoint: str) -> str | None:
        found = self._folders.get(address_of(endpoint), {}).get(digest)
        return self._everywhere.get(digest) if found is None else found

    def count(self, endpoint: str) -> int:
        """How many versions that replica has."""
        return len({*self._folders.get(address_of(endpoint), {}), *self._everywhere})

    @property
    def addresses(self) -> frozenset[str]:
        """Of the replicas that agents have told of."""
        return frozenset(self._folders)

    def state(self, digest: str, endpoint: str) -> str:
        """Whether that replica has it, in words for operators: `HELD`, `COMING`, or why not."""
        if self.at(digest, endpoint) is not None:
            return HELD
        why = self._lacks.get(address_of(endpoint), {}).get(digest) or self._refused.get(digest)
        if why is not None:
            return f"not held: {why}"
        if self._folders and address_of(endpoint) not in self._folders:
            return "not held: no agent tells of this replica"
        return COMING

    def lacking(self, endpoint: str) -> Counter[str]:
        """How many versions that replica cannot have now, by the reason."""
        return Counter(self._lacks.get(address_of(endpoint), self._refused).values())

    @contextlib.contextmanager
    def using(self, digest: str, endpoint: str) -> Iterator[None]:
        place = address_of(endpoint), digest
        self._in_use[place] += 1
        try:
            yield
        finally:
            self._in_use[place] -= 1
            if not self._in_use[place]:
                del self._in_use[place]

    async def looked(self, digest: str) -> None:
        if digest in self._refused:
            raise EngineError("No inference server here can run this adapter.")
        self.waiting += 1
        try:
            await self._looked.wait()
        finally:
            self.waiting -= 1


@dataclass(frozen=True, slots=True)
class VersionFolders:
    """A version's `gateway.generation.Folders`."""

    placement: Placement
    digest: str

    def at(self, endpoint: str) -> str | None:
        return self.placement.at(self.digest, endpoint)

    def using(self, endpoint: str) -> contextlib.AbstractContextManager[None]:
        return self.placement.using(self.digest, endpoint)

    async def wait_for_poll(self) -> None:
        await self.placement.looked(self.digest)
