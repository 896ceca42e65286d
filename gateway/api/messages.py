"""Chat messages, tools and tool choices as OpenAI defines them, and as chat templates take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gateway.api.strict_json import load
from gateway.parsers.tools.forms import Form
from gateway.parsers.tools.ids import template_id


class Strict(BaseModel):
    """No coercion, no unknown fields: what is not understood is refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """`parsed_arguments` repeats `arguments` in the objects of openai-python's helpers."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # left over where a client put streamed pieces together

    def for_template(self, form: Form | None) -> dict[str, Any]:
        """With `arguments` as an object and an id that the form's template accepts."""
        arguments: Any = self.function.arguments or "{}"
        try:
            orjson.loads(arguments)
        except orjson.JSONDecodeError:
            pass  # a call that was cut or malformed goes back as it is, for the model to mend
        else:
            arguments = load(arguments.encode(), "messages: tool_calls.function.arguments")
        call_id = template_id(form, self.id) if form else self.id
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


class Message(Strict):
    """One chat message; the template decides which roles it accepts.

    Clients hand back an answer's message as they got it, so its other fields are known when they
    are empty, and `parsed`, which repeats `content`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self, form: Form | None) -> dict[str, Any]:
        """The dict that chat templates expect: text content, ids of the model's own form."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # Templates know the older name of this role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if (thought := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = thought
        if self.tool_call_id is not None:
            call_id = self.tool_call_id
            message["tool_call_id"] = template_id(form, call_id) if form else call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(form) for call in self.tool_calls]
        return message


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=2048)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class FunctionChoice(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`text`, `json_object`, or `json_schema` with the schema that the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's extension; exactly one of its fields is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
