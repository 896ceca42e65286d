"""Conversion of a guide to a grammar of llguidance, in the dialect of TensorRT-LLM's backend."""

from __future__ import annotations

import json

from llguidance import LLMatcher, regex_to_lark

from guides.ebnf import to_lark
from guides.kinds import Backend, Kind

# xgrammar's grammar for the kind `json` begins with one of these two.
_ANY_JSON = {"type": ["object", "array"]}
# A space, or a new line with its indentation. With unlimited whitespace a small model sometimes
# never stops.
_WHITESPACE = r"\n[ \t]{0,20}| "
# If only one text can follow, llguidance would take it from the tokenizer, which may turn it into a
# special token without text.
_OPTIONS = '%llguidance {"no_forcing": true}'


def to_grammar(kind: Kind, text: str, backend: Backend) -> str:
    """Return the grammar for `LLMatcher`.

    xgrammar ignores unknown keywords of JSON schema, llguidance refuses them. EBNF is xgrammar's
    own language in one backend and llguidance's Lark in the other. Raises ValueError, and
    RecursionError for JSON that is nested too deep.
    """
    return LLMatcher.grammar_from_lark(_lark(kind, text, backend))


def _lark(kind: Kind, text: str, backend: Backend) -> str:
    if kind == "regex":
        # As in ECMAScript, \d and \w are ASCII.
        return f"{_OPTIONS}\nstart: /{regex_to_lark(text, 'dw')}/"
    if kind == "ebnf_grammar":
        return text if backend == "llguidance" else f"{_OPTIONS}\n{to_lark(text)}"
    schema = _ANY_JSON if kind == "json" else json.loads(text)
    # True and False are schemas too, but cannot hold options.
    if isinstance(schema, dict):
        options = {"whitespace_pattern": _WHITESPACE, "lenient": backend == "xgrammar"}
        schema = {**schema, "x-guidance": options}
    return f"{_OPTIONS}\nstart: %json {json.dumps(schema)}"
