"""Rendering of chat and completion requests to prompts.

Along with the prompts, each function returns a `MessageForm`, with which the generated text is
parsed into reasoning, content and tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.errors import UnsupportedParameter
from gateway.parsers import harmony
from gateway.parsers.message import MessageForm
from gateway.parsers.reasoning import is_open
from gateway.parsers.tools.ids import TemplateIds
from gateway.pipeline.fit import Prompt
from gateway.tokenization.chat_format import ChatFormat

PromptsAndForm = tuple[Sequence[Prompt], MessageForm | None]
"""The prompts of a request, and the `MessageForm` for parsing the generated text.

The `MessageForm` is None if the generated text is returned as it is.
"""


def get_prompts(wanted: CompletionRequest, _: ChatFormat) -> PromptsAndForm:
    """Return the prompts of a completion request, and None: the answers are plain text."""
    return wanted.prompts, None


def render_chat(wanted: ChatCompletionRequest, chat: ChatFormat) -> PromptsAndForm:
    """Render a chat. Return the prompt, and the `MessageForm` for parsing the answer.

    Raise InvalidRequest if the template refuses the messages. Raise UnsupportedParameter if the
    request offers tools, but the gateway does not know how this model writes tool calls.
    """
    ids = TemplateIds(chat.tool_form)
    messages = [message.to_template(ids) for message in wanted.messages]
    extra = dict(wanted.chat_template_kwargs or {})
    if wanted.reasoning_effort is not None:
        extra["reasoning_effort"] = wanted.reasoning_effort
        if wanted.reasoning_effort == "none":
            extra.setdefault("enable_thinking", False)
    # Guided decoding applies from the first token on, so the answer cannot begin with reasoning.
    guided = wanted.build_guide()[0] is not None
    tools = wanted.offered_tools
    # With `tool_choice: none`, keep the tools in the prompt unless the settings exclude them. The
    # prompt then begins like a prompt with `tool_choice: auto`. The engine may have this beginning
    # in its KV cache.
    if tools and not wanted.allows_calls and chat.excludes_uncallable_tools:
        tools = None
    prompt = chat.render(
        messages,
        tools,
        extra,
        open_turn=wanted.add_generation_prompt is not False,
        continue_last=bool(wanted.continue_final_message),
        guided=guided,
    )
    return [prompt], _make_message_form(chat, wanted, str(prompt), guided=guided)


def _make_message_form(
    chat: ChatFormat, wanted: ChatCompletionRequest, prompt: str, *, guided: bool
) -> MessageForm | None:
    """Return the `MessageForm` for parsing the answer; None if the answer is plain text."""
    tools = None
    guided_calls = wanted.forced_call or wanted.either
    if wanted.allows_calls:
        tools = chat.tool_form
        if tools is None and wanted.forced_call is None:
            raise UnsupportedParameter(
                "This model's chat template teaches no known form of tool calls; "
                "GATEWAY_TOOL_FORM can name one.",
                param="tools",
            )
        if guided and guided_calls is None:
            tools = None  # parse no calls: all text is in the required format
    reasoning = None if guided else chat.reasoning_tags
    channel = None
    if chat.tool_form == "openai" and not guided:
        channel = harmony.read_open_header(prompt)
    if tools is None and reasoning is None and channel is None and guided_calls is None:
        return None
    # Keep only the schemas that the parser needs, as the `MessageForm` stays in memory during the
    # generation. The limit on the prompt's length does not limit the schemas of tools that are not
    # in the prompt. The parser needs a tool's schema to find the types of the arguments. If guided
    # decoding enforces the calls, no schema is needed: the arguments are JSON, which shows the
    # types.
    typed = wanted.callable_tools if tools is not None and guided_calls is None else None
    return MessageForm(
        tools=tools,
        functions={tool.function.name: tool.function.parameters for tool in typed or ()},
        custom=wanted.plain_text_tools if tools is not None else (),
        guided=guided_calls,
        parallel=wanted.parallel_tool_calls is not False,
        reasoning=reasoning,
        reasoning_open=reasoning is not None and is_open(prompt, reasoning),
        channel=channel,
    )
