"""A task for inspect-ai that requires a tool call."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def read_note() -> Tool:
    async def execute(name: str) -> str:
        """Read a note.

        Args:
            name: The name of the note's file.
        """
        return Path(name).read_text(encoding="utf-8")

    return execute


@task
def notes(path: str, word: str) -> Task:
    sample = Sample(input="What does the note say?", target=word)
    return Task([sample], solver=[use_tools(read_note()), generate()], scorer=includes())
