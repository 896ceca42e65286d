"""Request models of OpenAI's chat completions and completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator

from gateway.api.field_types import JsonInt, TokenIds, allow_unset
from gateway.api.openai.chat_tools import (
    AllowedChoice,
    ChatCustomTool,
    CustomChoice,
    NamedChoice,
    Tool,
    ToolChoice,
    Tools,
)
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.guides import (
    build_argument_guides,
    build_either_guide,
    build_strict_argument_guides,
    build_tool_guide,
    get_format_schema,
)
from gateway.api.openai.messages import Messages
from gateway.api.openai.turns import check_result
from gateway.api.successors import OF_CHATS, OF_COMPLETIONS
from gateway.api.validation import list_names, show_value
from gateway.errors import InvalidRequest
from gateway.generation.lora import Lora
from gateway.generation.options import DEFAULT_CALLER, MAX_CHOICES, Caller, Guide, Options
from gateway.parsers.message import MessageForm
from gateway.parsers.tools.either import Either
from gateway.parsers.tools.forced import ForcedCall

TOOL_PATH = re.compile(r"tools\[(\d+)\]\.function\.(\w+)")
"""Pattern of a path such as `tools[0].function.parameters`.

The number in brackets is the tool's position among the tools that `tool_choice` allows.
"""
_MAX_BYTES_OUTSIDE_PROMPT = 64 * 1024
"""Maximum bytes of an echoed text, which stays in memory until the answer ends.

