"""Reader that converts a schema to a list of alternatives (`Atom`), each for one type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from guides.expressions import to_xgrammar
from guides.kinds import Backend
from guides.schema.atom import Atom, Part, Parts, at_least, atom_of, listed
from guides.schema.common import fits, in_common
from guides.schema.enforcement import STRICT, Enforcement
from guides.schema.keywords import ABOUT, TYPES, inspect, refuse, step, unsupported

# Limit of a `Reader`'s work. `Reader.spend` counts each schema that is read, and each pair of
# alternatives that are combined or compared. A small document can need very many such pairs.
_MAX_STEPS = 50_000
MAX_DEPTH = 100
_MAX_DEPTH_APART = 4
# Keywords that may allow more properties or items than the schema itself lists. If such a keyword
# is left out, unevaluatedProperties and unevaluatedItems cannot be enforced.
_NAMING = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "if", "dependentSchemas", "contains"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)


class Reader:
    """Reader of the schemas in one document. `backend` determines the unsupported keywords."""

    def __init__(
        self,
        document: Any,
        backend: Backend,
        enforcement: Enforcement = STRICT,
        why_not: Callable[[str], str | None] = lambda expression: None,
    ) -> None:
        """Create the reader.

        `why_not` returns the reason why the compiler refuses a regular expression, or None if it
        compiles.
        """
        self.backend = backend
        self.enforcement = enforcement
        self._why_not = why_not
        self._naming_left_out = 0
        self._document = document
        self._steps = 0
        self._depth = 0

    def alternatives(self, parts: Parts) -> list[Atom]:
        """Return alternatives for the values that are valid for all schemas in `parts`.

        The list is empty if there are no such values.
        """
        found = self._all([self._read(part, ()) for part in parts], ())
        return [atom for atom in found if not atom.is_idle] or found

    def followed(self, parts: Parts) -> list[Atom]:
        """Return the alternatives of the parts, without references.

        References are replaced by their targets' atoms.
        """
        found = list(self._followed(self.alternatives(parts), ()))
        return [atom for atom in found if not atom.is_idle] or found

    def target(self, ref: str, path: str) -> Part:
        """Return the schema that `ref` refers to. Raise ValueError if there is no such schema."""
        found, place = self._document, "$"
        for escaped in unquote(ref).split("/")[1:]:
            key = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found, place = found[key], step(place, key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found, place = found[int(key)], step(place, int(key))
            else:
                refuse(path, f"$ref: {ref} does not exist")
        if not isinstance(found, dict | bool):
            refuse(path, f"$ref: {ref} is no schema")
        return Part(found, place)

    def expression(self, text: str, path: str, keyword: str) -> str | None:
        """Return a regular expression in the form that `backend` compiles.

        Raise ValueError if the expression cannot be compiled. If the schema at `path` is best
        effort, return None instead.
        """
        try:
            found = to_xgrammar(text) if self.backend == "xgrammar" else text
        except ValueError as error:
            why: str | None = str(error)
        else:
            why = self._why_not(found)
        if why is None:
            return found
        self.enforcement.leave_out(path, keyword, f"{keyword}: {why}")
        return None

    def spend(self, path: str) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            refuse(path, "the schema is too large, with its alternatives written out")

    def _read(self, part: Part, within: tuple[str, ...]) -> list[Atom]:
        """Return the alternatives of a schema.

        `within` has the references that were followed on the way to this schema.
        """
        schema, path = part
        self.spend(path)
        if isinstance(schema, bool):
            return [Atom(path=path)] if schema else []
        if self._depth > MAX_DEPTH:
            refuse(path, f"schemas are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        inspect(schema, path)
        before = self._naming_left_out
        schema = self._enforced(schema, path)
        all_of = [_own(schema, path)]
        if "const" in schema:
            all_of.append([Atom(path=path, values=(schema["const"],))])
        if "enum" in schema:
            all_of.append([Atom(path=path, values=tuple(schema["enum"]))])
        if "$ref" in schema:
            all_of.append([Atom(path=path, ref=schema["$ref"])])
        all_of += [self._read(each, within) for each in listed(schema, "allOf", path)]
        if "anyOf" in schema:
            branches = listed(schema, "anyOf", path)
            all_of.append([a for each in branches for a in self._read(each, within)])
        if "oneOf" in schema:
            all_of.append(self._one_of(schema, path, within))
        found = self._all(all_of, within)
        ends = schema.get("unevaluatedProperties") is False or (
            schema.get("unevaluatedItems") is False
        )
        if self._naming_left_out > before:
            for keyword in ("unevaluatedProperties", "unevaluatedItems"):
                if schema.get(keyword) is False:
                    self.enforcement.leave_out(path, keyword)
            # Allow all additional properties: the keyword that was left out may allow some that are
            # unknown here.
            found = [_opened(atom) for atom in self._followed(found, within)]
        elif ends:
            found = [
                self._nothing_more(atom, schema, path) for atom in self._followed(found, within)
            ]
        self._depth -= 1
        return found

    def _enforced(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema without keywords that cannot be enforced.

        Raise ValueError if the schema has such a keyword and is not best effort.
        """
        found = dict(unsupported(schema, self.backend))
        if not found:
            return schema
        for keyword, why in found.items():
            self.enforcement.leave_out(path, keyword, why)
            self._naming_left_out += keyword in _NAMING
        return {keyword: value for keyword, value in schema.items() if keyword not in found}

    def _all(self, all_of: Sequence[list[Atom]], within: tuple[str, ...]) -> list[Atom]:
        """Return the intersection of several lists of alternatives, as a list of alternatives."""
        found = [Atom(path="$")]
        for atoms in all_of:
            if len(atoms) == 1 and atoms[0].is_any:
                continue
            if len(found) == 1 and found[0].is_any:
                found = atoms
                continue
            if len(found) == len(atoms) == 1 and found[0].ref and found[0].ref == atoms[0].ref:
                continue
            joined = []
            follows = list(self._followed(atoms, within))
            for one in self._followed(found, within):
                for other in follows:
                    self.spend(other.path)
                    if (both := in_common(one, other, self.enforcement)) is not None:
                        joined.append(both)
            found = joined
        return found

    def _followed(self, atoms: Iterable[Atom], within: tuple[str, ...]) -> Iterator[Atom]:
        """Yield the atoms, with references replaced by the atoms of their targets."""
        for atom in atoms:
            if atom.ref is None:
                yield atom
                continue
            if atom.ref in within:
                why = f"$ref: {atom.ref} leads back to itself"
                self.enforcement.leave_out(atom.path, "$ref", why)
                yield Atom(path=atom.path)
                continue
            there = self._read(self.target(atom.ref, atom.path), (*within, atom.ref))
            yield from at_least(self._followed(there, (*within, atom.ref)), atom.required)

    def _nothing_more(self, atom: Atom, schema: dict[str, Any], path: str) -> Atom:
        nothing = (Part(False, path),)
        if atom.type == "object" and schema.get("unevaluatedProperties") is False:
            return atom if atom.additional is not None else replace(atom, additional=nothing)
        if atom.type == "array" and schema.get("unevaluatedItems") is False:
            return atom if atom.items is not None else replace(atom, items=nothing)
        return atom

    def _one_of(self, schema: dict[str, Any], path: str, within: tuple[str, ...]) -> list[Atom]:
        """Return the alternatives of oneOf, read as if it were anyOf.

        The two keywords differ for values that are valid for two branches. If there may be such a
        value, raise ValueError. In a best-effort schema, report oneOf as left out instead.
        """
        branches = [self._read(each, within) for each in listed(schema, "oneOf", path)]
        idle = [self._idle(each, within) for each in branches]
        if any(idle):
            # Remove types that two branches do not restrict: values of such a type are valid for
            # both branches, and therefore invalid for oneOf.
            twice = {each for one, other in combinations(idle, 2) for each in one & other}
            branches = [
                [a for a in self._followed(each, within) if a.type not in twice]
                for each in branches
            ]
        discriminator = schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(tag, str):
            branches = [[self._tagged(atom, tag, within) for atom in each] for each in branches]
        before = self._naming_left_out
        for (i, one), (k, other) in combinations(enumerate(branches), 2):
            if not self._are_apart(one, other, within, 0):
                why = f"oneOf: a value may be valid for both [{i}] and [{k}]; write anyOf"
                # Read oneOf as anyOf if the schema is best effort; otherwise this call raises.
                self.enforcement.leave_out(path, "oneOf", why)
                break
        # Restore the number of left-out keywords in `_NAMING`. The comparison has also read the
        # schemas of the objects' properties. Keywords that were left out there do not affect the
        # unevaluatedProperties of this schema.
        self._naming_left_out = before
        return [atom for each in branches for atom in each]

    def _idle(self, atoms: list[Atom], within: tuple[str, ...]) -> set[str | None]:
        return {atom.type for atom in self._followed(atoms, within) if atom.is_idle}

    def _tagged(self, atom: Atom, tag: str, within: tuple[str, ...]) -> Atom:
        """Return an atom of a oneOf branch, with the discriminator `tag` as a required property.

        If the atom's objects do not have the property, return the atom unchanged.
        """
        there = list(self._followed([atom], within))
        if all(each.type != "object" or tag in each.properties for each in there) and any(
            each.type == "object" and tag not in each.required for each in there
        ):
            return replace(atom, required=(*atom.required, tag))
        return atom

    def _are_apart(
        self, one: Sequence[Atom], other: Sequence[Atom], within: tuple[str, ...], depth: int
    ) -> bool:
        """Return True if it is certain that no value is valid for both lists of alternatives."""
        others = list(self._followed(other, within))
        for a in self._followed(one, within):
            for b in others:
                self.spend(b.path)
                if not self._is_apart(a, b, depth):
                    return False
        return True

    def _is_apart(self, one: Atom, other: Atom, depth: int) -> bool:
        if one.is_any or other.is_any:
            return False
        if one.values is None and other.values is not None:
            one, other = other, one
        if one.values is not None:
            try:
                return not any(fits(value, other, STRICT) for value in one.values)
            except ValueError:  # not certain: the values of a keyword cannot be compared
                return False
        if one.type != other.type:
            return {one.type, other.type} != {"integer", "number"}
        return one.type == "object" and self._are_objects_apart(one, other, depth)

    def _are_objects_apart(self, one: Atom, other: Atom, depth: int) -> bool:
        for a, b in ((one, other), (other, one)):
            if b.is_closed and any(name not in b.properties for name in a.required):
                return True
        return depth < _MAX_DEPTH_APART and any(
            self._are_apart(
                self.alternatives(one.properties[name]),
                self.alternatives(other.properties[name]),
                (),
                depth + 1,
            )
            for name in one.required
            if name in other.required and name in one.properties and name in other.properties
        )


def _opened(atom: Atom) -> Atom:
    if atom.type == "object" and atom.additional is None:
        return replace(atom, additional=())
    return atom


def _own(schema: dict[str, Any], path: str) -> list[Atom]:
    """Return one atom for each type, with the keywords that restrict the type.

    If the schema has no `type`, there is an atom for each JSON type. An atom is idle if no keyword
    restricts its type. `Reader.alternatives` drops the atoms that are still idle when all schemas
    are combined. A schema with only `properties` therefore means an object, as in xgrammar.
    """
    types = schema.get("type")
    if types is None:
        spoken_of = {name for name, keywords in ABOUT.items() if schema.keys() & keywords}
        if not spoken_of:
            return [Atom(path=path)]
        return [
            replace(atom_of(name, schema, path), is_idle=name not in spoken_of) for name in TYPES
        ]
    names = dict.fromkeys([types] if isinstance(types, str) else types)
    if "number" in names:
        names.pop("integer", None)
    return [atom_of(name, schema, path) for name in names]
