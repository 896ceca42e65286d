"""The types of guides, which are those of TensorRT-LLM, and the maximum length of a guide."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""Values of TensorRT-LLM's `guided_decoding_guide_type`.

A guide of the type ``json`` has no text.
"""
Backend = Literal["xgrammar", "llguidance"]
"""Values of TensorRT-LLM's `guided_decoding_backend`."""
Policy = Literal["checked", "unchecked", "none"]
"""Handling of a tenant's guides.

``checked``: the gateway compiles a guide before it sends it to an engine. ``unchecked``: the
gateway sends a guide without a check. ``none``: the gateway refuses guides.
"""

MAX_CHARS = 128 * 1024


class Verdict(NamedTuple):
    """The result of compiling a guide.

    `refusal` is the reason why an engine would fail on the guide; None if the guide is accepted.
    `text` is the guide to send to the engine. `left_out` has the JSON paths of the first keywords
    that are not enforced. `left_out_more` is the number of further such keywords.
    """

    refusal: str | None
    text: str
    left_out: tuple[str, ...] = ()
    left_out_more: int = 0
