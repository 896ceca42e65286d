"""Functions that compute and apply JSON Merge Patches (RFC 7396).

In a patch, null removes a member. A patch therefore cannot set a member to null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def difference(old: Json, new: Json) -> dict[str, Any]:
    """Return the patch that changes `old` to `new`. Return an empty patch if they are equal."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if before is value or before == value:
            continue
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            patch[name] = difference(before, value)
        else:
            patch[name] = value
    return patch


def apply_patch(target: Json, patch: Json) -> dict[str, Any]:
    """Return a copy of `target` with the patch applied (`MergePatch` in the RFC)."""
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            before = result.get(name)
            result[name] = apply_patch(before if isinstance(before, Mapping) else {}, value)
        else:
            result[name] = value
    return result
