"""Parameter names to suggest to clients that send a parameter of another endpoint.

There is one mapping for each endpoint. Its keys are the other endpoints' parameters, its values are
the parameters to use instead. A key such as `a.b` also applies to parameters that
`renamed_parameters` converts to the path `a.b`.

If you add a key, also add it to `parameter_table`, to `renamed_parameters` or as a field of a
request. Otherwise the name counts as unknown, and the settings may let unknown parameters pass.
"""

from __future__ import annotations

from collections.abc import Mapping

Successors = Mapping[str, str]

_SYSTEM = "messages with the role system"
_OUTPUT_CONFIG = "output_config.format"

OF_CHATS: Successors = {
    "function_call": "tool_choice",
    "functions": "tools",
    "input": "messages",
    "instructions": _SYSTEM,
    "max_output_tokens": "max_completion_tokens",
    "output_config": "response_format or reasoning_effort",
    "output_format": "response_format",
    "prompt": "messages",
    "stop_sequences": "stop",
    "system": _SYSTEM,
    "text": "response_format",
}
OF_COMPLETIONS: Successors = {
    "input": "prompt",
    "input_ids": "prompt",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "messages": "prompt",
    "output_format": "response_format",
    "prompt_token_ids": "prompt",
    "stop_sequences": "stop",
}
OF_RESPONSES: Successors = {
    "function_call": "tool_choice",
    "functions": "tools",
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "output_config": "text.format or reasoning.effort",
    "output_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "stop_sequences": "stop",
    "structured_outputs": "text.format",
    "system": "instructions",
}
OF_MESSAGES: Successors = {
    "chat_template_kwargs.enable_thinking": "thinking",
    "function_call": "tool_choice",
    "functions": "tools",
    "input": "messages",
    "instructions": "system",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": _OUTPUT_CONFIG,
    "stop": "stop_sequences",
    "structured_outputs": _OUTPUT_CONFIG,
    "text": _OUTPUT_CONFIG,
}
OF_TOKENIZE: Successors = {
    "input": "prompt",
    "instructions": _SYSTEM,
    "system": _SYSTEM,
    "text": "prompt",
}
OF_DETOKENIZE: Successors = {"input_ids": "tokens", "prompt_token_ids": "tokens"}
OF_EMBEDDINGS: Successors = {"input_ids": "input", "messages": "input", "prompt": "input"}
