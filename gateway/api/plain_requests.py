"""Requests without generation options: their fields, and the names that have no effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.api import ignored
from gateway.api.intake import Intake
from gateway.api.messages import Strict
from gateway.api.parameters import as_written, rules, sort_fields, validate
from gateway.api.request_log import service_of
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request
from gateway.errors import InvalidRequest

M = TypeVar("M", bound=Strict)


class _Names(NamedTuple):
    hints: list[str]
    unknown: list[str]


async def read_plain(
    request: Request,
    intake: Intake,
    model: type[M],
    refuse: Callable[[ValidationError], InvalidRequest] = invalid_request,
) -> tuple[M, dict[str, str]]:
    """Return the JSON body as a model, and the response headers that name ignored parameters.

    Args:
        request: The request that `intake` takes in.
        intake: Reads the body.
        model: Its fields are served; the settings decide about other names.
        refuse: Makes the refusal of a body that does not validate.

    Raises:
        InvalidRequest: A field is malformed, or its name is refused.
        UnsupportedParameter: A field would change the answer and is not served.
    """
    service = service_of(request.scope)
    parse = partial(_parse, model, refuse=refuse, **rules(service.settings))
    wanted, names = await intake.read(parse)
    service.metrics.count_unknown_parameters(names.unknown)
    return wanted, ignored.headers_of([*names.hints, *names.unknown])


def _parse(
    model: type[M],
    body: bytes,
    *,
    refuse: Callable[[ValidationError], InvalidRequest],
    strict: bool,
    refuse_unknown: bool,
) -> tuple[M, _Names]:
    refuse_unknown = strict or refuse_unknown
    given = load_object(body or b"{}")
    fields = sort_fields(model, given, strict=strict, refuse_unknown=refuse_unknown)
    try:
        wanted, nested = validate(model, fields.served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise as_written(refuse(error), fields.renamed) from None
    return wanted, _Names(fields.hints, [*fields.unknown, *nested])
