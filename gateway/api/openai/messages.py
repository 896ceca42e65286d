"""Models of OpenAI's chat messages, and their conversion to the input of chat templates."""

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
    """Base class of models that refuse unknown fields and do not convert types.

    With `defer_build`, pydantic builds a model's validator at the first use of the model. Building
    takes up to 20 ms. So protocols that no client uses take no memory for validators.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)
    successors: ClassVar[Successors] = {}
    """Names to suggest to a client that sends another endpoint's parameter to this endpoint.

    The keys are parameters of other endpoints. The values are the names to use here instead.
    """


class Lenient(Strict):
    """Base class of models for objects within a conversation. Unknown fields are ignored.

    Clients send many fields that do not affect the prompt, for example `cache_control`, `parsed`
    and `reasoning_details`. A field that would change the answer must not be ignored: define it in
    the model, with a type that refuses all values.
    """

    model_config = ConfigDict(extra="ignore")

    @property
    def takes_any_field(self) -> bool:
        """True if this server reads no field of the object, so unknown fields are not reported."""
        return False


FUNCTION_OR_CUSTOM = by_type(
    {"function": "[function]", "custom": "[custom]"}, "function", expected="function or custom"
)


class TextPart(Lenient):
    """A text part of a message's content, or the text of a refusal by the assistant."""

    # `input_text` and `output_text` are the names in the Responses API.
    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    # Refuse these fields: a part that has text and, say, an image would silently lose the image.
    image_url: None = None
    input_audio: None = None
    audio_url: None = None
    video_url: None = None
    file: None = None


class Arguments(dict[str, Any]):
    """A call's arguments for chat templates: a dict that converts to JSON when used as a string.

    Most templates take the arguments as an object. Some (DeepSeek, Phi-4-mini) concatenate or print
    the arguments, since OpenAI's `arguments` is a string.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)


class FunctionCall(Lenient):
    """The name and arguments of a call. `arguments` is JSON text; some clients send an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """Return the call for a chat template.

        `arguments` is an object if the JSON is valid, and `id` has the format that the model's
        template accepts. Raise InvalidRequest for arguments above the limits of `strict_json`.
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
    """A call of a custom tool. Chat templates get a function call instead."""

    id: str
    type: Literal["custom"]
    custom: CustomCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        arguments = custom_tools.input_to_arguments(self.custom.input)
        function = FunctionCall(name=self.custom.name, arguments=arguments)
        return ToolCall(id=self.id, function=function).to_template(ids)


def _parse_arguments(text: str, *, by_parameters: bool) -> Any:
    """Return a call's arguments for a chat template, parsed from JSON text.

    Truncated or malformed text is returned unchanged, so the model sees and can correct its error.

    If `by_parameters` is True, the template iterates over the arguments, so a dict is always
    returned. For truncated JSON, the dict has the complete members. For JSON that is not an object,
    the dict is empty.

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
    """A chat message. The chat template may refuse some of the roles."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    # The text with which the assistant refused to answer. OpenAI sends it instead of `content`.
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
    # Refuse these fields, because ignoring them would change the answer: audio, a tool call in
    # OpenAI's older form, images in Ollama's format, and `partial` and `prefix`. The last two mark
    # a message that the answer should continue; here, the parameter `continue_final_message` does
    # that.
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
        # Accept an empty list of calls, which clients that store the history may send.
        if self.model_fields_set & {"content", "tool_calls"}:
            return True
        return any((self.refusal, self.reasoning_content, self.reasoning))

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """Return the message for a chat template: content as text, ids in the template's format."""
        # Send `developer` as `system`: templates only know this older name of the role.
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
            # Send null for empty content: the first templates of DeepSeek-V3 and R1 show a call
            # only if the content is null.
            if ids.form == "deepseek_v3":
                message["content"] = message["content"] or None
        return _to_gpt_oss(message) if ids.form == "openai" else message


def _to_gpt_oss(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message for gpt-oss' chat template, which names the reasoning `thinking`.

    The template refuses a message with a call, content and reasoning. So in a message with a call,
    the content is appended to `thinking`. The message is changed in place.
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

    A message of the assistant may have tool calls, a refusal or reasoning instead of content. The
    assistant's `content` may also be null, if an answer ended before any content was generated.
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
