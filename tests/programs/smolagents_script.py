"""Agents of smolagents, with complete and with streamed answers.

The code agent runs the code in the answer, which calls a tool. The other agent must call a tool.
"""

import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

url, model_id = sys.argv[1:]


@tool
def read_note(name: str) -> str:
    """Read a note.

    Args:
        name: The name of the note's file.
    """
    return Path(name).read_text(encoding="utf-8")


for streaming in (False, True):
    model = OpenAIModel(model_id=model_id, api_base=f"{url}/v1", api_key="none")
    options = {"model": model, "stream_outputs": streaming, "max_steps": 2}
    agent = CodeAgent(tools=[read_note], **options)
    print(f"\nRead: {agent.run('What does the note say?')}")
    print(f"\nCalled: {ToolCallingAgent(tools=[], **options).run('Answer x.')}")