If `truncate_prompt_tokens` is set, the same maximum applies to the schemas of all tools together.
The limit on the prompt's length does not bound these texts: see `_check_size_outside_prompt`.
"""


class ChatCompletionRequest(GenerationRequest):
    """A request for the next message of a chat."""

    successors = OF_CHATS

    messages: Messages
    max_completion_tokens: JsonInt | None = Field(
        None, ge=1, json_schema_extra=allow_unset("max_completion_tokens")
    )
    logprobs: bool | None = None
    top_logprobs: JsonInt | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt.",
                param="continue_final_message",
            )
        self._check_size_outside_prompt()
        self._check_tool_messages()
        if self.tools or self.tool_choice is not None:
            self._check_tool_names()
        return self

    def _check_tool_messages(self) -> None:
        """Raise InvalidRequest for a tool message whose call is not in an earlier message."""
        if "tool" not in [message.role for message in self.messages]:
            return
        calls: set[str] = set()
        for number, message in enumerate(self.messages):
            if message.role == "tool" and message.tool_call_id is not None:
                where = f"messages[{number}].tool_call_id"
                check_result(message.tool_call_id, calls, where, "call", "message")
            if message.tool_calls:
                calls.update([call.id for call in message.tool_calls])

    def _check_tool_names(self) -> None:
        """Raise InvalidRequest for tool names that are unknown or ambiguous.

        A name in `allowed_tools` must be the name of a tool. A function must not have the name
        of a custom tool, or the name of another function with a different schema.
        """
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, AllowedChoice):
            names = {tool.function.name for tool in tools}
            for number, allowed in enumerate(choice.allowed_tools.tools):
                if allowed.name not in names:
                    where = f"tool_choice.allowed_tools.tools[{number}]"
                    raise InvalidRequest(
                        f"{where}: found {show_value(allowed.name)}, not the name of a tool; "
                        f"allowed: {list_names(sorted(names))}.",
                        param=where,
                    )
        if custom := self.custom_names:
            for number, tool in enumerate(tools):
                if tool.type == "function" and tool.function.name in custom:
                    where = f"tools[{number}].function.name"
                    raise InvalidRequest(
                        f"{where}: found {tool.function.name!r}, also the name of a custom tool.",
                        param=where,
                    )
        self._check_schemas()

    def _check_schemas(self) -> None:
        """Raise InvalidRequest for two tools with the same name and different schemas.

        The model would read both schemas, but guided decoding could enforce only one.
        """
        known: dict[str, dict[str, Any] | None] = {}
        for number, tool in enumerate(self.callable_tools):
            name, schema = tool.function.name, tool.function.parameters
            if known.setdefault(name, schema) != schema:
                where = self.describe_path(f"tools[{number}].function.parameters")
                raise InvalidRequest(
                    f"{where}: found another schema than an earlier tool {name!r} has; "
                    "rename one of the two.",
                    param=where,
                )

    def _check_size_outside_prompt(self) -> None:
        """Raise InvalidRequest if the echoed text or the tools' schemas are too large.

        Both are held in memory until the answer ends. The limit on the prompt's length does not
        bound their size. Templates remove reasoning from messages, so the prompt may be shorter
        than the echoed text. With `truncate_prompt_tokens`, the prompt is cut before its length is
        checked.
        """
        sizes = {"echo": len(self.echo_text.encode())}
        if self.truncate_prompt_tokens is not None:
            schemas = [orjson.dumps(tool.function.parameters) for tool in self.tools or ()]
            sizes["tools"] = sum(map(len, schemas))
        for param, size in sizes.items():
            if size > _MAX_BYTES_OUTSIDE_PROMPT:
                raise InvalidRequest(
                    f"{param}: found {size} bytes; allowed: {_MAX_BYTES_OUTSIDE_PROMPT}"
                    f"{' with truncate_prompt_tokens' if param == 'tools' else ''}.",
                    param=param,
                )

    @property
    def output_limit(self) -> int | None:
        """Maximum number of tokens to generate; None for no limit.

        `max_completion_tokens` is the newer name of `max_tokens` and takes precedence.
        """
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def build_guide(self) -> tuple[Guide | None, str | None]:
        guide, param = super().build_guide()
        if (either := self._build_either_guide()) is not None:
            return either, param
        if self.forced_call is None:
            return guide, param
        if guide is not None:
            raise InvalidRequest(
                f"tool_choice cannot force a call together with {param}.", param="tool_choice"
            )
        if not self.tools:
            raise InvalidRequest("tool_choice forces a call but tools is empty.", param="tools")
        guide = build_tool_guide(
            self.callable_tools,
            self.forced_call,
            parallel=self._parallel,
            describe_path=self.describe_path,
        )
        return guide, "tool_choice"

    def describe_path(self, path: str) -> str:
        found = TOOL_PATH.fullmatch(path)
        if found is None:
            return path
        return f"tools[{self._callable_indexes[int(found[1])]}].function.{found[2]}"

    def build_guide_parts(self) -> Sequence[tuple[Guide, str]]:
        tools = self.callable_tools
        parts: list[tuple[Guide, str]] = []
        if self.forced_call is not None:
            of_tools = build_argument_guides(tools, self.forced_call)
        elif self.either is not None:
            guide, param = super().build_guide()
            parts += [(guide, param)] if guide and param else []
            of_tools = build_strict_argument_guides(tools)
        else:
            return ()
        parts += [
            (guide, self.describe_path(f"tools[{n}].function.parameters")) for n, guide in of_tools
        ]
        return parts

    def build_looser_guide(self) -> Guide | None:
        if self.either is None or all(tool.function.strict for tool in self.callable_tools):
            return None
        return self._build_either_guide(strict_alone=True)

    def _build_either_guide(self, *, strict_alone: bool = False) -> Guide | None:
        wanted = self.response_format
        if self.either is None or wanted is None:
            return None
        return build_either_guide(
            wanted,
            self.callable_tools,
            parallel=self._parallel,
            describe_path=self.describe_path,
            strict_alone=strict_alone,
        )

    @property
    def _parallel(self) -> bool:
        return self.parallel_tool_calls is not False

    @cached_property
    def _callable_indexes(self) -> Sequence[int]:
        """The index in `tools` of each tool that `tool_choice` allows."""
        tools, choice = self.tools or [], self.tool_choice
        if not isinstance(choice, AllowedChoice):
            return range(len(tools))
        names = {tool.name for tool in choice.allowed_tools.tools}
        return [n for n, tool in enumerate(tools) if tool.function.name in names]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that `tool_choice` allows."""
        tools = self.tools or []
        return [tools[n] for n in self._callable_indexes]

    @cached_property
    def custom_names(self) -> frozenset[str]:
        """The names of the request's custom tools."""
        if not self.tools:
            return frozenset()
        custom = [tool for tool in self.tools if isinstance(tool, ChatCustomTool)]
        return frozenset([tool.custom.name for tool in custom])

    @property
    def plain_text_tools(self) -> frozenset[str]:
        """The names of tools whose arguments the model may write as plain text instead of JSON."""
        return self.custom_names

    @property
    def grammar_unenforced(self) -> bool:
        """True if a custom tool has a grammar. No grammar of a custom tool is enforced.

        False if `tool_choice` is none, as no tool can then be called.
        """
        if self.tool_choice == "none":
            return False
        return any(isinstance(tool, ChatCustomTool) and tool.grammar for tool in self.tools or ())

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that chat templates get; None if the request has no tools.

        These are the tools that `tool_choice` allows. With `tool_choice: none`, these are all
        tools.
        """
        if not self.tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.callable_tools]

    @property
    def allows_calls(self) -> bool:
        """True if the answer may or must call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def strict_unenforced(self) -> str | None:
        """The path of the first `strict: true` that cannot be enforced; None if there is none.

        `strict` is enforced if the answer must begin with a call, or must be either calls or JSON.
        In other answers, the model may write text before a call. Guided decoding would then have to
        begin in the middle of the answer. This needs structural tags, which no release of NVIDIA's
        Triton models for TensorRT-LLM supports.
        """
        if self.forced_call is not None or self.either is not None or self.tool_choice == "none":
            return None
        strict = (i for i, tool in enumerate(self.tools or ()) if tool.function.strict)
        return next((f"tools[{index}].function.strict" for index in strict), None)

    @property
    def format_excludes_tools(self) -> bool:
        """True if no tool can be called because the answer must match a format.

        The engine enforces the format from the first token on. This excludes calls, unless calls
        can be distinguished from text in this format (see `either`).
        """
        return self._tools_may_be_called and self._has_format and self.either is None

    @property
    def either(self) -> Either | None:
        """The format of answers that may be either tool calls or text in the response format.

        None if the request allows only calls or only text, or if calls could not be distinguished
        from text in this format.
        """
        wanted = self.response_format
        if wanted is None or self.structured_outputs is not None or not self._tools_may_be_called:
            return None
        return Either.beside(get_format_schema(wanted))

    @property
    def _tools_may_be_called(self) -> bool:
        return self.allows_calls and self.forced_call is None

    @property
    def _has_format(self) -> bool:
        plain = self.response_format is None or self.response_format.is_plain
        return not plain or self.structured_outputs is not None

    @property
    def num_alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        return None

    @property
    def echo_text(self) -> str:
        """The text that the answer repeats at its beginning; empty for none.

        As at vLLM, `echo` repeats the last message of a chat, if the assistant wrote that message.
        """
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def forced_call(self) -> ForcedCall | None:
        """The call that the answer must make; None if no call is required."""
        choice = self.tool_choice
        if choice is None:
            return None
        if isinstance(choice, NamedChoice | CustomChoice):
            return ForcedCall(choice.name)
        if isinstance(choice, AllowedChoice):
            choice = choice.allowed_tools.mode
        return ForcedCall() if choice == "required" else None


