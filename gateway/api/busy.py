"""Refusal of requests while the event loop is overloaded.

A refusal must cost much less than an answer. So nothing here reads a body or writes a log line.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from random import getrandbits
from typing import Any

from gateway.api import failures
from gateway.api.anthropic import error_envelope as anthropic
from gateway.api.auth import credentials_in
from gateway.api.envelopes import is_anthropic
from gateway.api.request_log import find_own_id
from gateway.errors import OverloadCause, Overloaded
from gateway.http.exchange import OVER_CONNECTION_LIMIT
from gateway.http.start_gate import RefusalAnswer
from gateway.service import Service

_CAUSE: OverloadCause = "core_busy"
_COUNT_INTERVAL_S = 0.1


class BusyDoor:
    """Builder of error responses for requests that are refused while the event loop is overloaded.

    This class implements the protocol `http.start_gate.Door`. It also counts the refused requests
    of its process.
    """

    def __init__(
        self,
        paths: Collection[str],
        origins: Collection[str],
        exposed: str,
        service: Callable[[], Service],
    ) -> None:
        """Create the builder.

        Args:
            paths: the paths of POST requests that may wait or be refused while the event loop is
                busy. All other requests start at once.
            origins: the origins whose browser pages may read an error response; `*` for all.
            exposed: the names of response headers that those pages may read, comma-separated.
            service: function that returns the service.
        """
        self._paths = frozenset(paths)
        self._origins = frozenset(origins)
        self._exposed = exposed.encode()
        self._service = service
        self._refused = Counter[tuple[str, str]]()

    def may_wait(self, scope: dict[str, Any]) -> bool:
        return (
            scope["path"] in self._paths
            and scope["method"] == "POST"
            and OVER_CONNECTION_LIMIT not in scope["extensions"]
        )

    def name_tenant(self, fields: Mapping[bytes, bytes]) -> str:
        return self._service().access.find_tenant_name(credentials_in(fields))

    def refuse(
        self, path: str, fields: Mapping[bytes, bytes], tenant: str, wait_s: float
    ) -> RefusalAnswer:
        self._note(path, tenant)
        answer = _answer(max(1, math.ceil(wait_s)), is_anthropic=is_anthropic(path, fields))
        # Use fast random numbers: no data is stored under this id, so the id may be guessable.
        # Random numbers of the operating system would take longer than the rest of the refusal.
        own_id = find_own_id(fields) or b"%032x" % getrandbits(128)
        lines = b"%bx-request-id: %b\r\n%b" % (answer.header_lines, own_id, self._cors(fields))
        return RefusalAnswer(answer.status, lines, answer.body)

    def _note(self, path: str, tenant: str) -> None:
        if not self._refused:
            asyncio.get_running_loop().call_later(_COUNT_INTERVAL_S, self.count)
        self._refused[path, tenant] += 1

    def count(self) -> None:
        """Add the refused requests to the metrics, and reset their count.

        Updating the metrics at each refusal would take a third of the time that a refusal takes.
        """
        service = self._service()
        for (path, tenant), refused in self._refused.items():
            service.metrics.requests.labels(path, "503").inc(refused)
            service.metrics.queue_refusals.labels(tenant, _CAUSE).inc(refused)
            service.monitor.count_busy(tenant, _CAUSE, refused)
        self._refused.clear()

    def _cors(self, fields: Mapping[bytes, bytes]) -> bytes:
        """Return the CORS header lines with which pages of allowed origins can read the refusal."""
        origin = fields.get(b"origin")
        if origin is None or not self._origins:
            return b""
        lines = b"vary: Origin\r\naccess-control-expose-headers: %b\r\n" % self._exposed
        if "*" in self._origins:
            lines += b"access-control-allow-origin: *\r\n"
        elif origin.decode("latin-1") in self._origins:
            lines += b"access-control-allow-origin: %b\r\n" % origin
        return lines


@lru_cache(maxsize=256)
def _answer(wait_s: int, *, is_anthropic: bool) -> RefusalAnswer:
    error = Overloaded(
        f"Too many requests wait for this gateway to begin with them; try again in {wait_s} s.",
        wait_s,
        _CAUSE,
    )
    envelope = anthropic.build_envelope if is_anthropic else failures.build_envelope
    status, headers, body = failures.build_response(error, envelope)
    headers |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return RefusalAnswer(status, lines.encode("ascii"), body)
