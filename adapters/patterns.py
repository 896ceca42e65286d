"""Keys of `rank_pattern` and `alpha_pattern`, which select modules of an adapter.

PEFT uses a key as a regular expression for the end of a module's path (`get_pattern_key`). The
author of an adapter is not trusted, and some expressions make Python's `re` run practically
forever. Therefore the keys are matched by Rust's `regex`, which pydantic includes. Its time is
bounded by the lengths of text and expression. `re` and `regex` agree for all expressions that
`_LANGUAGE` accepts. Other expressions (look-around, back-references, flags) are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic_core import SchemaError, SchemaValidator, core_schema

MAX_PATTERN = 256

_ATOM = r"[A-Za-z0-9_.-]|\\[.dw-]|\[\^?(?:[A-Za-z0-9_.](?:-[A-Za-z0-9])?|\\[.dw-])+\]"
_REPEAT = r"[*+?]\??|(?<!\))\{[0-9]{1,2}(?:,[0-9]{0,2})?\}\??"
# Syntax of an allowed key. Matching a key against this regular expression takes linear time,
# because all its alternatives start with different characters, and none starts with a repetition.
_LANGUAGE = re.compile(rf"(?:\((?:\?:|(?!\?))|[|^$]|\\b|(?:{_ATOM}|\))(?:{_REPEAT})?)*")
ALLOWED = (
    f"up to {MAX_PATTERN} characters of names, . | ( ) (?: ) ^ $ \\. \\d \\w \\b, classes such as "
    "[a-z0-9], and * + ? {n,m}, the last with numbers below 100 and not behind a group"
)
# Replacements of \d and \w by ASCII classes. Module paths are ASCII, and Rust compiles \d and \w to
# large Unicode tables.
_ASCII = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}


class NotAllowed(ValueError):
    """A key does not have the format `ALLOWED`. It may still be a valid regular expression."""


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A compiled key of `rank_pattern` or `alpha_pattern`.

    `matches` returns True in the same cases as the expression that PEFT evaluates:
    ``re.match(rf"(.*\\.)?({key})$", path)``.
    """

    key: str
    _validator: SchemaValidator

    @classmethod
    def compile(cls, key: str) -> ModulePattern:
        """Compile a key. Raise `NotAllowed`, or ValueError for an invalid regular expression."""
        if len(key) > MAX_PATTERN or not _LANGUAGE.fullmatch(key):
            raise NotAllowed(f"not of the allowed form: {ALLOWED}")
        expression = rf"(.*\.)?({key})$"
        try:
            re.compile(expression)  # refuse expressions that PEFT could not compile either
            rust = re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), expression)
            schema = core_schema.str_schema(pattern=f"^(?:{rust})", regex_engine="rust-regex")
            return cls(key, SchemaValidator(schema))
        except (re.error, OverflowError, SchemaError) as error:
            raise ValueError(f"not a regular expression: {error}") from error

    def matches(self, module_path: str) -> bool:
        return self._validator.isinstance_python(module_path)
