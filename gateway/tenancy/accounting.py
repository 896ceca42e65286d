"""What a request costs: counted, reserved before it starts, settled and logged once at its end.

With neither tenants nor a usage log nothing of this happens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

from gateway.catalog.router import Route
from gateway.config.limits import LimitName
from gateway.config.tenants import Tenant
from gateway.errors import (
    ClientDeadline,
    ClientDisconnected,
    InvalidRequest,
    Quota,
    RequestTimeout,
)
from gateway.generation import Batch
from gateway.observability.request_context import RequestContext
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.reservation import Reservation
from gateway.tenancy.usage_log import Usage

# Of a choice whose request names no max_tokens: reserving all that the context has room for would
# refuse most of them. (A beam search is: nobody can say how far one is, nor end it early.)
_UNSTATED_TOKENS = 1024
# How often what answers have used is looked at, and how many tokens of each are reserved ahead.
_BOOKING_S = 0.5
_LEAST_AHEAD = 128
_BY_THE_CLIENT = (InvalidRequest, ClientDisconnected, ClientDeadline)

log = logging.getLogger(__name__)


class Account:
    """One request's. Enter it when generation may begin, leave it when the answer has ended.

    `quotas` are the tenant's limits per minute, by name, with this request counted.
    `reserved_whole` says whether all that it may generate is reserved.
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
        reserved_whole: bool,
        status_of: Callable[[BaseException | None], int],
    ) -> None:
        self.quotas = reservation.quotas
        self._request_id = request.request_id
        self._batch = batch
        self._route = route
        self._tenant = tenant
        self._reservation = reservation
        self._accounting = accounting
        self._reserved_whole = reserved_whole
        self._used = 0
        self._status_of = status_of
        self._started = time.time()
        self._since = time.monotonic()

    async def __aenter__(self) -> None:
        self._accounting.begin(self)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._accounting.end(self)
        if self._tenant is None and not self._accounting.logged:
            return
        batch, meter = self._batch, self._batch.meter
        # Not where the client has made the answer end so.
        ours = error is not None and not isinstance(error, _BY_THE_CLIENT)
        if isinstance(error, RequestTimeout) and meter.aborted_single_response:
            ours = False  # the engine worked for it, as for a stream whose tokens had come
        # What fails by us before the first token has given nothing that could be charged. Whoever
        # breaks off pays for what the engine was given, and for the searches that it was in.
        if error is None:
            prompt = batch.prompt_tokens
        else:
            prompt = 0 if ours and not meter.tokens else batch.sent_prompt_tokens
        completion = meter.tokens if ours else meter.tokens + meter.unreported_tokens
        self._reservation.close(prompt + completion)
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
                cached_tokens=min(prompt, meter.reused_tokens or 0),
                completion_tokens=completion,
                status=self._status_of(error),
                finish=tuple(meter.finished),
                started=round(self._started, 3),
                # The clock may have been set meanwhile.
                ended=round(self._started + time.monotonic() - self._since, 3),
            )
        )

    async def keep_books(self) -> None:
        """Books what has been used since the last time.

        An answer without a limit of tokens goes on beyond what was reserved for it as long as its
        tenant's minute has room for more, and ends there as it would at a limit.
        """
        reservation, meter = self._reservation, self._batch.meter
        # What fails before the first token is charged nothing, and a beam search tells of its
        # tokens at its end alone. What is reserved counts as long as it may be used.
        if not reservation.counts_tokens or not (tokens := meter.tokens_now):
            return
        used = self._batch.sent_prompt_tokens + tokens
        since_last, self._used = used - self._used, used
        reservation.book(used)
        ahead = max(_LEAST_AHEAD * len(meter.running), 2 * since_last)
        if (
            self._reserved_whole
            or reservation.left(used) >= ahead
            or await reservation.extend(ahead)
        ):
            return
        if reservation.left(used) < since_last:
            for running in [*meter.running]:
                running.cut_short()


class Accounting:
    """Opens accounts. `record` gets the usage of each tenant's request that was let in."""

    def __init__(
        self,
        limits: Limits,
        record: Callable[[Usage], None],
        model: str,
        *,
        logged: bool,
        log_problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Open no account yet.

        Args:
            limits: the tenants' limits.
            record: gets the usage of each request.
            model: the base model's name.
            logged: record the requests without a tenant, too.
            log_problem: returns why the usage log cannot be written, "" if it can.
        """
        self._limits = limits
        self.record = record
        self.logged = logged
        self.model = model
        self._running: set[object] = set()
        """The accounts of requests that are not over."""
        self._ended = asyncio.Event()
        self.log_problem = log_problem

    @property
    def counts_alone(self) -> bool:
        """See `Limits.counts_alone`."""
        return self._limits.counts_alone

    @property
    def nearly_used(self) -> dict[str, str]:
        """See `Standings.nearly_used`."""
        return self._limits.nearly_used

    def used(self, tenant: str) -> dict[LimitName, Quota]:
        """See `Limits.told`."""
        return self._limits.told(tenant)

    def begin(self, account: object) -> None:
        self._running.add(account)

    def end(self, account: object) -> None:
        self._running.discard(account)
        self._ended.set()

    async def keep_books(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_BOOKING_S)
            try:
                open_accounts = [one for one in self._running if isinstance(one, Account)]
                await asyncio.gather(*[one.keep_books() for one in open_accounts])
            except Exception:  # whatever is wrong with one of them, this must go on
                log.exception("what answers have used could not be booked")

    async def close(self, within_s: float) -> None:
        """Waits, but not for long, for requests that are just ending."""
        try:
            async with asyncio.timeout(within_s):
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            left = len(self._running)
            log.error("%d requests have not ended; their usage is not recorded", left)

    async def count(self, tenant: Tenant | None, places: int = 0) -> Reservation:
        """Counts a request before its body is read.

        `places` are those of `concurrent_requests` that it takes, which the reservation holds until
        it is closed; to be used in a `with`. Raises RateLimited, and LimitsUnavailable.
        """
        return await self._limits.count(tenant, places)

    async def open(
        self,
        request: RequestContext,
        batch: Batch,
        reservation: Reservation,
        *,
        tenant: Tenant | None,
        route: Route,
        stated: bool,
        status_of: Callable[[BaseException | None], int],
    ) -> Account:
        """Reserves the tokens of a request that was counted; its account closes the reservation.

        `stated` says whether the client named a limit of tokens. `status_of` is asked for the HTTP
        status of what the answer ends with, for the usage record.

        Raises RateLimited, and LimitsUnavailable.
        """
        wanted = batch.prompt_tokens
        reserved_whole = True
        for generation in batch.generations:
            most = generation.max_tokens
            if not stated and not generation.beams and most > _UNSTATED_TOKENS:
                most, reserved_whole = _UNSTATED_TOKENS, False
            wanted += most * (generation.beams or 1)
        await reservation.reserve(wanted)
        reservation.keep()
        return Account(
            request,
            batch,
            route=route,
            tenant=tenant,
            reservation=reservation,
            accounting=self,
            reserved_whole=reserved_whole,
            status_of=status_of,
        )
