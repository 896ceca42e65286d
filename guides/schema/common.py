"""Intersection of two atoms (simple schemas): the values that both atoms allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from guides.schema.atom import Atom, Parts, joined
from guides.schema.enforcement import Enforcement

_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_OF_PARTS = {
    "properties": "properties",
    "required": "required",
    "patterns": "patternProperties",
    "names": "propertyNames",
    "needs": "dependentRequired",
    "prefix": "prefixItems",
}
"""Keywords for properties and items, by the name of the `Atom` attribute with their value."""


def in_common(one: Atom, other: Atom, enforcement: Enforcement) -> Atom | None:
    """Return an atom for the values that are valid for both atoms. Return None if there are none.

    The atoms must not be references. If two keywords cannot be combined, one of them is left out in
    a best-effort schema (see `Enforcement`). In another schema, ValueError is raised.
    """
    if one.is_any or other.is_any:
        return other if one.is_any else one
    if one.values is None and other.values is not None:
        one, other = other, one
    if one.values is not None:
        values = tuple([value for value in one.values if fits(value, other, enforcement)])
        return replace(one, values=values) if values else None
    types = {one.type, other.type}
    if len(types) > 1 and types != {"integer", "number"}:
        return None
    both = replace(
        one,
        type="integer" if "integer" in types else one.type,
        is_idle=one.is_idle and other.is_idle,
        simple=_simple(one, other, enforcement),
        names=joined(one.names, other.names) or (),
        names_some=one.names_some or other.names_some,
        required=tuple(dict.fromkeys(one.required + other.required)),
    )
    if one.type == "object":
        return _objects(both, one, other, enforcement)
    return _arrays(both, one, other) if one.type == "array" else both


def _simple(one: Atom, other: Atom, enforcement: Enforcement) -> dict[str, Any]:
    found = dict(one.simple)
    for keyword, value in other.simple.items():
        if keyword not in found:
            found[keyword] = value
        elif keyword in _LARGER:
            found[keyword] = max(found[keyword], value)
        elif keyword in _SMALLER:
            found[keyword] = min(found[keyword], value)
        elif found[keyword] != value:
            if keyword == "format":
                # Drop `format` if the two schemas have different formats. No compiler can enforce
                # both, and in the JSON Schema standard a format is only an annotation.
                del found[keyword]
                continue
            why = f"{keyword} beside another {keyword} is not supported"
            enforcement.leave_out(other.path, keyword, why)
    return found


def _objects(both: Atom, one: Atom, other: Atom, enforcement: Enforcement) -> Atom:
    if one.patterns and (other.properties or other.patterns or other.additional is not None):
        one = _without_patterns(one, enforcement)
    if other.patterns and (one.properties or one.patterns or one.additional is not None):
        other = _without_patterns(other, enforcement)
    properties = {
        name: joined(_property(one, name), _property(other, name)) or ()
        for name in (one.properties | other.properties)
    }
    needs = dict(one.needs)
    for name, needed in other.needs.items():
        needs[name] = (*needs.get(name, ()), *needed)
    additional = joined(one.additional, other.additional)
    patterns = one.patterns | other.patterns
    return replace(
        both, properties=properties, additional=additional, patterns=patterns, needs=needs
    )


def _without_patterns(atom: Atom, enforcement: Enforcement) -> Atom:
    why = "patternProperties of objects that are joined is not supported"
    enforcement.leave_out(atom.path, "patternProperties", why)
    return replace(atom, patterns={}, additional=())


def _property(atom: Atom, name: str) -> Parts | None:
    return atom.properties.get(name, atom.additional)


def _arrays(both: Atom, one: Atom, other: Atom) -> Atom:
    count = max(len(one.prefix), len(other.prefix))
    prefix = tuple([joined(_item(one, i), _item(other, i)) or () for i in range(count)])
    return replace(both, prefix=prefix, items=joined(one.items, other.items))


def _item(atom: Atom, index: int) -> Parts | None:
    return atom.prefix[index] if index < len(atom.prefix) else atom.items


def fits(value: Any, atom: Atom, enforcement: Enforcement) -> bool:
    """Return False if a value is certainly invalid for an atom.

    The atom must not be a reference. Some keywords, such as `properties` and `pattern`, are not
    evaluated here. In a best-effort schema (see `Enforcement`), such a keyword is left out, and an
    invalid value may be accepted. In another schema, ValueError is raised.
    """
    if atom.is_any:
        return True
    if atom.values is not None:
        return any(are_equal(value, each) for each in atom.values)
    if atom.type not in types_of(value):
        return False
    said = [keyword for name, keyword in _OF_PARTS.items() if getattr(atom, name)]
    said += ["additionalProperties"] if atom.additional is not None else []
    said += ["items"] if atom.items is not None else []
    for keyword in said:
        why = "enum or const beside what is said of its parts is not supported"
        enforcement.leave_out(atom.path, keyword, why)
    return all(
        _holds(keyword, limit, value, atom, enforcement) for keyword, limit in atom.simple.items()
    )


def types_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("number", "integer") if value == int(value) else ("number",)
    return (
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",
    )


def _holds(keyword: str, limit: Any, value: Any, atom: Atom, enforcement: Enforcement) -> bool:
    size = value if isinstance(value, int | float) else len(value)
    match keyword:
        case "format":
            return True
        case "minimum" | "minLength" | "minItems" | "minProperties":
            return bool(size >= limit)
        case "maximum" | "maxLength" | "maxItems" | "maxProperties":
            return bool(size <= limit)
        case "exclusiveMinimum":
            return bool(size > limit)
        case "exclusiveMaximum":
            return bool(size < limit)
    why = f"{keyword} beside enum or const is not supported"
    enforcement.leave_out(atom.path, keyword, why)
    return True


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two values are equal in JSON: 1 equals 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[k], other[k]) for k in one)
    return bool(one == other)
