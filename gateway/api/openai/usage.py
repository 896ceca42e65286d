"""The `usage` object of an answer, and its model for the OpenAPI document."""

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
    """Build `usage` without cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def build_final_usage(
    last: Sequence[TextDelta], *, prompt_tokens: int, reports_cached: bool
) -> dict[str, Any]:
    """Build `usage` from the last deltas of all choices; cached tokens only if `reports_cached`."""
    usage = build_usage(prompt_tokens, sum(delta.tokens for delta in last))
    if reports_cached:
        cached = count_cached_tokens(last, prompt_tokens)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def count_cached_tokens(last: Sequence[TextDelta], prompt_tokens: int) -> int:
    """Return how many prompt tokens were in the engine's KV cache before the request.

    The choices of one prompt fill the cache for each other, so the least cached choice counts.
    """
    reused = min(delta.stats.reused_tokens if delta.stats else 0 for delta in last)
    return min(reused, prompt_tokens)
