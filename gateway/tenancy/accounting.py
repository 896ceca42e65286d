"""Accounting of requests that generate text.

Before generation starts, the tokens that a request may need are reserved in its tenant's limits. At
the end of the request, the used tokens are charged, the unused tokens are given back, and one usage
record is written. Without tenants and without a usage log, nothing is recorded.
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
from gateway.generation.batch import Batch
from gateway.observability.request_context import RequestContext
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.reservation import Reservation
from gateway.tenancy.usage_log import UsageRecord

# Number of tokens that are reserved at the start of a choice without max_tokens. More tokens are
# reserved while the choice runs. If all tokens that fit into the engine's context were reserved at
# once, most such requests would be refused. A beam search must still reserve all of them: its
# progress is unknown while it runs, and the gateway cannot end it early.
_UNSTATED_TOKENS = 1024
# Interval at which the used tokens of running requests are recorded.
_RECORD_INTERVAL_S = 0.5
# If a running choice without max_tokens has fewer unused reserved tokens than this, more tokens are
# reserved.
_MIN_AHEAD_TOKENS = 128
_CLIENT_ERRORS = (InvalidRequest, ClientDisconnected, ClientDeadline)

log = logging.getLogger(__name__)


class Account:
    """Reserved and used tokens of one request, as an async context manager.

    Generation must run within the context. At the end of the context, the used tokens are charged.

    `quotas` has the usage of the tenant's limits, by name of the limit. The usage includes this
    request. `is_fully_reserved` is True if all tokens that the request may generate are already
    reserved.
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
        is_fully_reserved: bool,
        status_of: Callable[[BaseException | None], int],
    ) -> None:
        self.quotas = reservation.quotas
        self._request_id = request.request_id
        self._batch = batch
        self._route = route
        self._tenant = tenant
        self._reservation = reservation
        self._accounting = accounting
        self._is_fully_reserved = is_fully_reserved
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
        if self._tenant is None and not self._accounting.logs_anonymous:
            return
        batch, meter = self._batch, self._batch.meter
        # True if the request failed because of the service, not because of the client.
        ours = error is not None and not isinstance(error, _CLIENT_ERRORS)
        if isinstance(error, RequestTimeout) and meter.aborted_single_response:
            # A non-streaming response has timed out. Charge the tokens that the engine has
            # generated, as for a stream that sends its tokens before the timeout.
            ours = False
        # If the service has failed before the first token, charge nothing. If the service has
        # failed later, charge the prompts that were sent to the engine, and the tokens that the
        # engine has reported. If the service has not failed, also charge an estimate of unreported
        # tokens: beam searches and non-streaming responses report their tokens only at their end.
        if error is None:
            prompt = batch.prompt_tokens
        else:
            prompt = 0 if ours and not meter.tokens else batch.sent_prompt_tokens
        completion = meter.tokens if ours else meter.tokens + meter.unreported_tokens
        self._reservation.close(prompt + completion)
        lora = self._route.lora
        self._accounting.record(
            UsageRecord(
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
                # Use the monotonic clock, because the system clock may have been set meanwhile.
                ended=round(self._started + time.monotonic() - self._since, 3),
            )
        )

    async def record_usage(self) -> None:
        """Record the tokens used since the last call, and reserve more if necessary.

        Choices without max_tokens get further tokens as long as the tenant's limits allow it. If a
        limit refuses further tokens and few reserved tokens are left, all choices are ended as if
        they had reached max_tokens.
        """
        reservation, meter = self._reservation, self._batch.meter
        # Record nothing before the first token, because a request that the service fails before its
        # first token is not charged. The limits count the reserved tokens until the first token.
        # Beam searches report their first token only at their end.
        if not reservation.counts_tokens or not (tokens := meter.tokens_now):
            return
        used = self._batch.sent_prompt_tokens + tokens
        since_last, self._used = used - self._used, used
        reservation.record_used(used)
        ahead = max(_MIN_AHEAD_TOKENS * len(meter.running), 2 * since_last)
        if (
            self._is_fully_reserved
            or reservation.remaining_tokens(used) >= ahead
            or await reservation.extend(ahead)
        ):
            return
        if reservation.remaining_tokens(used) < since_last:
            for running in [*meter.running]:
                running.cut_short()


