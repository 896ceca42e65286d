"""A request to a model that answers once: read, counted and asked, whatever its endpoint."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.api import ignored
from gateway.api.auth import tenant_of
from gateway.api.failures import status_of
from gateway.api.intake import Intake
from gateway.api.messages import Strict
from gateway.api.parameters import Parsed, as_written, rules, sort_fields
from gateway.api.rate_headers import rate_headers
from gateway.api.request_log import context_of, service_of
from gateway.api.serving import timeout_of
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request
from gateway.catalog.mapped import C, MappedRouter, ServedModel
from gateway.config.tenants import Tenant
from gateway.pipeline.mapped import (
    Deadline,
    Found,
    Inputs,
    Vectors,
    ask,
    check_length,
    mapped_model,
)
from gateway.service import Service
from gateway.tenancy.input_account import InputAccount


class MappedRequest(Strict):
    model: str


W = TypeVar("W", bound=MappedRequest)


@dataclass(slots=True)
class Asking(Generic[W, C]):
    """A request whose inputs are ready. Within `account` its model may be asked."""

    service: Service
    request: Request
    tenant: Tenant | None
    wanted: W
    model: ServedModel[C]
    inputs: Inputs
    account: InputAccount
    deadline: Deadline
    headers: dict[str, str]
    id: str

    @property
    def tenant_name(self) -> str:
        return self.tenant.name if self.tenant else ""

    @property
    def priority(self) -> int:
        return self.tenant.priority if self.tenant else 0

    async def found(self, param: str) -> Found:
        """The model as Triton has it, which all inputs fit."""
        found = await mapped_model(self.service, self.model, self.deadline)
        check_length(found, self.inputs, param)
        return found

    async def rows(self, found: Found) -> list[Vectors]:
        return await ask(
            self.service,
            context_of(self.request.scope),
            self.model,
            found,
            self.inputs,
            self.account,
            self.deadline,
            tenant=self.tenant_name,
            priority=self.priority,
        )


async def asking(
    request: Request,
    kind: type[W],
    router: Callable[[Service], MappedRouter[C]],
    inputs: Callable[[Service, ServedModel[C], W, str], Awaitable[Inputs]],
) -> Asking[W, C]:
    """Raises what the table of `failures` has rows for."""
    service = service_of(request.scope)
    tenant = tenant_of(request)
    deadline = Deadline.of(
        timeout_of(request, service.settings.request_timeout), service.settings.request_timeout
    )
    name = tenant.name if tenant else ""
    async with Intake(request, tenant) as intake:
        # One too many is refused before anything is read or worked out for it.
        with await service.accounting.count(tenant, slots=1) as reservation:
            read = partial(parse, kind, **rules(service.settings))
            wanted, hints, unknown = await intake.read(read)
            service.metrics.count_unknown_parameters(unknown, name)
            model = service.access.route(router(service), tenant, wanted.model)
            context = context_of(request.scope)
            context.model = model.name
            ready = await inputs(service, model, wanted, name)
            if model.tokenizer is not None:
                context.prompt_tokens = ready.total
                await reservation.reserve(ready.total)
            # The last thing that may fail or wait: from here on the account is sure to be closed.
            reservation.detach()
            request_id = secrets.token_hex(16)
            account = InputAccount(
                service.accounting,
                context,
                reservation,
                request_id=request_id,
                tenant=tenant,
                model=model.name,
                status_of=status_of,
            )
            return Asking(
                service=service,
                request=request,
                tenant=tenant,
                wanted=wanted,
                model=model,
                inputs=ready,
                account=account,
                deadline=deadline,
                headers=rate_headers(reservation.quotas) | ignored.headers_of(hints),
                id=request_id,
            )


def parse(
    kind: type[W], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[W]:
    """Validate a JSON body. null means unset. Raises InvalidRequest naming the parameter.

    Members of an input are content, so an unknown name among them is refused in any case.
    """
    given = {name: value for name, value in load_object(body).items() if value is not None}
    fields = sort_fields(kind, given, strict=strict, refuse_unknown=strict or refuse_unknown)
    try:
        request = kind.model_validate(fields.served)
    except ValidationError as error:
        raise as_written(invalid_request(error), fields.renamed) from None
    return Parsed(request, (*fields.hints, *fields.unknown), tuple(fields.unknown))
