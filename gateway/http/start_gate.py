"""Decision for each request if it begins at once, waits, or is refused, by the event loop's load.

See decision 056 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from gateway.http.exchange import Exchange
from gateway.http.known_heads import KnownHeads
from gateway.scheduling.start_queue import StartQueue, work_of


class RefusalAnswer(NamedTuple):
    """Complete answer to a refused request; the arguments of `Exchange.answer`."""

    status: int
    header_lines: bytes
    body: bytes


class Door(Protocol):
    """The application's decisions about requests that arrive while the event loop is busy."""

    def may_wait(self, scope: dict[str, Any]) -> bool:
        """Return False for a request that must begin at once and is never refused."""

    def name_tenant(self, fields: Mapping[bytes, bytes]) -> str:
        """Return the name of the tenant whose key is in these headers; "" without a known key."""

    def refuse(
        self, path: str, fields: Mapping[bytes, bytes], tenant: str, wait_s: float
    ) -> RefusalAnswer:
        """Return the answer to a refused request, and count the refusal.

        Args:
            path: the request's path.
            fields: the request's headers by lower-case name.
            tenant: the tenant's name, as `name_tenant` returns it.
            wait_s: seconds that the request would have to wait.
        """


class StartGate:
    """Gate through which all requests of one process pass before they begin."""

    def __init__(self, starts: StartQueue, door: Door) -> None:
        self._starts = starts
        self._door = door
        self._heads = KnownHeads()

    @property
    def is_busy(self) -> bool:
        """True while requests wait in the start queue, so that further ones may be refused."""
        return self._starts.waiting > 0

    def refuse_known(self, data: bytes) -> RefusalAnswer | None:
        """Return the answer to the request in `data` if it must be refused and its head is cached.

        Otherwise return None; the request must then be parsed.
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
        """Begin a request, queue it, or refuse it.

        Args:
            scope: the ASGI scope of the request.
            exchange: the exchange of the request, to which a refusal is written.
            begin: begins the request; returns False if its client has disconnected.
            read: received bytes, from the first byte of the request; empty if unknown.
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
