"""The keys of `rank_pattern` and `alpha_pattern`: which modules of an adapter one means.

PEFT takes a key as a regular expression for the end of a module's path (`get_pattern_key`). An
adapter's author is a stranger, and Python's own matcher can be made to run for ever, so keys are
matched by Rust's `regex`, which pydantic brings along: its time grows with the text and with the
expression, whatever is in them. The two agree on everything that `_LANGUAGE` lets through; the rest
(look-around, back-references, flags) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic_core import SchemaError, SchemaValidator, core_schema

MAX_PATTERN = 256

_ATOM = r"[A-Za-z0-9_.-]|\\[.dw-]|\[\^?(?:[A-Za-z0-9_.](?:-[A-Za-z0-9])?|\\[.dw-])+\]"
_REPEAT = r"[*+?]\??|(?<!\))\{[0-9]{1,2}(?:,[0-9]{0,2})?\}\??"
# No two alternatives begin alike, and no token begins with a repeat: matching it is linear.
_LANGUAGE = re.compile(rf"(?:\((?:\?:|(?!\?))|[|^$]|\\b|(?:{_ATOM}|\))(?:{_REPEAT})?)*")
ALLOWED = (
    f"up to {MAX_PATTERN} characters of names, . | ( ) (?: ) ^ $ \\. \\d \\w \\b, classes such as "
    "[a-z0-9], and * + ? {n,m}, the last with numbers below 100 and not behind a group"
)
# Paths of modules are ASCII; Rust's own \d and \w are large tables of Unicode.
_ASCII = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}


class NotAllowed(ValueError):
    """A key that may be an expression, but not one of `ALLOWED`."""


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One key. `matches` is what PEFT's ``re.match(rf"(.*\\.)?({key})$", path)`` says."""

    key: str
    _validator: SchemaValidator

    @classmethod
    def compile(cls, key: str) -> ModulePattern:
        """Raises `NotAllowed`, and ValueError for what is no regular expression."""
        if len(key) > MAX_PATTERN or not _LANGUAGE.fullmatch(key):
            raise NotAllowed(f"not of the allowed form: {ALLOWED}")
        expression = rf"(.*\.)?({key})$"
        try:
            re.compile(expression)  # what PEFT could not have used either
            rust = re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), expression)
            schema = core_schema.str_schema(pattern=f"^(?:{rust})", regex_engine="rust-regex")
            return cls(key, SchemaValidator(schema))
        except (re.error, OverflowError, SchemaError) as error:
            raise ValueError(f"not a regular expression: {error}") from error

    def matches(self, module_path: str) -> bool:
        return self._validator.isinstance_python(module_path)
