"""Request parameters of the Responses API other than items and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from gateway.api.openai.messages import Lenient, Strict
from gateway.errors import InvalidRequest

_Effort = Annotated[str, StringConstraints(max_length=32)]
_Summary = Literal["auto", "concise", "detailed"]
_Name = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[_Name, _Value], Field(max_length=16)]
Label = Annotated[str, StringConstraints(max_length=512)]

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Accepted without effect: these concern item types that this server never produces.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Format(Strict):
    """The format of the answer; `schema` and `name` belong to type `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            where = "text.format.schema"
            raise InvalidRequest(f"{where}: must be given for type json_schema.", param=where)
        schema = {
            "name": self.name or "output",
            "description": self.description,
            "schema": self.schema_,
            "strict": self.strict,
        }
        return {"type": self.type, "json_schema": schema}

    def to_json(self) -> dict[str, Any]:
        """Return the format as the client wrote it."""
        fields = {("schema" if name == "schema_" else name): value for name, value in self}
        return {name: value for name, value in fields.items() if value is not None}


class TextOptions(Strict):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    effort: _Effort | None = None
    summary: _Summary | None = None
    generate_summary: _Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class CacheOptions(Lenient):
    """Options of the prompt cache.

    `prewarm: true` is refused: a request that only fills the cache has no answer.
    """

    prewarm: Literal[False] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None


class ConversationRef(Strict):
    id: str


Conversation = Annotated[
    Annotated[str, Tag("[id]")] | Annotated[ConversationRef, Tag("[object]")],
    Discriminator(lambda value: "[id]" if isinstance(value, str) else "[object]"),
]