class Accounting:
    """Accounts of all requests of this process, and the tenants' limits."""

    def __init__(
        self,
        limits: Limits,
        record: Callable[[UsageRecord], None],
        model: str,
        *,
        logs_anonymous: bool,
        log_problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Create the object. It has no accounts yet.

        Args:
            limits: the tenants' limits.
            record: called with the usage of each admitted request at its end.
            model: the base model's name.
            logs_anonymous: True to also record the usage of requests without a tenant.
            log_problem: returns an error text if the usage log cannot be written, else "".
        """
        self._limits = limits
        self.record = record
        self.logs_anonymous = logs_anonymous
        self.model = model
        self._running: set[object] = set()
        """Accounts of requests that have not ended."""
        self._ended = asyncio.Event()
        self.log_problem = log_problem

    @property
    def counts_alone(self) -> bool:
        """True while this process counts limits without Redis, although Redis is configured."""
        return self._limits.counts_alone

    @property
    def nearly_used(self) -> dict[str, str]:
        """Warning texts for budgets that are at least 80 % used. See `BudgetUsage.nearly_used`."""
        return self._limits.nearly_used

    def report_limits(self, tenant: str) -> dict[LimitName, Quota]:
        """Return the usage of a tenant's limits at the tenant's last request to this process."""
        return self._limits.report(tenant)

    def begin(self, account: object) -> None:
        self._running.add(account)

    def end(self, account: object) -> None:
        self._running.discard(account)
        self._ended.set()

    async def record_usage(self) -> None:
        """Call `Account.record_usage` regularly for all running requests. Run until cancelled."""
        while True:
            await asyncio.sleep(_RECORD_INTERVAL_S)
            try:
                open_accounts = [one for one in self._running if isinstance(one, Account)]
                await asyncio.gather(*[one.record_usage() for one in open_accounts])
            except Exception:  # do not end the loop because of an error in one account
                log.exception("what answers have used could not be booked")

    async def close(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until all requests have ended and their usage is recorded.

        Log an error if requests are still running then.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            left = len(self._running)
            log.error("%d requests have not ended; their usage is not recorded", left)

    async def count(self, tenant: Tenant | None, slots: int = 0) -> Reservation:
        """Count a request in its tenant's limits, before its body is read.

        Args:
            tenant: the request's tenant; None if requests need no key.
            slots: number of slots of `concurrent_requests` that the request takes. The returned
                reservation holds these slots until it is closed. Use the reservation in a `with`
                block.

        Raises:
            RateLimited: a limit is reached.
            LimitsUnavailable: a limit cannot be counted now.
        """
        return await self._limits.count(tenant, slots)

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
        """Reserve the tokens that a request may need, after `count` has counted the request.

        Return the request's account, a context manager. Leaving its context closes the reservation.

        Args:
            request: the request's context.
            batch: the request's generations.
            reservation: the reservation that `count` returned.
            tenant: the request's tenant; None if requests need no key.
            route: the model or adapter.
            stated: True if the client set max_tokens.
            status_of: returns the HTTP status for the error that ended the response; its argument
                is None if there was no error.

        Raises:
            RateLimited: a limit is reached.
            LimitsUnavailable: a limit cannot be counted now.
        """
        wanted = batch.prompt_tokens
        is_fully_reserved = True
        for generation in batch.generations:
            most = generation.max_tokens
            if not stated and not generation.beams and most > _UNSTATED_TOKENS:
                most, is_fully_reserved = _UNSTATED_TOKENS, False
            wanted += most * (generation.beams or 1)
        await reservation.reserve(wanted)
        reservation.detach()
        return Account(
            request,
            batch,
            route=route,
            tenant=tenant,
            reservation=reservation,
            accounting=self,
            is_fully_reserved=is_fully_reserved,
            status_of=status_of,
        )
