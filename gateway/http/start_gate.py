"""Decides for each request whether it begins, waits or is refused while the event loop is busy.

See decision 056 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from gateway.http.exchange import Exchange
from gateway.http.known_heads import KnownHeads
from gateway.scheduling.start_queue import StartQueue, work_of


class RefusalAnswer(NamedTuple):
    """A complete answer, in the arguments of `Exchange.answer`."""

    status: int
    header_lines: bytes
    body: bytes


class Door(Protocol):
    """The application's part in requests that find the event loop busy."""

    def may_wait(self, scope: dict[str, Any]) -> bool:
        """Return False for a request that is always answered."""

    def name_tenant(self, fields: Mapping[bytes, bytes]) -> str:
        """Return the tenant's name that the key in these headers leads to; empty for strangers."""

    def refuse(
        self, path: str, fields: Mapping[bytes, bytes], tenant: str, wait_s: float
    ) -> RefusalAnswer:
        """Count a request that would wait for too long, and return its answer."""


class StartGate:
    """The gate of all connections of one process."""

    def __init__(self, starts: StartQueue, door: Door) -> None:
        self._starts = starts
        self._door = door
        self._heads = KnownHeads()

    @property
    def is_busy(self) -> bool:
        """Return True while requests wait, so that further ones may be refused."""
        return self._starts.waiting > 0

    def refuse_known(self, data: bytes) -> RefusalAnswer | None:
        """Return the answer to `data` if that is one request to be refused, by its head.

        Return None if the head is not known, or if the request need not be refused: it is then to
        be parsed.
        """
        found = self._heads.find(data)
        if found is None:
            return None
        head, length = found
        tenant = self._door.name_tenant(head.fields)
        wait_s = self._starts.find_refusal(tenant, work_of(length))
        if wait_s is None:
            return None
        return self._door.refuse(head.path, head.fields, tenant, wait_s)

    def pass_on(
        self,
        scope: dict[str, Any],
        exchange: Exchange,
        begin: Callable[[], bool],
        read: bytes,
    ) -> None:
        """Begin with a request, queue it, or refuse it.

        Args:
            scope: the request.
            exchange: takes the answer of a refused request.
            begin: begins with it; returns False if its client has left.
            read: all bytes of its connection from its first byte on, or nothing if unknown.
        """
        if not self._door.may_wait(scope):
            begin()
            return
        fields = exchange.fields
        length = fields.get(b"content-length", b"")
        work = work_of(int(length) if length.isdigit() else None)
        if self._starts.try_begin(work):
            begin()
            return
        tenant = self._door.name_tenant(fields)
        wait_s = self._starts.wait(tenant, work, begin)
        if wait_s is None:
            return
        if read and exchange.keep_alive:
            self._heads.add(read, scope["path"], fields)
        exchange.answer(*self._door.refuse(scope["path"], fields, tenant, wait_s))
