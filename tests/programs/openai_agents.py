"""openai-agents for JavaScript, over chat completions and Responses."""

from __future__ import annotations

from tests.programs.npm import NodeScript


class OpenaiAgents(NodeScript):
    name = "openai-agents-js"
    packages = ("@openai/agents", "zod")
    script = "openai_agents.mjs"
    answers = 4
