"""Types of guides as in TensorRT-LLM, and the maximum length of a guide."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""Values of TensorRT-LLM's `guided_decoding_guide_type`. A guide of the kind ``json`` has no text.
"""
Backend = Literal["xgrammar", "llguidance"]
"""Values of TensorRT-LLM's `guided_decoding_backend`."""
Policy = Literal["checked", "unchecked", "none"]
"""Treatment of a tenant's guides: compiled by the gateway before they are sent, sent without a
check, or refused.
"""

MAX_CHARS = 128 * 1024


class Verdict(NamedTuple):
    """The result of compiling a guide.

    `refusal` is the reason why an engine would fail on the guide; None if the guide is accepted.
    `text` is the guide to send to the engine. `left_out` has the JSON paths of the first keywords
    that are not enforced, and `left_out_more` is the number of further keywords.
    """

    refusal: str | None
    text: str
    left_out: tuple[str, ...] = ()
    left_out_more: int = 0
