"""The AI SDK, over chat completions, Responses and Messages."""

from __future__ import annotations

from tests.programs.npm import NodeScript


class AiSdk(NodeScript):
    name = "ai-sdk"
    packages = (*("ai", "zod", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"),)
    script = "ai_sdk.mjs"
    answers = 12
