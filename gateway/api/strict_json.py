"""Parsing of untrusted JSON in bounded time.

The rules are stricter than RFC 8259 and follow I-JSON (RFC 7493): UTF-8, numbers that fit 64 bits,
no NaN, no lone surrogates, no duplicate keys.

Two limits protect the code that uses the parsed value. The maximum number of values bounds the time
of validation. The maximum nesting depth is below the recursion limits of orjson (254 levels) and
pydantic (255 levels).

See decision 037 in docs/decisions.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import orjson
from pydantic_core import from_json

from gateway.errors import InvalidRequest

_MAX_DEPTH = 100
# Maximum number of objects and arrays together in a JSON text. The maximum number of keys and
# strings together is the same. Parsing and validating 200,000 objects takes about 0.2 s.
_MAX_PARTS = 200_000
_MAX_KEYS = 4096  # per object: pydantic takes 4 us for the error about each unknown key
_CONTAINERS = frozenset({dict, list})
_SHORT_BYTES = 16 * 1024


def load(
    text: bytes,
    what: str = "The body",
    *,
    repeated_keys: bool = False,
    max_depth: int = _MAX_DEPTH,
) -> Any:
    """Parse a JSON text and return its value.

    Raise InvalidRequest if the text is not valid or exceeds a limit.

    Args:
        text: the JSON text.
        what: the name of the text, with which the error's message begins.
        repeated_keys: True to accept duplicate keys and use the last value, for text that a model
            wrote.
        max_depth: the maximum nesting depth.
    """
    plain = _strip_strings(text, what)
    containers, colons = plain.count(b"{") + plain.count(b"["), plain.count(b":")
    _check_parts(containers, "objects and arrays", what)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}.") from error
    if len(text) <= _SHORT_BYTES and containers <= max_depth and colons <= _MAX_KEYS:
        # orjson uses only the last of duplicate keys. So if the value has fewer keys than the text,
        # the text has duplicates. Serializing the value and counting the colons outside of strings
        # is faster than visiting each key.
        keys = _strip_strings(orjson.dumps(value), what).count(b":")
    else:
        keys, largest = _count_keys(value, what, max_depth)
        if largest > _MAX_KEYS:
            raise InvalidRequest(f"{what} has an object of {largest} keys; allowed: {_MAX_KEYS}.")
    if keys != colons and not repeated_keys:
        raise InvalidRequest(
            f"{what} has the key {_find_repeated_key(text)!r} twice in one object."
        )
    return value


def load_partial(text: bytes, what: str) -> dict[str, Any]:
    """Parse a truncated JSON object that a model wrote, and return its complete members.

    Return an empty dict for any other text. Raise InvalidRequest if the text has too many objects,
    arrays, keys or strings.
    """
    plain = _strip_strings(text, what)
    _check_parts(plain.count(b"{") + plain.count(b"["), "objects and arrays", what)
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def load_object(body: bytes) -> dict[str, Any]:
    """Parse a request's body as a JSON object. Raise InvalidRequest if it is anything else."""
    value = load(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _strip_strings(text: bytes, what: str) -> bytes:
    """Return a JSON text without its strings. Raise InvalidRequest for too many strings."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_parts(text.count(b'"') // 2, "keys and strings", what)
    return b"".join(text.split(b'"')[::2])


def _check_parts(count: int, kind: str, what: str) -> None:
    if count > _MAX_PARTS:
        raise InvalidRequest(f"{what} has {count} {kind}; allowed: {_MAX_PARTS}.")


def _count_keys(value: Any, what: str, max_depth: int) -> tuple[int, int]:
    """Return the number of keys in all objects together, and in the largest object.

    Raise InvalidRequest if the value is nested too deeply.
    """
    level = [value] if type(value) in _CONTAINERS else []
    depth = total = largest = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise InvalidRequest(f"{what} is nested more than {max_depth} levels deep.")
        below: list[Any] = []
        for container in level:
            inner = container
            if type(container) is dict:
                total += len(container)
                largest = max(largest, len(container))
                inner = container.values()
            # Check the items with `map`, which runs in C. The slower list comprehension runs only
            # if there are containers among the items.
            if not _CONTAINERS.isdisjoint(map(type, inner)):
                below += [item for item in inner if type(item) in _CONTAINERS]
        level = below
    return total, largest


def _find_repeated_key(text: bytes) -> str:
    """Return the first duplicate key of a text. orjson does not report duplicates."""
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        counts = Counter(key for key, _ in pairs)
        found.extend(key for key, count in counts.items() if count > 1)

    json.loads(text, object_pairs_hook=note)
    return found[0]
