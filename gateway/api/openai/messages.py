"""Chat messages as OpenAI defines them, and as chat templates take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    Tag,
)
from pydantic_core import PydanticCustomError

from gateway.api.openai import custom_tools
from gateway.api.strict_json import load, load_partial
from gateway.api.successors import Successors
from gateway.api.unions import by_type
from gateway.errors import InvalidRequest
from gateway.parsers.tools.forms import BY_PARAMETERS
from gateway.parsers.tools.ids import TemplateIds


class Strict(BaseModel):
    """Base of models that refuse unknown fields and do not convert types.

    A model is built at its first use. That takes up to 20 ms once, and saves memory for protocols
    that are not used.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)
    successors: ClassVar[Successors] = {}
    """Names to send instead of other endpoints' parameters; for models of requests."""


class Lenient(Strict):
    """Base of models within conversations, which ignore unknown fields.

    Clients send extra fields that mean nothing to the model: `cache_control`, `index` of a call,
    `parsed`, `provider_specific_fields`, `reasoning_details`, `thinking_blocks` and more. A field
    that would change the answer is declared, so that it can be refused.
    """

    model_config = ConfigDict(extra="ignore")

    @property
    def takes_any_field(self) -> bool:
        """True if this server uses no field of the object, so misspelled fields do not matter."""
        return False


FUNCTION_OR_CUSTOM = by_type(
    {"function": "[function]", "custom": "[custom]"}, "function", expected="function or custom"
)


class TextPart(Lenient):
    """A part of a message with text; a refusal of the assistant counts as text, too."""

    # `input_text` and `output_text` are the names in the Responses API.
    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    # Refused, as a part with text and another content would lose the latter.
    image_url: None = None
    input_audio: None = None
    audio_url: None = None
    video_url: None = None
    file: None = None


class Arguments(dict[str, Any]):
    """A call's arguments for chat templates: an object that is JSON when used as text.

    OpenAI's arguments are text, so some templates (DeepSeek, Phi-4-mini) append them to text or
    print them.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)


class FunctionCall(Lenient):
    """The function of a call. `arguments` is JSON text; some clients send an object or null."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """Return the call for a template: `arguments` as an object, and an id in the model's form.

        Raise InvalidRequest for arguments that the template cannot take.
        """
        arguments: Any = self.function.arguments or "{}"
        if isinstance(arguments, str):
            try:
                arguments = _parse_arguments(arguments, by_parameters=ids.form in BY_PARAMETERS)
            except InvalidRequest as error:
                text = f"messages: of a call, {error.message}"
                raise InvalidRequest(text, param="messages") from None
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
        call_id = ids.of_call(self.id, self.function.name)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


class CustomCall(Lenient):
    name: str
    input: str


class ChatCustomCall(Lenient):
    """A call of a custom tool. Templates get it as a call of a function."""

    id: str
    type: Literal["custom"]
    custom: CustomCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        arguments = custom_tools.input_to_arguments(self.custom.input)
        function = FunctionCall(name=self.custom.name, arguments=arguments)
        return ToolCall(id=self.id, function=function).to_template(ids)


def _parse_arguments(text: str, *, by_parameters: bool) -> Any:
    """Parse a call's arguments for templates.

    Truncated or malformed text is returned unchanged, so that the model can correct it. For a
    template that lists the parameters (`by_parameters`), return the complete members instead.

    Raise InvalidRequest for JSON above the limits of `strict_json`.
    """
    raw = text.encode()
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return load_partial(raw, "`arguments`") if by_parameters else text
    found = load(raw, "`arguments`", repeated_keys=True)
    if found is None or (by_parameters and not isinstance(found, dict)):
        return {}
    return found


def _check_off(value: bool) -> bool:
    if value:
        raise PydanticCustomError("off", "Input should be false; see continue_final_message")
    return value


Off = Annotated[bool, AfterValidator(_check_off)]


class Message(Lenient):
    """A chat message; the template decides which roles it accepts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    # Set instead of the content in OpenAI's answers if the assistant declined.
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: (
        Annotated[
            list[
                Annotated[
                    Annotated[ToolCall, Tag("[function]")]
                    | Annotated[ChatCustomCall, Tag("[custom]")],
                    FUNCTION_OR_CUSTOM,
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    tool_call_id: str | None = None
    # Refused, as they would change the answer: a voice, a call in the old form, images in Ollama's
    # form, and prefixes that the answer should continue (use `continue_final_message`).
    audio: None = None
    function_call: None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    partial: Off | None = None
    prefix: Off | None = None

    @property
    def text(self) -> str:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return content or self.refusal or ""

    @property
    def may_lack_content(self) -> bool:
        if self.role != "assistant":
            return False
        # Clients that store the history may send an empty list of calls.
        if self.model_fields_set & {"content", "tool_calls"}:
            return True
        return any((self.refusal, self.reasoning_content, self.reasoning))

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """Return the message for chat templates, with text content and ids in the model's form."""
        # Templates only know the older name of the role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if (thought := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = thought
        if self.tool_call_id is not None:
            message["tool_call_id"] = ids.of_answer(self.tool_call_id)
        if self.tool_calls:
            message["tool_calls"] = [call.to_template(ids) for call in self.tool_calls]
            # The first templates of DeepSeek-V3 and R1 show a call only if the content is null.
            if ids.form == "deepseek_v3":
                message["content"] = message["content"] or None
        return _to_gpt_oss(message) if ids.form == "openai" else message


def _to_gpt_oss(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message for gpt-oss' template, which calls the reasoning `thinking`.

    Before a call it accepts either reasoning or content, so both are joined to `thinking`.
    """
    thoughts = [message.pop("reasoning_content", "")]
    if "tool_calls" in message:
        thoughts.append(message["content"])
        message["content"] = ""
    if thinking := "\n".join(filter(None, thoughts)):
        message["thinking"] = thinking
    return message


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def _check_contents(messages: list[Message]) -> list[Message]:
    """Raise InvalidRequest for a message without content.

    An assistant's message may have a tool call, a refusal or only reasoning instead. Its null may
    also be an answer that ended before its content began.
    """
    if None in [message.content for message in messages]:
        for number, message in enumerate(messages):
            if message.content is None and not message.may_lack_content:
                where = f"messages[{number}].content"
                found = "null" if "content" in message.model_fields_set else "none"
                raise InvalidRequest(
                    f"{where}: found {found}; a message of role {message.role} needs a string or "
                    f"an array of text parts{_OR_CALLS if message.role == 'assistant' else ''}.",
                    param=where,
                )
    return messages


_OR_CALLS = ", or tool_calls or a refusal"
MAX_MESSAGES = 2048
Messages = Annotated[
    list[Message],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    AfterValidator(_check_contents),
]
