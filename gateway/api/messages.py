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

from gateway.api import custom_tools
from gateway.api.strict_json import load, load_partial
from gateway.api.successors import Successors
from gateway.api.unions import by_type
from gateway.errors import InvalidRequest
from gateway.parsers.tools.forms import BY_PARAMETERS
from gateway.parsers.tools.ids import TemplateIds


class Strict(BaseModel):
    """No coercion, no unknown fields: what is not understood is refused by name.

    Built when it is first asked for. That takes up to 20 ms once, and a gateway does without the
    memory for protocols that nobody uses of it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)
    successors: ClassVar[Successors] = {}
    """Names to send in place of other endpoints' parameters, of a request."""


class Lenient(Strict):
    """Within a conversation clients send back, and add, what says nothing to the model.

    `cache_control`, `provider_specific_fields`, `thinking_blocks`, `reasoning_details`, a call's
    `index`, `parsed`: there are new ones with each client. What would change the answer has a field
    that refuses it.
    """

    model_config = ConfigDict(extra="ignore")

    @property
    def takes_any_field(self) -> bool:
        """Return True if this server serves no field of the object, so none can be misspelled."""
        return False


FUNCTION_OR_CUSTOM = by_type(
    {"function": "[function]", "custom": "[custom]"}, "function", expected="function or custom"
)


class TextPart(Lenient):
    """Also what an assistant said when it declined: those are its words, all the same."""

    # `input_text` and `output_text` are what the Responses API calls such a part.
    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    # A part of two kinds would lose one of them.
    image_url: None = None
    input_audio: None = None
    audio_url: None = None
    video_url: None = None
    file: None = None


class Arguments(dict[str, Any]):
    """A call's arguments as templates take them: an object, which is its JSON where one adds it to
    text or prints it (DeepSeek's and Phi-4-mini's do: OpenAI's arguments are text).
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)


class FunctionCall(Lenient):
    """`arguments` is JSON text at OpenAI; some clients send the object itself, or null for none."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """With `arguments` as an object and an id that the form's template accepts.

        Raises InvalidRequest.
        """
        arguments: Any = self.function.arguments or "{}"
        if isinstance(arguments, str):
            try:
                arguments = _parse_arguments(arguments, by_parameters=ids.form in BY_PARAMETERS)
            except InvalidRequest as error:
                said = f"messages: of a call, {error.message}"
                raise InvalidRequest(said, param="messages") from None
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
        call_id = ids.of_call(self.id, self.function.name)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


class CustomCall(Lenient):
    name: str
    input: str


class ChatCustomCall(Lenient):
    """A call of a custom tool, which is one of a function to templates."""

    id: str
    type: Literal["custom"]
    custom: CustomCall

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        arguments = custom_tools.input_to_arguments(self.custom.input)
        function = FunctionCall(name=self.custom.name, arguments=arguments)
        return ToolCall(id=self.id, function=function).to_template(ids)


def _parse_arguments(text: str, *, by_parameters: bool) -> Any:
    """What a call's JSON is to templates.

    A call that was cut or malformed goes back as it is, for the model to mend; to a template that
    goes through the parameters, as many of them as are whole. Raises InvalidRequest.
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
    """One chat message; the template decides which roles it accepts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    # Of an assistant that declined: OpenAI's answers then have it in the place of the content.
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
    # What they ask for would be missed: a voice, a call of the old form, an answer that goes on
    # from this message (`continue_final_message`), images of Ollama's form.
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
        # Clients that keep history write an empty list of calls, too.
        if self.model_fields_set & {"content", "tool_calls"}:
            return True
        return any((self.refusal, self.reasoning_content, self.reasoning))

    def to_template(self, ids: TemplateIds) -> dict[str, Any]:
        """The dict that chat templates expect: text content, ids of the model's own form."""
        # Templates know the older name of this role.
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
            # The first templates of DeepSeek-V3 and R1 show a call only where the content is none.
            if ids.form == "deepseek_v3":
                message["content"] = message["content"] or None
        return _to_gpt_oss(message) if ids.form == "openai" else message


def _to_gpt_oss(message: dict[str, Any]) -> dict[str, Any]:
    """As gpt-oss' template takes it: it calls the reasoning `thinking`, and before a call it takes
    that or content, which is reasoning to it."""
    thoughts = [message.pop("reasoning_content", "")]
    if "tool_calls" in message:
        thoughts.append(message["content"])
        message["content"] = ""
    if thinking := "\n".join(filter(None, thoughts)):
        message["thinking"] = thinking
    return message


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def _check_contents(messages: list[Message]) -> list[Message]:
    """Raise InvalidRequest for a message that says nothing.

    An assistant may have called a tool, declined or only thought. Its null may be the answer to an
    earlier request that ended before its content.
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
