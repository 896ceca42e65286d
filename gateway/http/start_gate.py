"""Gate that starts, queues or refuses each request, depending on the load of the event loop.

See decision 056 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from gateway.http.exchange import Exchange
from gateway.http.known_heads import KnownHeads
from gateway.scheduling.start_queue import StartQueue, work_of


class RefusalAnswer(NamedTuple):
    """Complete response to a refused request. The fields are the arguments of `Exchange.answer`."""

    status: int
    header_lines: bytes
    body: bytes


class Door(Protocol):
    """Interface by which the application decides which requests wait or are refused under load."""

    def may_wait(self, scope: dict[str, Any]) -> bool:
        """Return True if a request may be queued or refused.

        Return False for a request that must always start at once. `scope` is its ASGI scope.
        """

    def name_tenant(self, fields: Mapping[bytes, bytes]) -> str:
        """Return the name of the tenant whose API key is in the headers.

        Return "" if there is no key or if the key is unknown.
        """

    def refuse(
        self, path: str, fields: Mapping[bytes, bytes], tenant: str, wait_s: float
    ) -> RefusalAnswer:
        """Return the response to a refused request, and count the refusal.

        Args:
            path: the request's path.
            fields: the request's headers by lower-case name.
            tenant: the tenant's name, as returned by `name_tenant`.
            wait_s: expected seconds that the request would have to wait in the start queue.
        """


class StartGate:
    """Gate of one process that starts, queues or refuses each request.

    The gate caches the heads (request line and headers) of refused requests. If the head of a new
    request is in this cache, `refuse_known` can refuse the request without parsing it.
    """

    def __init__(self, starts: StartQueue, door: Door) -> None:
        self._starts = starts
        self._door = door
        self._heads = KnownHeads()

    @property
    def is_busy(self) -> bool:
        """True while requests wait in the start queue. Only then are new requests refused."""
        return self._starts.waiting > 0

    def refuse_known(self, data: bytes) -> RefusalAnswer | None:
        """Return a refusal for the unparsed request in `data`.

        Return None if the head of the request is not cached, or if the request need not be refused.
        The caller must then parse the request.
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
        """Start a request at once, add it to the start queue, or refuse it.

        Args:
            scope: the ASGI scope of the request.
            exchange: the HTTP request and its response, to send a refusal.
            begin: starts the request. Returns False if the client has disconnected.
            read: received bytes, starting with the first byte of the request. If empty, the head of
                a refused request is not cached.
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
