"""A schema as the alternatives that it allows, each of one type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from guides.kinds import Backend
from guides.schema.atom import Atom, Part, Parts, at_least, atom_of, listed
from guides.schema.common import fits, in_common
from guides.schema.keywords import ABOUT, TYPES, inspect, refuse, step

# Alternatives multiply where several stand together, and those of oneOf are compared in pairs.
_MAX_STEPS = 50_000
MAX_DEPTH = 100
_MAX_DEPTH_APART = 4


class Reader:
    """Reads the schemas of one document; `backend` says what is refused."""

    def __init__(self, document: Any, backend: Backend) -> None:
        self.backend = backend
        self._document = document
        self._steps = 0
        self._depth = 0

    def alternatives(self, parts: Parts) -> list[Atom]:
        """What is valid for all the parts, as alternatives; none if nothing is."""
        found = self._all([self._read(part, ()) for part in parts], ())
        return [atom for atom in found if not atom.is_idle] or found

    def followed(self, parts: Parts) -> list[Atom]:
        """The alternatives, with what references lead to in their place."""
        found = list(self._followed(self.alternatives(parts), ()))
        return [atom for atom in found if not atom.is_idle] or found

    def target(self, ref: str, path: str) -> Part:
        """What `ref` leads to. Raises ValueError where nothing is there."""
        if ref != "#" and not ref.startswith("#/"):
            refuse(path, f"$ref: {ref} cannot be followed; allowed: #/ and the place in the schema")
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

    def spend(self, path: str) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            refuse(path, "the schema is too large, with its alternatives written out")

    def _read(self, part: Part, within: tuple[str, ...]) -> list[Atom]:
        """`within` are the references that were followed to here."""
        schema, path = part
        self.spend(path)
        if isinstance(schema, bool):
            return [Atom(path=path)] if schema else []
        if self._depth > MAX_DEPTH:
            refuse(path, f"schemas are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        inspect(schema, path, self.backend)
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
        if schema.get("unevaluatedProperties") is False or schema.get("unevaluatedItems") is False:
            found = [
                self._nothing_more(atom, schema, path) for atom in self._followed(found, within)
            ]
        self._depth -= 1
        return found

    def _all(self, all_of: Sequence[list[Atom]], within: tuple[str, ...]) -> list[Atom]:
        """The alternatives that all of these lists have in common."""
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
                    if (both := in_common(one, other)) is not None:
                        joined.append(both)
            found = joined
        return found

    def _followed(self, atoms: Iterable[Atom], within: tuple[str, ...]) -> Iterator[Atom]:
        """The atoms, with what references lead to in their place."""
        for atom in atoms:
            if atom.ref is None:
                yield atom
                continue
            if atom.ref in within:
                refuse(atom.path, f"$ref: {atom.ref} leads back to itself")
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
        """oneOf is anyOf where no value is valid for two branches."""
        branches = [self._read(each, within) for each in listed(schema, "oneOf", path)]
        idle = [self._idle(each, within) for each in branches]
        if any(idle):
            # What nothing is said of is valid for each branch that does not speak of it.
            twice = {each for one, other in combinations(idle, 2) for each in one & other}
            branches = [
                [a for a in self._followed(each, within) if a.type not in twice]
                for each in branches
            ]
        discriminator = schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(tag, str):
            branches = [[self._tagged(atom, tag, within) for atom in each] for each in branches]
        for (i, one), (k, other) in combinations(enumerate(branches), 2):
            if not self._are_apart(one, other, within, 0):
                refuse(path, f"oneOf: a value may be valid for both [{i}] and [{k}]; write anyOf")
        return [atom for each in branches for atom in each]

    def _idle(self, atoms: list[Atom], within: tuple[str, ...]) -> set[str | None]:
        return {atom.type for atom in self._followed(atoms, within) if atom.is_idle}

    def _tagged(self, atom: Atom, tag: str, within: tuple[str, ...]) -> Atom:
        """An object of a branch names itself by its tag, so it has one."""
        there = list(self._followed([atom], within))
        if all(each.type != "object" or tag in each.properties for each in there) and any(
            each.type == "object" and tag not in each.required for each in there
        ):
            return replace(atom, required=(*atom.required, tag))
        return atom

    def _are_apart(
        self, one: Sequence[Atom], other: Sequence[Atom], within: tuple[str, ...], depth: int
    ) -> bool:
        """Whether it is certain that no value is valid for an atom of each."""
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
                return not any(fits(value, other) for value in one.values)
            except ValueError:  # it takes more than to look at them
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


def _own(schema: dict[str, Any], path: str) -> list[Atom]:
    """What the keywords say that stand for one type. Where no type is named, the others are idle:
    left out, unless something else speaks of them; so xgrammar reads a schema of properties alone.
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
