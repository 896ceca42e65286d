"""Unions of objects that are told apart by their `type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Discriminator

from gateway.api.messages import Lenient


def by_type(tags: Mapping[str, str], untyped: str = "") -> Discriminator:
    """Return a discriminator by `type`; an object without a type is of the type `untyped`.

    A tag has brackets, so that it is no part of a path (`gateway.api.validation.location`).
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None:
            # A reference may be no more than an id.
            bare = isinstance(value, dict) and "id" in value and "role" not in value
            kind = "item_reference" if bare and "item_reference" in tags else untyped
        return tags.get(kind, "[other]") if isinstance(kind, str) else "[other]"

    return Discriminator(tag)


class OtherObject(Lenient):
    """An object of a type that this server has no use for. Each list says what it does with one."""

    type: str
