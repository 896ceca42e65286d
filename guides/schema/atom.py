"""Atoms, the simple schemas that a schema is rewritten to.

An atom has one type, a list of values, or a reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from guides.schema.keywords import ABOUT, step


class Part(NamedTuple):
    """A schema in the client's document, and its JSON path."""

    schema: Any
    path: str


Parts = tuple[Part, ...]
"""Schemas, all of which a value must match. An empty tuple allows every value."""

NOTHING: Parts = (Part(False, ""),)
_SIMPLE = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems"),
        *("minProperties", "maxProperties"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """A simple schema. An atom without a type, values and a reference allows every value.

    Attributes:
        path: JSON path of the schema in the client's document.
        type: the type of the allowed values; None if `values` or `ref` is set, or for any type.
        is_idle: True if the atom exists only because the client's schema has no keyword `type`:
            none of the schema's keywords restricts values of this atom's type.
        values: the allowed values (enum or const); None if the values are not listed.
        ref: the reference (``$ref``); None without a reference.
        simple: keywords whose values are not schemas, such as maxLength.
        properties: schemas of the properties, by name.
        names_some: True if the schema has the keyword `properties`, even with the value ``{}``.
        required: names of required properties. With `ref`, these properties are required in
            addition to those of the referenced schema.
        additional: additionalProperties; None if the schema does not have this keyword.
        patterns: patternProperties.
        names: propertyNames.
        needs: dependentRequired.
        prefix: prefixItems.
        items: schema of the array's items; None if the schema does not have this keyword.
    """

    path: str
    type: str | None = None
    is_idle: bool = False
    values: tuple[Any, ...] | None = None
    ref: str | None = None
    simple: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Parts] = field(default_factory=dict)
    names_some: bool = False
    required: tuple[str, ...] = ()
    additional: Parts | None = None
    patterns: dict[str, Parts] = field(default_factory=dict)
    names: Parts = ()
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prefix: tuple[Parts, ...] = ()
    items: Parts | None = None

    @property
    def is_any(self) -> bool:
        return self.type is None and self.values is None and self.ref is None

    @property
    def is_closed(self) -> bool:
        """True if an object may have no other properties than those in `properties`."""
        return forbids(self.additional) and not self.patterns


def forbids(parts: Parts | None) -> bool:
    return parts is not None and any(part.schema is False for part in parts)


def joined(one: Parts | None, other: Parts | None) -> Parts | None:
    if one is None or other is None:
        return one if other is None else other
    return tuple({part.path: part for part in (*one, *other)}.values())


def at_least(atoms: Iterable[Atom], required: tuple[str, ...]) -> list[Atom]:
    """Return the atoms, with `required` added to the required properties of atoms for objects."""
    return [
        replace(atom, required=tuple(dict.fromkeys(atom.required + required)))
        if atom.type == "object"
        else atom
        for atom in atoms
    ]


def listed(schema: dict[str, Any], keyword: str, path: str) -> list[Part]:
    return [
        Part(each, step(path, keyword, index)) for index, each in enumerate(schema.get(keyword, ()))
    ]


def _mapped(schema: dict[str, Any], keyword: str, path: str) -> dict[str, Parts]:
    return {
        name: (Part(each, step(path, keyword, name)),)
        for name, each in schema.get(keyword, {}).items()
    }


def _one(schema: dict[str, Any], keyword: str, path: str) -> Parts | None:
    return (Part(schema[keyword], step(path, keyword)),) if keyword in schema else None


def atom_of(name: str, schema: dict[str, Any], path: str) -> Atom:
    """Return an atom with all restrictions of a schema on values of the type `name`."""
    about = ABOUT.get("number" if name == "integer" else name, frozenset())
    simple = {key: value for key, value in schema.items() if key in about and key in _SIMPLE}
    atom = Atom(path=path, type=name, simple=simple)
    if name == "object":
        # Read `dependencies`, too, which was the name of dependentRequired before draft 2019-09.
        needs = {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}
        return replace(
            atom,
            properties=_mapped(schema, "properties", path),
            names_some="properties" in schema,
            required=tuple(dict.fromkeys(schema.get("required", ()))),
            additional=_one(schema, "additionalProperties", path),
            patterns=_mapped(schema, "patternProperties", path),
            names=_one(schema, "propertyNames", path) or (),
            needs={key: tuple(names) for key, names in needs.items()},
        )
    if name == "array":
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # the form before draft 2020-12
            first, rest = "items", "additionalItems"
        prefix = tuple([(part,) for part in listed(schema, first, path)])
        return replace(atom, prefix=prefix, items=_one(schema, rest, path))
    return atom
