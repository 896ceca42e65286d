"""Conversion of guides (schemas, regular expressions and grammars) to grammars for llguidance.

A converted guide allows the same texts as the guided decoding backend of TensorRT-LLM.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, regex_to_lark

from guides.ebnf import to_lark
from guides.kinds import Backend, Kind

# Schema for the type `json`: xgrammar's grammar for any JSON allows only an object or an array at
# the top level.
_ANY_JSON = {"type": ["object", "array"]}
# White space that is allowed between JSON tokens: a space, or a line break with indentation. If
# white space were unlimited, a small model might generate white space without end.
_WHITESPACE = r"\n[ \t]{0,20}| "
# Turn off forced tokens. If only one text can follow, llguidance would not ask the model, but
# tokenize this text itself. The tokenizer may return a special token, which has no text.
_OPTIONS = '%llguidance {"no_forcing": true}'


def to_grammar(kind: Kind, text: str, backend: Backend) -> str:
    """Return a guide as a grammar for llguidance's `LLMatcher`.

    With the backend `xgrammar`, unknown keywords of a JSON schema are ignored, and a grammar is in
    xgrammar's EBNF. With `llguidance`, unknown keywords are refused, and a grammar is in
    llguidance's Lark. Raise ValueError for an invalid guide. Raise RecursionError for JSON that is
    nested too deep.
    """
    return LLMatcher.grammar_from_lark(_lark(kind, text, backend))


def _lark(kind: Kind, text: str, backend: Backend) -> str:
    if kind == "regex":
        # Make \d and \w match only ASCII, as in ECMAScript.
        return f"{_OPTIONS}\nstart: /{regex_to_lark(text, 'dw')}/"
    if kind == "ebnf_grammar":
        return text if backend == "llguidance" else f"{_OPTIONS}\n{to_lark(text)}"
    schema = _ANY_JSON if kind == "json" else json.loads(text)
    # Add the options only to an object: True and False are schemas, too, but have no options.
    if isinstance(schema, dict):
        options = {"whitespace_pattern": _WHITESPACE, "lenient": backend == "xgrammar"}
        schema = {**schema, "x-guidance": options}
    return f"{_OPTIONS}\nstart: %json {json.dumps(schema)}"
