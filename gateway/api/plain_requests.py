"""Parsing of requests that do not generate text.

The endpoints /tokenize, /detokenize and /v1/conversations receive such requests. Unknown fields are
handled as in requests that generate text: ignored and reported, or refused.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.api import ignored
from gateway.api.intake import Intake
from gateway.api.openai.messages import Strict
from gateway.api.openai.parameters import (
    Parsed,
    get_rules,
    restore_client_name,
    sort_fields,
    validate,
)
from gateway.api.request_log import context_of, service_of
from gateway.api.strict_json import load_object
from gateway.api.validation import build_invalid_request

M = TypeVar("M", bound=Strict)


async def read_plain(
    request: Request,
    intake: Intake,
    model: type[M],
) -> tuple[M, dict[str, str]]:
    """Return the JSON body as a model, and the response headers that name ignored parameters.

    Args:
        request: The HTTP request.
        intake: The reader of the request's body.
        model: The pydantic model of the body. The settings decide if unknown fields are refused.

    Raises:
        InvalidRequest: A field is malformed, or its name is refused.
        UnsupportedParameter: A field would change the answer and is not served.
    """
    service = service_of(request.scope)
    parsed = await intake.read(partial(_parse, model, **get_rules(service.settings)))
    tenant = context_of(request.scope).tenant or ""
    service.metrics.count_unknown_parameters(parsed.unknown, tenant)
    return parsed.request, ignored.build_headers(parsed.hints)


def _parse(
    model: type[M],
    body: bytes,
    *,
    strict: bool,
    refuse_unknown: bool,
) -> Parsed[M]:
    refuse_unknown = strict or refuse_unknown
    given = load_object(body or b"{}")
    fields = sort_fields(model, given, strict=strict, refuse_unknown=refuse_unknown)
    try:
        wanted, nested = validate(model, fields.served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise restore_client_name(build_invalid_request(error), fields.renamed) from None
    unknown = (*fields.unknown, *nested)
    return Parsed(wanted, (*fields.hints, *unknown), unknown)
