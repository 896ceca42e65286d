"""Accounting of embedding and ranking requests, whose input tokens are charged."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from gateway.config.tenants import Tenant
from gateway.errors import ClientDeadline, ClientDisconnected, InvalidRequest
from gateway.observability.request_context import RequestContext
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.limits.reservation import Reservation
from gateway.tenancy.usage_log import UsageRecord

_CLIENT_ERRORS = (InvalidRequest, ClientDisconnected, ClientDeadline)


class InputAccount:
    """Input tokens of one request that its tenant is charged for, as an async context manager.

    All calls of a model for the request must be made within the context. After each call,
    `add_sent_tokens` counts the tokens that were sent to the model. If the client aborts the
    request, the tokens sent so far are charged. If the service causes a failure, nothing is
    charged.
    """

    def __init__(
        self,
        accounting: Accounting,
        request: RequestContext,
        reservation: Reservation,
        *,
        request_id: str,
        tenant: Tenant | None,
        model: str,
        status_of: Callable[[BaseException | None], int],
    ) -> None:
        """Create the account. Entering the context starts it.

        Args:
            accounting: the accounts of all requests of this process.
            request: the request's context.
            reservation: the slots and tokens of the tenant's limits that the request holds.
            request_id: id of the usage record. The response's id, if any, contains this id.
            tenant: the request's tenant; None if requests need no key.
            model: name of the embedding or ranking model.
            status_of: returns the HTTP status for the error that ended the request; its argument is
                None if there was no error.
        """
        self._accounting = accounting
        self._request = request
        self._reservation = reservation
        self._id = request_id
        self._tenant = tenant
        self._model = model
        self._status_of = status_of
        self._sent_tokens = 0
        self._started = time.time()
        self._since = time.monotonic()

    def add_sent_tokens(self, tokens: int) -> None:
        """Count tokens that were sent to a model."""
        self._sent_tokens += tokens

    async def __aenter__(self) -> None:
        self._accounting.begin(self)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._accounting.end(self)
        ours = error is not None and not isinstance(error, _CLIENT_ERRORS)
        used = 0 if ours else self._sent_tokens
        self._reservation.close(used)
        if self._tenant is None and not self._accounting.logs_anonymous:
            return
        self._accounting.record(
            UsageRecord(
                id=self._id,
                request_id=self._request.request_id,
                tenant=self._tenant.name if self._tenant else None,
                model=self._model,
                adapter=None,
                adapter_version=None,
                prompt_tokens=used,
                cached_tokens=0,
                completion_tokens=0,
                status=self._status_of(error),
                finish=(),
                started=round(self._started, 3),
                ended=round(self._started + time.monotonic() - self._since, 3),
            )
        )
