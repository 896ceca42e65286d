"""Requests as OpenAI defines them, and what becomes of every parameter.

Reference: OpenAI API, "Create chat completion" and "Create completion" (2026). A parameter is
served, accepted without effect because it has no meaning to lose, or refused by name; nothing is
dropped silently. Types are strict: a number in quotes is an error, as at OpenAI.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Lora, Options, Sampling

# No effect on the answer's meaning: bookkeeping, routing and caching hints of OpenAI's platform.
HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Known parameters that change meaning and are not served, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty_decay": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_MAX_STOP = 16
_MAX_CHOICES = 128
_INT64 = 2**63


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


StopString = Annotated[str, StringConstraints(max_length=1024)]


class GenerationRequest(_Strict):
    """What both endpoints share. `top_k` is the extension that vLLM clients send; -1 means off."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=1024)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOP)] | None = None
    n: int | None = Field(None, ge=1, le=_MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    def options(self, lora: Lora | None) -> Options:
        """OpenAI's defaults: temperature 1 and top_p 1, a fresh seed unless one is given.

        An empty stop string stops nothing, and some clients send it for "none".
        """
        sampling = Sampling(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Options(
            sampling=sampling,
            stop=tuple(s for s in stop if s),
            max_tokens=self.output_limit,
            n=self.n or 1,
            lora=lora,
        )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """One chat message; the template decides which roles it accepts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates expect: text content, `arguments` as an object."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # Templates know the older name of this role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [_template_call(call) for call in self.tool_calls]
        return message


def _template_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = orjson.loads(call.function.arguments)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            "messages: tool_calls.function.arguments must be a string of JSON.", param="messages"
        ) from error
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


class ChatCompletionRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def output_limit(self) -> int | None:
        """`max_completion_tokens` replaced `max_tokens` and wins when both are sent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """`prompt`: one text, several, the token ids of one, or the token ids of several."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, all text or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


R = TypeVar("R", bound=GenerationRequest)


def parse(model: type[R], body: bytes) -> R:
    """Validates a JSON body. Raises InvalidRequest or UnsupportedParameter naming the parameter."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise InvalidRequest("The body must be a JSON object.")
    served = {
        name: value
        for name, value in data.items()
        # null means unset: the SDKs send it for parameters that are passed as None.
        if value is not None and _is_served(model, name, value)
    }
    try:
        request = model.model_validate(served)
    except ValidationError as error:
        raise _invalid(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options may only be set together with stream.", param="stream_options"
        )
    return request


def _is_served(model: type[GenerationRequest], name: str, value: Any) -> bool:
    if name in model.model_fields:
        return True
    if name in HARMLESS:
        return False
    neutral = NOT_SERVED.get(name)
    if neutral is None:
        raise InvalidRequest(f"Unrecognized request argument: {name}.", param=name)
    # `in` would take True for 1 and False for 0.
    if any(value == option and type(value) is type(option) for option in neutral):
        return False
    raise UnsupportedParameter(f"{name} is not supported by this server.", param=name)


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first problem, in words that name the parameter and what was wrong with it."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = [part for part in problem["loc"] if not _is_union_branch(part)]
    param = str(location[0]) if location else None
    where = ".".join(map(str, location))
    if problem["type"] == "missing" and len(location) == 1:
        return InvalidRequest(f"You must provide the parameter {where}.", param=param)
    if problem["loc"][0] == "messages" and "literal_error" in problem["type"]:
        return InvalidRequest(f"{where}: {problem['msg']}. Only text is accepted.", param=param)
    return InvalidRequest(f"{where}: {problem['msg']}.", param=param)


def _is_union_branch(part: int | str) -> bool:
    """Pydantic names the tried branch of a union (`str`, `list[...]`) within the location."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)
