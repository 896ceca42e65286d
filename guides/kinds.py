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
    """The result of compiling a guide.

    `refusal` is why an engine would fail on the guide, None if it would not; `text` is the guide as
    the engine is to be given it. `left_out` has the JSON paths of keywords that are not enforced,
    and `left_out_more` counts further ones.
    """

    refusal: str | None
    text: str
    left_out: tuple[str, ...] = ()
    left_out_more: int = 0
