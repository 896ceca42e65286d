"""What a request costs that generates nothing: the tokens of its inputs, where they are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from gateway.config.tenants import Tenant
from gateway.errors import ClientDeadline, ClientDisconnected, InvalidRequest
from gateway.observability.request_context import RequestContext
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.limits.reservation import Reservation
from gateway.tenancy.usage_log import Usage

_BY_THE_CLIENT = (InvalidRequest, ClientDisconnected, ClientDeadline)


class InputAccount:
    """One request's. Enter it when models may be asked, leave it when the answer is there.

    `sent` is to be told of the tokens that a model is given. Whoever breaks off pays for those;
    what fails by us costs nothing.
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
        """`request_id` is part of the answer's own, as far as that has one."""
        self._accounting = accounting
        self._request = request
        self._reservation = reservation
        self._id = request_id
        self._tenant = tenant
        self._model = model
        self._status_of = status_of
        self._sent = 0
        self._started = time.time()
        self._since = time.monotonic()

    def sent(self, tokens: int) -> None:
        self._sent += tokens

    async def __aenter__(self) -> None:
        self._accounting.begin(self)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._accounting.end(self)
        ours = error is not None and not isinstance(error, _BY_THE_CLIENT)
        used = 0 if ours else self._sent
        self._reservation.close(used)
        if self._tenant is None and not self._accounting.logged:
            return
        self._accounting.record(
            Usage(
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
