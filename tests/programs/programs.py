"""All programs, in the order of the report."""

from __future__ import annotations

from tests.programs.ai_sdk import AiSdk
from tests.programs.aider import Aider
from tests.programs.claude_code import ClaudeCode
from tests.programs.cline import Cline
from tests.programs.codex import Codex
from tests.programs.continue_cli import ContinueCli
from tests.programs.go_module import OpenaiGo
from tests.programs.guidellm import Guidellm
from tests.programs.inspect_ai import InspectAi
from tests.programs.langchain_js import LangchainJs
from tests.programs.lm_eval import LmEval
from tests.programs.maven import LangChain4j, OpenaiJava, SpringAi
from tests.programs.open_webui import OpenWebui
from tests.programs.openai_agents import OpenaiAgents
from tests.programs.opencode import Opencode
from tests.programs.pi import Pi
from tests.programs.program import Program
from tests.programs.qwen_code import QwenCode
from tests.programs.smolagents import Smolagents

PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        Codex(),
        ClaudeCode(),
        Opencode(),
        QwenCode(),
        Cline(),
        ContinueCli(),
        Pi(),
        AiSdk(),
        LangchainJs(),
        Aider(),
        InspectAi(),
        LmEval(),
        Guidellm(),
        Smolagents(),
        OpenWebui(),
        OpenaiJava(),
        LangChain4j(),
        SpringAi(),
        OpenaiGo(),
        OpenaiAgents(),
    )
}
