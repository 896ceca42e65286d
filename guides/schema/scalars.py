"""Strings and numbers, written so that compilers enforce all that is said of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from guides.expressions import to_xgrammar
from guides.kinds import Backend
from guides.schema.atom import Atom
from guides.schema.keywords import FORMATS, refuse

Schema = dict[str, Any]

_MAX_INTEGER = 2**63 - 1
# One character, or class of them, again and again.
_REPEATED = re.compile(r"\^(\[\^?(?:[^\[\]\\]|\\.)+\]|\\[dws]|[A-Za-z0-9])([*+])\$", re.DOTALL)


def strings(atom: Atom, backend: Backend) -> Iterator[Schema]:
    said = dict(atom.simple)
    # xgrammar enforces one of these three; and a format is an annotation.
    sized = bool(said.keys() & {"minLength", "maxLength"})
    if said.get("format") not in FORMATS or sized or "pattern" in said:
        said.pop("format", None)
    if "pattern" in said and backend == "xgrammar":
        said["pattern"] = pattern(said["pattern"], atom.path)
    low, high = int(said.get("minLength", 0)), said.get("maxLength")
    if high is not None and low > high:
        return
    if "pattern" in said and sized and backend == "xgrammar":
        found = _REPEATED.fullmatch(said["pattern"])
        if found is None:
            keyword = "maxLength" if high is not None else "minLength"
            refuse(atom.path, f"{keyword} beside pattern is not supported")
        low = max(low, int(found[2] == "+"))
        times = f"{{{low},{'' if high is None else int(high)}}}"
        said = {"pattern": f"^{found[1]}{times}$"}
    yield {"type": "string", **said}


def pattern(text: str, path: str) -> str:
    """Return a pattern as xgrammar compiles it. Raises ValueError with the JSON path."""
    try:
        return to_xgrammar(text)
    except ValueError as error:
        refuse(path, str(error))


def numbers(atom: Atom) -> Iterator[Schema]:
    said = dict(atom.simple)
    if atom.type == "integer":
        said = _whole(said, atom.path)
    low, high = said.get("minimum", -math.inf), said.get("maximum", math.inf)
    above, below = said.get("exclusiveMinimum"), said.get("exclusiveMaximum")
    # Of two bounds on one side the tighter one is meant.
    if above is not None:
        said.pop("minimum" if above >= low else "exclusiveMinimum", None)
        low = max(low, above)
    if below is not None:
        said.pop("maximum" if below <= high else "exclusiveMaximum", None)
        high = min(high, below)
    if low < high or (low == high and not said.keys() & {"exclusiveMinimum", "exclusiveMaximum"}):
        yield {"type": atom.type, **said}


def _whole(said: dict[str, Any], path: str) -> dict[str, Any]:
    """Bounds of integers as the integers that they leave."""
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
    for keyword in ("minimum", "maximum"):
        if abs(found.get(keyword, 0)) > _MAX_INTEGER:
            refuse(path, f"{keyword}: a bound of integers has 64 bits")
    return found
