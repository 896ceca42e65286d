"""Kinds of guides, as in TensorRT-LLM, and the maximum length of a guide."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""Values of `guided_decoding_guide_type`; ``json`` has no text."""
Backend = Literal["xgrammar", "llguidance"]
"""Values of `guided_decoding_backend`."""
Policy = Literal["checked", "unchecked", "none"]
"""Treatment of a tenant's guides: compiled here first, sent unchecked, or refused."""

MAX_CHARS = 128 * 1024


class Verdict(NamedTuple):
    """The result of compiling a guide.

    `refusal` is the reason why an engine would fail on the guide, None if it would not; `text` is
    the guide to send to the engine. `left_out` has the JSON paths of keywords that are not
    enforced, and `left_out_more` counts further ones.
    """

    refusal: str | None
    text: str
    left_out: tuple[str, ...] = ()
    left_out_more: int = 0
