"""List of models in Anthropic's format, for requests with the header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from fastapi import Request

from gateway.api.answer_schemas import AnswerModel
from gateway.api.queries import describe_parameter, parse_int
from gateway.errors import InvalidRequest

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
MAX_SHOWN_CHARS = 200
Lifecycle = Literal["active", "deprecated", "retired"]

# The OpenAPI document does not restrict these parameters' types: without the header
# `anthropic-version`, any value is accepted.
PAGE = [
    describe_parameter("limit", f"With `anthropic-version`: models a page, 1 to {MAX_LIMIT}."),
    describe_parameter("after_id", "With `anthropic-version`: the model in front of the page."),
    describe_parameter("before_id", "With `anthropic-version`: the model behind the page."),
]
"""OpenAPI descriptions of the query parameters that select a page."""


class ModelInfo(AnswerModel):
    """A model. `max_input_tokens` limits prompt and output together; null if it is unknown."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Lifecycle = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None
    capabilities: None = None
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(AnswerModel):
    """A page of models. `first_id` and `last_id` are null for an empty page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def describe(name: str, created: int, *, context: int | None, generates: bool) -> ModelInfo:
    """Return a model in the format of Anthropic's API.

    Args:
        name: The id, which is the display name as well.
        created: A Unix time in seconds.
        context: The context length in tokens.
        generates: True if the model generates text, so that Messages requests may name it.
    """
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=context,
        max_tokens=context if generates else None,
    )


def select_page(request: Request, models: Sequence[ModelInfo]) -> ModelPage:
    """Return the page of models that the request's query asks for.

    Raise InvalidRequest for a wrong query parameter.
    """
    query = request.query_params
    limit = parse_int(request, "limit", minimum=1, maximum=MAX_LIMIT) or DEFAULT_LIMIT
    if not _includes_active([*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]):
        models = []
    after, before = query.get("after_id"), query.get("before_id")
    if after and before:
        raise InvalidRequest("before_id and after_id exclude each other.", param="before_id")
    if before:
        end = _find_position(models, "before_id", before)
        start = max(0, end - limit)
        more = start > 0
    else:
        start = _find_position(models, "after_id", after) + 1 if after else 0
        end = start + limit
        more = end < len(models)
    data = [*models[start:end]]
    ends: dict[str, Any] = {"first_id": None, "last_id": None}
    if data:
        ends = {"first_id": data[0].id, "last_id": data[-1].id}
    return ModelPage(data=data, has_more=more, **ends)


def _find_position(models: Sequence[ModelInfo], param: str, name: str) -> int:
    for position, model in enumerate(models):
        if model.id == name:
            return position
    raise InvalidRequest(
        f"{param}: found {name[:MAX_SHOWN_CHARS]!r}; allowed: the id of a model in this list.",
        param=param,
    )


def _includes_active(lifecycles: Sequence[str]) -> bool:
    """Return True if a filter by lifecycle includes active models. All models here are active.

    Raise InvalidRequest for an unknown lifecycle.
    """
    for value in lifecycles:
        if value not in get_args(Lifecycle):
            raise InvalidRequest(
                f"lifecycle: found {value[:MAX_SHOWN_CHARS]!r}; "
                f"allowed: {', '.join(get_args(Lifecycle))}.",
                param="lifecycle",
            )
    return not lifecycles or "active" in lifecycles
