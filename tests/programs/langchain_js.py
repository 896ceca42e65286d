"""LangChain for JavaScript, over chat completions, Responses and Messages."""

from __future__ import annotations

from tests.programs.npm import NodeScript


class LangchainJs(NodeScript):
    name = "langchain-js"
    packages = ("langchain", "@langchain/core", "@langchain/openai", "@langchain/anthropic", "zod")
    script = "langchain_js.mjs"
    answers = 9
