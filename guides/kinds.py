"""What kinds of guides there are, as TensorRT-LLM has them, and how long one may be."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""As `guided_decoding_guide_type` has it; ``json`` has no text."""
Backend = Literal["xgrammar", "llguidance"]
"""As `guided_decoding_backend` has it."""
Policy = Literal["checked", "unchecked", "none"]
"""What becomes of a tenant's guides: compiled here first, sent as they are, or refused."""

MAX_CHARS = 128 * 1024


class Verdict(NamedTuple):
    """Why an engine would fail on a guide, None if nothing is wrong with it; and else its text, as
    the engine is to be given it."""

    refusal: str | None
    text: str
