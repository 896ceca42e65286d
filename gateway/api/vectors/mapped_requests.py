"""Requests to embedding and rerank models: parsing, accounting and execution."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.api import ignored
from gateway.api.auth import authenticate_tenant
from gateway.api.failures import status_of
from gateway.api.intake import Intake
from gateway.api.openai.messages import Strict
from gateway.api.openai.parameters import Parsed, get_rules, restore_client_name, sort_fields
from gateway.api.rate_headers import build_rate_headers
from gateway.api.request_bounds import parse_timeout
from gateway.api.request_log import context_of, service_of
from gateway.api.strict_json import load_object
from gateway.api.validation import build_invalid_request
from gateway.catalog.mapped import C, MappedRouter, ServedModel
from gateway.config.tenants import Tenant
from gateway.pipeline.mapped_inputs import (
    Deadline,
    FittedModel,
    MappedInputs,
    Vectors,
    ask,
    check_length,
    resolve_model,
)
from gateway.service import Service
from gateway.tenancy.input_account import InputAccount


class MappedRequest(Strict):
    """Base class of requests to embedding and rerank models."""

    model: str


W = TypeVar("W", bound=MappedRequest)


@dataclass(slots=True)
class MappedCall(Generic[W, C]):
    """A request for embeddings or reranking whose inputs are tokenized.

    Enter the context manager `account` before calling the model.
    """

    service: Service
    request: Request
    tenant: Tenant | None
    wanted: W
    model: ServedModel[C]
    inputs: MappedInputs
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

    async def find_model(self, param: str) -> FittedModel:
        """Return the model with its configuration in Triton.

        Raise InvalidRequest if an input is too long for the model.
        """
        found = await resolve_model(self.service, self.model, self.deadline)
        check_length(found, self.inputs, param)
        return found

    async def run(self, found: FittedModel) -> list[Vectors]:
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


async def prepare_call(
    request: Request,
    kind: type[W],
    router: Callable[[Service], MappedRouter[C]],
    inputs: Callable[[Service, ServedModel[C], W, str], Awaitable[MappedInputs]],
) -> MappedCall[W, C]:
    """Read and parse a request, tokenize its inputs, and reserve their tokens.

    Raise errors that are listed in `failures.TABLE`.

    Args:
        request: the HTTP request.
        kind: the pydantic model of the request's body.
        router: function that returns the service's router of embedding or of rerank models.
        inputs: function that checks and tokenizes the inputs of the request.
    """
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    deadline = Deadline.after(
        parse_timeout(request, service.settings.request_timeout), service.settings.request_timeout
    )
    name = tenant.name if tenant else ""
    async with Intake(request, tenant) as intake:
        # Refuse a request above the tenant's limits before its body is read.
        with await service.accounting.count(tenant, slots=1) as reservation:
            read = partial(parse, kind, **get_rules(service.settings))
            wanted, hints, unknown = await intake.read(read)
            service.metrics.count_unknown_parameters(unknown, name)
            model = service.access.route(router(service), tenant, wanted.model)
            context = context_of(request.scope)
            context.model = model.name
            ready = await inputs(service, model, wanted, name)
            if model.tokenizer is not None:
                context.prompt_tokens = ready.total
                await reservation.reserve(ready.total)
            # Detach the reservation from this `with` block, because the account releases it when
            # the caller closes the account. After this line, no code may raise an error or wait:
            # the reservation would never be released.
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
            return MappedCall(
                service=service,
                request=request,
                tenant=tenant,
                wanted=wanted,
                model=model,
                inputs=ready,
                account=account,
                deadline=deadline,
                headers=build_rate_headers(reservation.quotas) | ignored.build_headers(hints),
                id=request_id,
            )


def parse(
    kind: type[W], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[W]:
    """Parse and validate a JSON body. A parameter that is null counts as unset.

    Raise InvalidRequest for a malformed or refused parameter; the error names it. Unknown members
    of an input, such as a document, are always refused: such a member may be content that the model
    should read.
    """
    given = {name: value for name, value in load_object(body).items() if value is not None}
    fields = sort_fields(kind, given, strict=strict, refuse_unknown=strict or refuse_unknown)
    try:
        request = kind.model_validate(fields.served)
    except ValidationError as error:
        raise restore_client_name(build_invalid_request(error), fields.renamed) from None
    return Parsed(request, (*fields.hints, *fields.unknown), tuple(fields.unknown))
