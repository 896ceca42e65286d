"""Field types shared by the requests of several protocols, with their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from gateway.api.openai.parameter_table import UNSET
from gateway.errors import InvalidRequest
from gateway.generation.options import MODEL_MAXIMUM

MAX_IDS = 1 << 18  # more than the longest context of any model
_MAX_STOPS = 16
_MAX_BAD_WORDS = 64
# Maximum number of characters of all strings in `bad_words` together. The engine gets each string
# as token ids, with and without a leading space, and again for each choice. A character may take 4
# token ids.
_MAX_BAD_WORD_CHARS = 4096
INT32 = 2**31
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def _to_int(value: Any) -> Any:
    """Convert a float without a fraction, such as 30.0, to an integer.

    Other values are returned unchanged. Some clients write all numbers as floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_int64(value: Any) -> Any:
    """Convert a value like `_to_int`. Raise PydanticCustomError if an integer exceeds 64 bits.

    orjson reads an integer that exceeds 64 bits as the nearest float. A float that equals
    `MIN_INT64` may come from such an integer, so this float is refused, too. pydantic's limits `ge`
    and `le` are not used, because its error messages would print the limits as floats.
    """
    number = _to_int(value)
    if type(number) is int:
        is_inside = MIN_INT64 <= number <= MAX_INT64
        if not is_inside or (isinstance(value, float) and number == MIN_INT64):
            raise PydanticCustomError(
                "int64", f"Input should be an integer from {MIN_INT64} to {MAX_INT64}"
            )
    return number


def _check_truncated_length(value: int) -> int:
    if value < 1 and value != MODEL_MAXIMUM:
        raise PydanticCustomError(
            "length", "Input should be at least 1, or -1 for as many as the model takes"
        )
    return value


def _check_total_chars(bad_words: list[str]) -> list[str]:
    chars = sum(map(len, bad_words))
    if chars > _MAX_BAD_WORD_CHARS:
        raise InvalidRequest(
            f"bad_words: found {chars} characters in all; allowed: {_MAX_BAD_WORD_CHARS}.",
            param="bad_words",
        )
    return bad_words


def allow_unset(name: str) -> Callable[[dict[str, Any]], None]:
    """Return a `json_schema_extra` function that adds the values in `UNSET[name]` to a schema.

    For the parameter `name`, these values mean the same as null.
    """

    def add(schema: dict[str, Any]) -> None:
        schema["anyOf"] += [{"const": value, "description": "As null."} for value in UNSET[name]]

    return add


JsonInt = Annotated[int, BeforeValidator(_to_int)]
"""An integer. A float without a fraction, such as 30.0, is converted to an integer."""
Int64 = Annotated[
    int,
    BeforeValidator(_to_int64),
    Field(json_schema_extra={"minimum": MIN_INT64, "maximum": MAX_INT64}),
]
TruncatedLength = Annotated[
    JsonInt,
    AfterValidator(_check_truncated_length),
    Field(json_schema_extra={"minimum": MODEL_MAXIMUM}),
]
TokenId = Annotated[int, Field(ge=0, lt=INT32)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
# An empty string in a list would have no effect, so it is refused as a mistake.
Word = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
# Unlike a `Word`, this may be empty: some clients send an empty string to set no stop string.
StopString = Annotated[str, StringConstraints(max_length=1024)]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=_MAX_STOPS)]
StopStrings = Annotated[list[Word], Field(fail_fast=True, max_length=_MAX_STOPS)]
BadWords = Annotated[
    list[Word], Field(fail_fast=True, max_length=_MAX_BAD_WORDS), AfterValidator(_check_total_chars)
]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]