class CompletionRequest(GenerationRequest):
    """A request to continue one or more prompts.

    `prompt` is a text, a list of texts, a list of token ids, or a list of lists of token ids.
    """

    successors = OF_COMPLETIONS

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    )

    max_tokens: JsonInt | None = Field(None, ge=0, json_schema_extra=allow_unset("max_tokens"))
    logprobs: JsonInt | None = Field(None, ge=0, le=20)
    best_of: JsonInt | None = Field(None, ge=1, le=20)

    @model_validator(mode="after")
    def _check_fields(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens: 0 is of use with echo or prompt_logprobs only.", param="max_tokens"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("best_of: must not be less than n.", param="best_of")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise InvalidRequest("best_of: choosing the best excludes stream.", param="best_of")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    def build_options(
        self,
        lora: Lora | None = None,
        message: MessageForm | None = None,
        caller: Caller = DEFAULT_CALLER,
    ) -> Options:
        """Return the request as `Options`, like the base class, but with `echo` and `best_of`.

        For `best_of`, also request log probabilities, which show the likeliest choices.
        """
        options = super().build_options(lora, message, caller)
        if self.echo:
            options = replace(options, echo=True)
        if self.best_of is None or self.best_of == options.n:
            return options
        if self.logprobs is None:
            options = replace(options, logprobs_param="best_of")
        params = replace(options.params, logprobs=self.logprobs or 0)
        return replace(options, params=params, n=self.best_of)

    @property
    def num_sequences(self) -> int:
        return super().num_sequences if self.best_of is None else self.best_of

    @property
    def num_returned(self) -> int | None:
        return self.n or 1 if self.best_of is not None else None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts: all are texts, or all are lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


# Build the validators now. At the first request, this would block the event loop and so delay
# running streams.
ChatCompletionRequest.model_rebuild()
CompletionRequest.model_rebuild()
