"""Paged lists of items, for the endpoints of responses and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import orjson
from fastapi import Request

from gateway.api.openai.messages import Strict
from gateway.api.queries import describe_parameter, parse_int
from gateway.api.responses.options import Include
from gateway.errors import InvalidRequest, NotFound

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_ORDERS = ["asc", "desc"]


class ItemList(Strict):
    """A page of items. `first_id` and `last_id` are null for an empty page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


INCLUDE = describe_parameter(
    "include",
    "Accepted: an item is returned with all that it has.",
    type="array",
    items={"enum": get_args(Include)},
)


PAGE = [
    describe_parameter("limit", "How many at most.", type="integer", minimum=1, maximum=_MAX_LIMIT),
    describe_parameter("order", "By age; newest first by default.", enum=_ORDERS),
    describe_parameter("after", "The id of the item that comes before the page.", type="string"),
    INCLUDE,
]
"""OpenAPI descriptions of the query parameters that select a page."""


class Page(NamedTuple):
    limit: int
    newest_first: bool
    after: str | None

    def render(self, items: Sequence[dict[str, Any]]) -> bytes:
        """Return the page as JSON. `items` are all items, oldest first.

        Raise NotFound if no item has the id `after`.
        """
        ordered = items[::-1] if self.newest_first else items
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise NotFound(f"Item with id '{self.after}' not found.", param="after")
            ordered = ordered[ids.index(self.after) + 1 :]
        return render_list(ordered[: self.limit], more=len(ordered) > self.limit)


def render_list(items: Sequence[dict[str, Any]], *, more: bool = False) -> bytes:
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    head = ItemList(object="list", data=[], first_id=ends[0], last_id=ends[1], has_more=more)
    return orjson.dumps(head.model_dump() | {"data": items})


def parse_page(request: Request) -> Page:
    """Parse the page parameters of the query. Raise InvalidRequest for an invalid value."""
    query = request.query_params
    check_include(request)
    limit = parse_int(request, "limit", minimum=1, maximum=_MAX_LIMIT)
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise InvalidRequest(
            f"order: found {order!r}; allowed: {' and '.join(_ORDERS)}.", param="order"
        )
    return Page(_DEFAULT_LIMIT if limit is None else limit, order == "desc", query.get("after"))


def check_include(request: Request) -> None:
    """Raise InvalidRequest for an unknown value of `include`."""
    query = request.query_params
    for name in (*query.getlist("include"), *query.getlist("include[]")):
        if name not in get_args(Include):
            raise InvalidRequest(
                f"include: found {name!r}; allowed: {', '.join(get_args(Include))}.",
                param="include",
            )
