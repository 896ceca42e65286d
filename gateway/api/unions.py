"""Unions of JSON objects that are distinguished by their member `type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Discriminator


def by_type(
    tags: Mapping[str, str], untyped: str = "", *, expected: str | None = None
) -> Discriminator:
    """Return a pydantic discriminator that chooses a union's branch by an object's `type`.

    Args:
        tags: maps each value of `type` to the tag of a branch. Any other `type` gets the tag
            `[other]`. Tags have brackets, so that `gateway.api.validation.get_path` can remove them
            from the path of an error.
        untyped: the type to assume for an object without the member `type`.
        expected: the allowed types, as text for the error message; None if the union has a branch
            with the tag `[other]`.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None:
            # An object without `type` may be an item reference, which has only an `id`, or a
            # message, which has a `role`.
            bare = isinstance(value, dict) and "id" in value and "role" not in value
            kind = "item_reference" if bare and "item_reference" in tags else untyped
        return tags.get(kind, "[other]") if isinstance(kind, str) else "[other]"

    if expected is None:
        return Discriminator(tag)
    message = f"Input should be of type {expected}"
    return Discriminator(tag, custom_error_type="type", custom_error_message=message)
