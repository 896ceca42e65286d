"""The `usage` object of an answer, and its pydantic model for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from gateway.deltas import TextDelta

_Count = Annotated[int, Field(ge=0)]


class PromptTokensDetails(BaseModel):
    cached_tokens: _Count


class Usage(BaseModel):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: Annotated[
        PromptTokensDetails,
        Field(description="Left out if it would reveal to a tenant what others have sent."),
    ] = PromptTokensDetails(cached_tokens=0)


def build_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Build a `usage` object that does not report cached prompt tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def build_final_usage(
    last: Sequence[TextDelta], *, prompt_tokens: int, reports_cached: bool
) -> dict[str, Any]:
    """Build the `usage` object of a finished answer.

    Args:
        last: the last delta of each choice, whose `tokens` counts all tokens of the choice.
        prompt_tokens: the number of tokens of all prompts.
        reports_cached: add the number of cached prompt tokens.
    """
    usage = build_usage(prompt_tokens, sum(delta.tokens for delta in last))
    if reports_cached:
        cached = count_cached_tokens(last, prompt_tokens)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def count_cached_tokens(last: Sequence[TextDelta], prompt_tokens: int) -> int:
    """Return the number of prompt tokens that were in the engine's KV cache before the request.

    One choice of a prompt fills the cache for the next choice. So only the choice with the fewest
    cached tokens shows what was cached before the request.
    """
    reused = min(delta.stats.reused_tokens if delta.stats else 0 for delta in last)
    return min(reused, prompt_tokens)
