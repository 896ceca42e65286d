"""Models of `response_format` and `structured_outputs`, as OpenAI and other servers define them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from gateway.api.openai.messages import Strict
from gateway.errors import InvalidRequest, UnsupportedParameter


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


def _wrap_schema(value: Any) -> Any:
    """Convert trtllm-serve's `json_schema` to OpenAI's format. Return any other value unchanged.

    In OpenAI's format, the member `schema` is the JSON schema. At trtllm-serve, `json_schema`
    itself is the JSON schema.
    """
    if not isinstance(value, dict) or "schema" in value:
        return value
    return {"schema": value} if value.keys() - {"name", "description", "strict"} else value


def _check_structural_tag(value: Any) -> Any:
    if value:
        raise UnsupportedParameter(
            "response_format: a structural tag is not supported by this server unless it is empty.",
            param="response_format",
        )
    return value


NoStructuralTag = Annotated[Any, AfterValidator(_check_structural_tag)]


class ResponseFormat(Strict):
    """The format that the answer must match.

    OpenAI defines the types `text`, `json_object` and `json_schema`. Other servers add regular
    expressions, grammars, structural tags and `json`, which is the same as `json_object`. At some
    of these servers, the JSON schema is in the member `schema` instead of `json_schema`.
    """

    type: Literal[
        "text", "json_object", "json", "json_schema", "regex", "grammar", "ebnf", "structural_tag"
    ]
    json_schema: Annotated[JsonSchema, BeforeValidator(_wrap_schema)] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    regex: str | None = Field(None, validation_alias=AliasChoices("regex", "pattern"))
    grammar: str | None = Field(None, validation_alias=AliasChoices("grammar", "ebnf"))
    structures: NoStructuralTag = None
    triggers: NoStructuralTag = None
    format: NoStructuralTag = None

    @property
    def is_plain(self) -> bool:
        """Return True if the answer may be any text."""
        return self.type in ("text", "structural_tag")

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> ResponseFormat:
        for name, types in _FORMAT_FIELDS.items():
            if getattr(self, name) is not None and self.type not in types:
                shown = name.rstrip("_")
                raise InvalidRequest(
                    f"response_format.{shown}: found with type {self.type!r}; allowed with: "
                    f"{', '.join(types)}.",
                    param=f"response_format.{shown}",
                )
        return self


_FORMAT_FIELDS = {
    "json_schema": ("json_schema",),
    "schema_": ("json_schema", "json_object", "json"),
    "regex": ("regex",),
    "grammar": ("grammar", "ebnf"),
}
"""For each field of a `response_format`, the types with which the field is allowed."""


class StructuredOutputs(Strict):
    """vLLM's parameter `structured_outputs`. Exactly one field must be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
