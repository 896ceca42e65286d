"""Rewriting of propertyNames and dependentRequired to other keywords."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from guides.schema.atom import NOTHING, Atom, forbids
from guides.schema.enforcement import Enforcement
from guides.schema.reading import Reader

# Maximum number of properties in dependentRequired. Each property doubles the alternatives.
_MAX_NEEDS = 4


def with_names(atom: Atom, reader: Reader) -> Atom:
    """Return an object's atom in which other keywords replace propertyNames."""
    for part in atom.names:
        allowed = reader.followed((part,))
        bare = [
            each for each in allowed if each.is_any or each == Atom(path=each.path, type="string")
        ]
        if bare:
            continue
        path, additional = part.path, atom.additional or ()
        if not all(each.values is not None for each in allowed):
            pattern = allowed[0].simple.get("pattern") if len(allowed) == 1 else None
            if pattern is None or len(allowed[0].simple) > 1:
                keywords = " and ".join(part.schema) if isinstance(part.schema, dict) else ""
                why = f"propertyNames with {keywords} is not supported"
                reader.enforcement.leave_out(path, keywords.partition(" ")[0] or "const", why)
                continue
            if atom.properties or atom.patterns or atom.required:
                why = "propertyNames with pattern beside properties is not supported"
                reader.enforcement.leave_out(path, "pattern", why)
                continue
            patterns = {} if forbids(additional) else {pattern: additional}
            atom = replace(atom, patterns=patterns, additional=NOTHING)
            continue
        if atom.patterns:
            why = "propertyNames beside patternProperties is not supported"
            reader.enforcement.leave_out(path, "enum", why)
            continue
        names = [name for each in allowed for name in each.values or () if isinstance(name, str)]
        properties = {
            name: parts if name in names else NOTHING for name, parts in atom.properties.items()
        }
        properties |= {name: additional for name in names if name not in properties}
        atom = replace(atom, properties=properties, additional=NOTHING)
    return atom


def variants(atom: Atom, enforcement: Enforcement) -> Iterator[Atom]:
    """Yield alternatives of an object's atom, without dependentRequired.

    dependentRequired says that a property `a` requires other properties. This becomes two
    alternatives: one without `a`, and one in which `a` and the other properties are required.
    """
    needs = dict(atom.needs)
    properties, required = dict(atom.properties), dict.fromkeys(atom.required)
    while known := [name for name in needs if name in required]:
        for name in known:
            required |= dict.fromkeys(needs.pop(name))
    open_ends = [name for name, needed in needs.items() if set(needed) - required.keys()]
    for name in (*required, *open_ends):
        if name not in properties:
            if atom.patterns:
                why = f"required: {name} beside patternProperties is not supported"
                enforcement.leave_out(atom.path, "patternProperties", why)
            properties[name] = () if atom.patterns else atom.additional or ()
    atom = replace(atom, properties=properties, required=tuple(required), needs={})
    if not open_ends:
        yield atom
        return
    if (
        len(open_ends) > _MAX_NEEDS
        or atom.patterns
        or not (atom.additional is None or forbids(atom.additional))
    ):
        why = "dependentRequired of an object like this is not supported"
        enforcement.leave_out(atom.path, "dependentRequired", why)
        yield atom
        return
    name = open_ends[0]
    rest = {key: needs[key] for key in open_ends[1:]}
    without = {key: parts for key, parts in properties.items() if key != name}
    yield from variants(
        replace(atom, properties=without, additional=NOTHING, needs=rest), enforcement
    )
    yield from variants(
        replace(atom, required=(*required, name, *needs[name]), needs=rest), enforcement
    )
