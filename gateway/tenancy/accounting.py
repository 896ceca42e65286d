"""What a request costs: reserved before it starts, and settled, counted and logged once at its end.

With neither tenants nor a usage log nothing of this happens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

from gateway.catalog.router import Route
from gateway.config.tenants import Tenant
from gateway.errors import ClientDisconnected, InvalidRequest
from gateway.generation import Batch
from gateway.observability.request_context import RequestContext
from gateway.tenancy.limits.limits import Limits, Reservation
from gateway.tenancy.usage_log import Usage

# Of a choice whose request names no max_tokens: reserving all that the context has room for would
# refuse most of them. What is really used is settled in any case.
_UNSTATED_TOKENS = 1024

log = logging.getLogger(__name__)


class Account:
    """One request's. Enter it when generation may begin, leave it when the answer has ended.

    `quotas` are the tenant's limits per minute, by name, with this request counted.
    """

    def __init__(
        self,
        request: RequestContext,
        batch: Batch,
        *,
        route: Route,
        tenant: Tenant | None,
        reservation: Reservation,
        accounting: Accounting,
        status_of: Callable[[BaseException | None], int],
    ) -> None:
        self.quotas = reservation.quotas
        self._request_id = request.request_id
        self._batch = batch
        self._route = route
        self._tenant = tenant
        self._reservation = reservation
        self._accounting = accounting
        self._status_of = status_of
        self._started = time.time()

    async def __aenter__(self) -> None:
        self._accounting.begin()

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._accounting.end()
        if self._tenant is None and not self._accounting.logged:
            return
        batch, meter = self._batch, self._batch.meter
        # An engine that was never asked, or failed before the first token, has given nothing that
        # could be charged.
        ours = error is not None and not isinstance(error, InvalidRequest | ClientDisconnected)
        charged = meter.began and (meter.tokens or not ours)
        prompt = batch.prompt_tokens if charged else 0
        self._reservation.settle(prompt + meter.tokens)
        lora = self._route.lora
        self._accounting.record(
            Usage(
                id=batch.request_id,
                request_id=self._request_id,
                tenant=self._tenant.name if self._tenant else None,
                model=self._accounting.model,
                adapter=lora.name if lora else None,
                adapter_version=self._route.version,
                prompt_tokens=prompt,
                cached_tokens=min(prompt, (meter.reused_blocks or 0) * batch.tokens_per_block),
                completion_tokens=meter.tokens,
                status=self._status_of(error),
                finish=tuple(meter.finished),
                started=round(self._started, 3),
                ended=round(time.time(), 3),
            )
        )


class Accounting:
    """Opens accounts. `record` gets the usage of each tenant's request that was let in."""

    def __init__(
        self, limits: Limits, record: Callable[[Usage], None], model: str, *, logged: bool
    ) -> None:
        """`model` is the base model's name; `logged` says to record what no tenant uses, too."""
        self._limits = limits
        self.record = record
        self.logged = logged
        self.model = model
        self._running = 0
        self._ended = asyncio.Event()

    def begin(self) -> None:
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        self._ended.set()

    async def close(self, within_s: float) -> None:
        """Waits, but not for long, for requests that are just ending."""
        try:
            async with asyncio.timeout(within_s):
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            log.error("%d requests have not ended; their usage is not recorded", self._running)

    async def open(
        self,
        request: RequestContext,
        batch: Batch,
        *,
        tenant: Tenant | None,
        route: Route,
        stated: bool,
        status_of: Callable[[BaseException | None], int],
    ) -> Account:
        """`stated` says whether the client named a limit of tokens.

        `status_of` is asked for the HTTP status of what the answer ends with, for the usage record.

        Raises RateLimited, and LimitsUnavailable.
        """
        wanted = batch.prompt_tokens
        for generation in batch.generations:
            most = generation.max_tokens
            wanted += (most if stated else min(most, _UNSTATED_TOKENS)) * (generation.beams or 1)
        reservation = await self._limits.reserve(tenant, wanted)
        return Account(
            request,
            batch,
            route=route,
            tenant=tenant,
            reservation=reservation,
            accounting=self,
            status_of=status_of,
        )
