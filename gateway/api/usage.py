"""`usage` of an answer: what is told, and its form in the OpenAPI document."""

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
        Field(description="Left out where it would tell a tenant what others have sent."),
    ] = PromptTokensDetails(cached_tokens=0)


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def final_usage(
    last: Sequence[TextDelta], *, prompt_tokens: int, tells_cached: bool
) -> dict[str, Any]:
    """Of an answer whose choices have these last deltas.

    Without `tells_cached` no cached tokens are told.
    """
    told = usage_so_far(prompt_tokens, sum(delta.tokens for delta in last))
    if tells_cached:
        cached = cached_tokens(last, prompt_tokens)
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return told


def cached_tokens(last: Sequence[TextDelta], prompt_tokens: int) -> int:
    """Those of the prompts that were in the engine's KV cache before.

    The choices of one prompt share its cache, so the least cached choice counts.
    """
    reused = min(delta.stats.reused_tokens if delta.stats else 0 for delta in last)
    return min(reused, prompt_tokens)
