"""The forms of tool calls by name, and which one a chat template teaches its model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from gateway.parsers.tools.hermes import HermesToolParser
from gateway.parsers.tools.llama import LlamaToolParser
from gateway.parsers.tools.mistral import MistralToolParser
from gateway.parsers.tools.parser import ToolParser
from gateway.parsers.tools.pythonic import PythonicToolParser

Form = Literal["hermes", "llama3_json", "mistral", "pythonic"]

# The names are those of vLLM's parsers.
PARSERS: Mapping[Form, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesToolParser,
        "llama3_json": LlamaToolParser,
        "mistral": MistralToolParser,
        "pythonic": PythonicToolParser,
    }
)


def guess(chat_template: str) -> Form | None:
    """The form that a chat template asks its model for, or None if it is none of ours.

    `<tool_call>` alone says little: Qwen3-Coder and GLM-4.5 have XML within it.
    """
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        foreign = "<function=" in chat_template or "<arg_key>" in chat_template
        return "hermes" if '"arguments"' in chat_template and not foreign else None
    # Both speak of `{"name": ...}` somewhere, as they show the functions as JSON.
    if "[func_name1(" in chat_template:
        return "pythonic"
    if '{"name": function name, "parameters":' in chat_template:
        return "llama3_json"
    return None
