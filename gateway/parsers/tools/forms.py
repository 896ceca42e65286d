"""Formats of tool calls by name, and detection of the format in a chat template.

The names are those of vLLM's parsers. Each format has a parser class, or a `TaggedForm` that
describes its tags. The format `openai` (harmony) also contains reasoning, so the module
`parsers.harmony` parses it.

See decision 017 in docs/decisions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from gateway.parsers.tools.llama import LlamaToolParser
from gateway.parsers.tools.mistral import MistralToolParser
from gateway.parsers.tools.parser import ToolParser
from gateway.parsers.tools.pythonic import PythonicToolParser
from gateway.parsers.tools.tagged import Name, ParameterTags, TaggedForm

Form = Literal[
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax",
    "minimax_m2",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
]

# The comment above each format shows an example of calls in this format, and names its source.

# Example:
# <tool_call>
# {"name": "get_weather", "arguments": {"city": "Paris"}}
# </tool_call>
# Source: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5, Qwen3, Granite 4.
_HERMES = TaggedForm(("<tool_call>",), ("</tool_call>",))

# Example:
# <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
# Source: the chat templates of Granite 3.0 to 3.3. One of these templates writes <tool_call>
# instead.
_GRANITE = TaggedForm(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))

# Example:
# <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
# functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
# Source: the model card of Phi-4-mini for the first line, and vLLM's chat template for the second.
_PHI4_MINI = TaggedForm(("<|tool_call|>", "functools"), ("<|/tool_call|>",))

# Example:
# <tool_calls>
# {"name": "get_weather", "arguments": {"city": "Paris"}}
# {"name": "get_time", "arguments": {}}
# </tool_calls>
# Source: the chat template of MiniMax-M1. The chat templates of Jamba and Hunyuan-A13B have a list
# of calls between these tags.
_MINIMAX = TaggedForm(("<tool_calls>",), ("</tool_calls>",))

# Example:
# <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
# ```json
# {"city": "Paris"}
# ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
# Source: the chat templates of DeepSeek-V3 and R1.
_DEEPSEEK_OPENINGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_CLOSINGS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = TaggedForm(
    _DEEPSEEK_OPENINGS,
    ("```", *_DEEPSEEK_CLOSINGS),
    Name("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json"),
)

# Example:
# <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
# <｜tool▁call▁end｜><｜tool▁calls▁end｜>
# The model writes these two lines as one line.
# Source: the chat template of DeepSeek-V3.1.
_DEEPSEEK_V31 = TaggedForm(
    _DEEPSEEK_OPENINGS,
    _DEEPSEEK_CLOSINGS,
    Name("<｜tool▁call▁begin｜>", after="<｜tool▁sep｜>"),
)

# Example:
# <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
# {"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
# The model writes these two lines as one line. The id of a call consists of the function's name and
# the number of earlier calls.
# Source: the chat templates of Kimi-K2.
_KIMI_K2 = TaggedForm(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    Name(
        "<|tool_call_begin|>",
        after="<|tool_call_argument_begin|>",
        pattern=re.compile(r"(?:functions\.)?(.+?)(?::\d+)?"),
    ),
)

# Example:
# <tool_call>
# <function=get_weather>
# <parameter=city>
# Paris
# </parameter>
# </function>
# </tool_call>
# Source: the chat template of Qwen3-Coder.
_QWEN3_CODER = TaggedForm(
    ("<tool_call>", "<function="),
    ("</function>", "</tool_call>"),
    Name("<function=", after=">"),
    ParameterTags(("<parameter=", ">"), ("", "</parameter>"), lines=True),
)

# Example:
# <tool_call>get_weather
# <arg_key>city</arg_key>
# <arg_value>Paris</arg_value>
# </tool_call>
# Source: the chat templates of GLM-4.5 to 4.7. The template of 4.7 writes no line breaks.
_GLM45 = TaggedForm(
    ("<tool_call>",),
    ("</tool_call>",),
    Name("<tool_call>"),
    ParameterTags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
)

# Example:
# <minimax:tool_call>
# <invoke name="get_weather">
# <parameter name="city">Paris</parameter>
# </invoke>
# </minimax:tool_call>
# Source: the chat template of MiniMax-M2.
_MINIMAX_M2 = TaggedForm(
    ("<minimax:tool_call>", '<invoke name="'),
    ("</invoke>", "</minimax:tool_call>"),
    Name('<invoke name="', after='">'),
    ParameterTags(('<parameter name="', '">'), ("", "</parameter>")),
)

PARSERS: Mapping[Form, type[ToolParser] | TaggedForm] = MappingProxyType(
    {
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v31": _DEEPSEEK_V31,
        "glm45": _GLM45,
        "granite": _GRANITE,
        "hermes": _HERMES,
        "kimi_k2": _KIMI_K2,
        "llama3_json": LlamaToolParser,
        "minimax": _MINIMAX,
        "minimax_m2": _MINIMAX_M2,
        "mistral": MistralToolParser,
        "phi4_mini_json": _PHI4_MINI,
        "pythonic": PythonicToolParser,
        "qwen3_coder": _QWEN3_CODER,
    }
)

BY_PARAMETERS: frozenset[Form] = frozenset(
    form
    for form, parser in PARSERS.items()
    if isinstance(parser, TaggedForm) and parser.parameters is not None
)
"""Formats in which each argument has its own tags.

The chat templates of these formats contain a loop over the arguments of each earlier tool call in
the conversation. The template must therefore get the arguments as an object, not as JSON text.
"""

# Words by which `guess` detects a format. The result is the first format whose words are all in the
# chat template. A single word may be ambiguous: several formats have `<tool_call>`, and many
# templates have `{"name": ...}`, because they list functions as JSON.
_WORDS: tuple[tuple[Form, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax", ("<tool_calls>", '"arguments"')),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)


def guess(chat_template: str) -> Form | None:
    """Return the format of calls that a chat template asks for. Return None if it is unknown."""
    return next(
        (form for form, words in _WORDS if all(word in chat_template for word in words)), None
    )
