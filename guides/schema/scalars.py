"""Rewriting of the schemas of strings and numbers to a form in which all keywords are enforced."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from guides.limits import MAX_WEIGHT
from guides.schema.atom import Atom
from guides.schema.costs import format_cost, length_cost, pattern_cost, range_cost
from guides.schema.enforcement import Enforcement
from guides.schema.keywords import FORMATS
from guides.schema.reading import Reader

Schema = dict[str, Any]

_MAX_INTEGER = 2**63 - 1
# Largest integer that JSON readers with double precision, such as JavaScript's, read exactly.
_MAX_SAFE_INTEGER = 2**53 - 1
_BOUNDS = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 0, "exclusiveMaximum": 0}.keys()
# Pattern that only repeats one character or class, such as `^[a-z]+$`. It can be combined with
# minLength and maxLength, which become the counts of the repetition.
_REPEATED = re.compile(r"\^(\[\^?(?:[^\[\]\\]|\\.)+\]|\\[dws]|[A-Za-z0-9])([*+])\$", re.DOTALL)


def strings(atom: Atom, reader: Reader) -> Iterator[Schema]:
    said = dict(atom.simple)
    enforcement = reader.enforcement
    for keyword in ("minLength", "maxLength"):
        if said.get(keyword, 0) > MAX_WEIGHT and enforcement.is_best_effort(atom.path):
            del said[keyword]
            enforcement.leave_out(atom.path, keyword)
    if "pattern" in said:
        found = reader.expression(said["pattern"], atom.path, "pattern")
        said |= {"pattern": found}
        if found is None:
            del said["pattern"]
    # Drop `format` if there is a length or a pattern: xgrammar enforces only one of the three, and
    # a format is only an annotation.
    sized = bool(said.keys() & {"minLength", "maxLength"})
    if said.get("format") not in FORMATS or sized or "pattern" in said:
        said.pop("format", None)
    low, high = int(said.get("minLength", 0)), said.get("maxLength")
    if high is not None and low > high:
        return
    if "pattern" in said and sized and reader.backend == "xgrammar":
        repeated = _REPEATED.fullmatch(said["pattern"])
        if repeated is None:
            for keyword in ("maxLength", "minLength"):
                if keyword in said:
                    why = f"{keyword} beside pattern is not supported"
                    enforcement.leave_out(atom.path, keyword, why)
            said = {"pattern": said["pattern"]}
        else:
            low = max(low, int(repeated[2] == "+"))
            times = f"{{{low},{'' if high is None else int(high)}}}"
            said = {"pattern": f"^{repeated[1]}{times}$"}
    said = _without_heavy(said, atom, enforcement)
    yield {"type": "string", **said}


def _without_heavy(said: dict[str, Any], atom: Atom, enforcement: Enforcement) -> dict[str, Any]:
    """Return the keywords `said` of a string's schema, without those that take too long to compile.

    In schemas that are not best effort, no keyword is removed.
    """
    found = dict(said)
    lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in found]
    if enforcement.is_too_heavy(length_cost(found, enforcement.costs), atom.path):
        for keyword in lengths:
            enforcement.leave_out(atom.path, keyword)
            del found[keyword]
    pattern = found.get("pattern")
    if enforcement.is_too_heavy(pattern_cost(pattern, enforcement.costs), atom.path):
        enforcement.leave_out(atom.path, "pattern")
        del found["pattern"]
    if enforcement.is_too_heavy(format_cost(found, enforcement.costs), atom.path):
        enforcement.leave_out(atom.path, "format")
        del found["format"]
    return found


def numbers(atom: Atom, enforcement: Enforcement) -> Iterator[Schema]:
    said = dict(atom.simple)
    if atom.type == "integer":
        said = _whole(said, atom.path, enforcement)
    low, high = said.get("minimum", -math.inf), said.get("maximum", math.inf)
    above, below = said.get("exclusiveMinimum"), said.get("exclusiveMaximum")
    # Drop the weaker bound if a side has both an inclusive and an exclusive bound.
    if above is not None:
        said.pop("minimum" if above >= low else "exclusiveMinimum", None)
        low = max(low, above)
    if below is not None:
        said.pop("maximum" if below <= high else "exclusiveMaximum", None)
        high = min(high, below)
    if low < high or (low == high and not said.keys() & {"exclusiveMinimum", "exclusiveMaximum"}):
        said = {"type": atom.type, **said}
        if enforcement.is_too_heavy(range_cost(said, enforcement.costs), atom.path):
            for keyword in _BOUNDS & said.keys():
                enforcement.leave_out(atom.path, keyword)
                del said[keyword]
        yield said


def _whole(said: dict[str, Any], path: str, enforcement: Enforcement) -> dict[str, Any]:
    """Return the bounds of a schema for integers as `minimum` and `maximum`.

    Exclusive and fractional bounds become the nearest integers that they allow. Bounds outside the
    range in which JavaScript reads integers exactly are left out.
    """
    found = {key: value for key, value in said.items() if key == "multipleOf"}
    lows, highs = [], []
    if "minimum" in said:
        lows.append(math.ceil(said["minimum"]))
    if "exclusiveMinimum" in said:
        lows.append(math.floor(said["exclusiveMinimum"]) + 1)
    if "maximum" in said:
        highs.append(math.floor(said["maximum"]))
    if "exclusiveMaximum" in said:
        highs.append(math.ceil(said["exclusiveMaximum"]) - 1)
    if lows:
        found["minimum"] = max(lows)
    if highs:
        found["maximum"] = min(highs)
    if found.get("minimum", 0) <= found.get("maximum", math.inf):
        # Drop a maximum of 2**53 - 1 or more, and a minimum of -(2**53 - 1) or less. Clients with
        # double precision cannot read larger integers exactly, so the library zod writes these two
        # bounds for each integer. A compiler would take 50 ms for the two.
        if found.get("minimum", 0) <= -_MAX_SAFE_INTEGER:
            del found["minimum"]
        if found.get("maximum", 0) >= _MAX_SAFE_INTEGER:
            del found["maximum"]
    for keyword in ("minimum", "maximum"):
        if abs(found.get(keyword, 0)) > _MAX_INTEGER:
            why = f"{keyword} is {found[keyword]}; the bounds of integers have 64 bits"
            enforcement.leave_out(path, keyword, why)
            del found[keyword]
    return found
