"""Rewriting of a schema to a form in which compilers enforce all keywords."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from guides.kinds import Backend
from guides.limits import MAX_WEIGHT
from guides.schema.atom import NOTHING, Atom, Parts, at_least, forbids
from guides.schema.costs import count_cost, open_cost
from guides.schema.keywords import refuse
from guides.schema.objects import variants, with_names
from guides.schema.reading import MAX_DEPTH, Reader
from guides.schema.scalars import numbers, strings

Schema = dict[str, Any]

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def rewrite(document: Any, backend: Backend, ref: str = "#") -> Schema:
    """Return the schema at `ref` in `document`, in a form in which `backend` enforces all keywords.

    Each value that is valid for the result is valid for the schema. The reverse holds with two
    exceptions. First, an object that has `properties` without additionalProperties is closed: a
    model that may invent properties may never stop. Second, a schema without a type allows only the
    types that its keywords restrict. Raise ValueError, with keyword and JSON path, if a keyword
    cannot be enforced.
    """
    return write(Reader(document, backend), ref)


def write(reader: Reader, ref: str = "#") -> Schema:
    """Return the schema at `ref` in the reader's document, in the form that `rewrite` describes.

    The reader may leave out keywords of best-effort schemas. The result then allows more values
    than the schema.
    """
    return _Writer(reader).write(ref)


class _Writer:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._enforcement = reader.enforcement
        self._names: dict[tuple[str, tuple[str, ...]], str] = {}
        self._waiting: deque[tuple[str, Atom]] = deque()
        self._root = "#"
        self._depth = 0

    def write(self, ref: str) -> Schema:
        self._root = ref
        start = self._reader.target(ref, "$")
        written = self._schema((start,))
        if written is None:
            refuse(start.path, "nothing is valid for all that it says")
        defs: dict[str, Any] = {}
        while self._waiting:
            name, atom = self._waiting.popleft()
            assert atom.ref is not None
            target = self._reader.target(atom.ref, atom.path)
            atoms = at_least(self._reader.alternatives((target,)), atom.required)
            found = self._union(atoms)
            if found is None:
                refuse(target.path, "nothing is valid for all that it says")
            defs[name] = found
        if self._reader.backend == "xgrammar":
            self._check_references(written, defs)
        return {**written, "$defs": defs} if defs else written

    def _check_references(self, written: Schema, defs: dict[str, Schema]) -> None:
        """Raise ValueError for a schema that has itself as an alternative, through references.

        Releases of xgrammar up to 0.1.18 overflow the stack on such a schema, as they do on a
        left-recursive rule (`guides.ebnf_xgrammar`).
        """
        refs = {f"#/$defs/{name}": ref for (ref, _), name in self._names.items()}
        schemas = {"#": written} | {f"#/$defs/{name}": found for name, found in defs.items()}
        graph = {
            name: [each["$ref"] for each in found.get("anyOf", [found]) if "$ref" in each]
            for name, found in schemas.items()
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            name = error.args[1][0]
            ref = refs.get(name, self._root)
            refuse(self._reader.target(ref, "$").path, f"$ref: {ref} leads back to itself")

    def _schema(self, parts: Parts) -> Schema | None:
        """Return the rewritten schema of the values that are valid for all parts.

        Return None if there are no such values.
        """
        if not parts:
            return {}
        self._depth += 1
        if self._depth > MAX_DEPTH:
            refuse(parts[0].path, f"schemas are nested more than {MAX_DEPTH} deep")
        found = self._union(self._reader.alternatives(parts))
        self._depth -= 1
        return found

    def _union(self, atoms: list[Atom]) -> Schema | None:
        if any(atom.is_any for atom in atoms):
            return {}
        found = [schema for atom in atoms for schema in self._atom(atom)]
        if len(found) > 1:
            return {"anyOf": found}
        return found[0] if found else None

    def _atom(self, atom: Atom) -> Iterator[Schema]:
        if atom.ref is not None:
            yield {"$ref": self._reference(atom)}
        elif atom.values is not None:
            many = len(atom.values) > 1
            yield {"enum": list(atom.values)} if many else {"const": atom.values[0]}
        elif atom.type in ("number", "integer"):
            yield from numbers(atom, self._enforcement)
        elif atom.type == "string":
            yield from strings(atom, self._reader)
        elif atom.type == "array":
            yield from self._array(atom)
        elif atom.type == "object":
            for each in variants(with_names(atom, self._reader), self._enforcement):
                yield from self._object(each)
        else:
            yield {"type": atom.type}

    def _reference(self, atom: Atom) -> str:
        assert atom.ref is not None
        if atom.ref == self._root and not atom.required:
            return "#"
        key = (atom.ref, atom.required)
        if key not in self._names:
            name = atom.ref.rpartition("/")[2]
            if not _PLAIN_NAME.fullmatch(name) or name in self._names.values():
                name = f"schema_{len(self._names)}"
            self._names[key] = name
            self._waiting.append((name, atom))
        return f"#/$defs/{self._names[key]}"

    def _patterns(self, atom: Atom) -> dict[str, Schema]:
        written: dict[str, Schema] = {}
        for key, parts in atom.patterns.items():
            found = self._reader.expression(key, atom.path, "patternProperties")
            if found is None:
                continue
            schema = self._schema(parts)
            why = "two of the expressions are the same" if found in written else ""
            if why or schema is None:
                why = why or "nothing is valid for one of them"
                self._enforcement.leave_out(
                    atom.path, "patternProperties", f"patternProperties: {why}"
                )
                schema = {}
            written[found] = schema
        return written

    def _array(self, atom: Atom) -> Iterator[Schema]:
        simple = dict(atom.simple)
        is_heavy = self._enforcement.is_too_heavy(
            count_cost(simple, self._enforcement.costs), atom.path
        )
        for keyword in ("minItems", "maxItems"):
            is_large = simple.get(keyword, 0) > MAX_WEIGHT or (keyword in simple and is_heavy)
            if is_large and self._enforcement.is_best_effort(atom.path):
                del simple[keyword]
                self._enforcement.leave_out(atom.path, keyword)
        low, high = simple.get("minItems", 0), simple.get("maxItems", math.inf)
        prefix: list[Schema] = []
        items = atom.items
        for parts in atom.prefix:
            found = self._schema(parts) if len(prefix) < high else None
            if found is None:  # end the array here: no item is possible at this index
                items = NOTHING
                break
            prefix.append(found)
        if forbids(items):
            high = min(high, len(prefix))
        if low > high:
            return
        if items is None and (not prefix or low > len(prefix)):
            items = ()  # write `items`: releases of xgrammar throw if the array has neither keyword
        written: Schema = {"type": "array", **simple}
        if prefix:
            written["prefixItems"] = prefix
        if items is not None:
            found = self._schema(items)
            written["items"] = False if found is None else found
        yield written

    def _object(self, atom: Atom) -> Iterator[Schema]:
        known = {name: self._schema(parts) for name, parts in atom.properties.items()}
        properties = {name: found for name, found in known.items() if found is not None}
        never = known.keys() - properties.keys()
        if never & set(atom.required):
            return
        if never and (atom.patterns or not (atom.additional is None or forbids(atom.additional))):
            why = f"properties: {', '.join(sorted(never))} can have no value"
            self._enforcement.leave_out(atom.path, "properties", why)
        written: Schema = {"type": "object"}
        if properties:
            written["properties"] = properties
        if atom.required:
            written["required"] = list(atom.required)
        patterns = self._patterns(atom)
        if patterns:
            written["patternProperties"] = patterns
        additional = atom.additional if len(patterns) == len(atom.patterns) else ()
        if additional is None:
            additional = NOTHING if known or atom.names_some or atom.patterns else ()
        found = self._schema(additional)
        written["additionalProperties"] = False if found is None else found
        cost = open_cost(written, self._enforcement.costs)
        has_enough = atom.simple.get("minProperties", 0) <= len(properties)
        if has_enough and self._enforcement.is_too_heavy(cost, atom.path):
            # Allow no additional properties. The result then excludes some valid values, but does
            # not allow invalid ones.
            self._enforcement.leave_out(atom.path, "additionalProperties")
            written["additionalProperties"] = False
        written |= atom.simple
        low, high = atom.simple.get("minProperties", 0), atom.simple.get("maxProperties", math.inf)
        if written["additionalProperties"] is False and not patterns:
            high = min(high, len(properties))
        if max(low, len(atom.required)) <= high:
            yield written
