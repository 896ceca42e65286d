"""Requests for a generation as OpenAI defines them, and what they ask for.

Reference: OpenAI API, "Create chat completion" and "Create completion" (2026). Types are strict: a
number in quotes is an error, as at OpenAI.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from gateway.api.chunks import UsageFrames
from gateway.api.guides import format_guide, guides_of_tools, structured_guide, tool_guide
from gateway.api.messages import (
    Messages,
    NamedChoice,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    Tools,
)
from gateway.api.parameter_table import UNSET
from gateway.errors import InvalidRequest
from gateway.generation import (
    ANYBODY,
    MAX_CHOICES,
    Caller,
    GenerationParams,
    Guide,
    Lora,
    Options,
    PlainParameter,
    Sampling,
)
from gateway.parsers.message import MessageForm
from gateway.parsers.tools.forced import ForcedCall

MAX_IDS = 1 << 18  # more than the longest context of any model
_MAX_STOP = 16
_MAX_BAD_WORDS = 64
_INT32, _INT64 = 2**31, 2**63
# With the values that ask for nothing.
_PLAIN: dict[PlainParameter, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_PLAIN_NAMES = frozenset(_PLAIN)
_TOKEN_ID = re.compile("[0-9]{1,10}")


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _whole(value: Any) -> Any:
    """Of 30.0, 30: JSON knows one kind of numbers, and some clients write all with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _or_unset(name: str) -> Callable[[dict[str, Any]], None]:
    def add(schema: dict[str, Any]) -> None:
        schema["anyOf"] += [{"const": value, "description": "As null."} for value in UNSET[name]]

    return add


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
# In a list it could only be a mistake: it would stop, or forbid, nothing.
Word = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
# Alone, some clients send an empty one for "none".
StopString = Annotated[str, StringConstraints(max_length=1024)]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=_MAX_STOP)]
StopStrings = Annotated[list[Word], Field(fail_fast=True, max_length=_MAX_STOP)]
BadWords = Annotated[list[Word], Field(fail_fast=True, max_length=_MAX_BAD_WORDS)]


class GenerationRequest(Strict):
    """What both endpoints share, with the extensions that vLLM clients send (`top_k` -1 is off)."""

    model: str
    max_tokens: Whole | None = Field(None, ge=1, json_schema_extra=_or_unset("max_tokens"))
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: Whole | None = Field(None, ge=-1, le=1024)
    seed: Whole | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, allow_inf_nan=False)
    min_tokens: Whole | None = Field(None, ge=0, lt=_INT32)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Whole | None = Field(
        None, ge=0, le=20, json_schema_extra=_or_unset("prompt_logprobs")
    )
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    stop: StopString | StopStrings | None = None
    n: Whole | None = Field(None, ge=1, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each token's log probability; None for neither."""
        return None

    @property
    def sequences(self) -> int:
        """How many are generated for each prompt."""
        return self.n or 1

    @property
    def several(self) -> int:
        """How many prompts."""
        return 1

    @property
    def keep(self) -> int | None:
        """How many of each prompt's choices to return, the likeliest ones; None for all."""
        return None

    @property
    def echoed(self) -> str:
        """What the message of a chat begins with."""
        return ""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_frames(self) -> UsageFrames:
        if not self.include_usage or self.stream_options is None:
            return "none"
        return "each" if self.stream_options.continuous_usage_stats else "last"

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    def options(
        self,
        lora: Lora | None = None,
        message: MessageForm | None = None,
        caller: Caller = ANYBODY,
    ) -> Options:
        """What is asked for, with OpenAI's defaults: temperature 1, top_p 1, a fresh seed.

        `lora` serves it, and `message` says how the answer is read.
        """
        guide, param = self.guide()
        self._check_beams(guide)
        if self.output_limit is not None and (self.min_tokens or 0) > self.output_limit:
            raise InvalidRequest("min_tokens must not exceed max_tokens.", param="min_tokens")
        if self.stream and self.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs excludes stream.", param="prompt_logprobs")
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_tokens=self.min_tokens or 0,
            plain=() if _PLAIN_NAMES.isdisjoint(self.model_fields_set) else self._plain(),
            logit_bias=self._bias(),
        )
        stop = [self.stop] if self.stop and isinstance(self.stop, str) else self.stop or ()
        params = GenerationParams(
            sampling=sampling,
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            # A bill tells of cached tokens even where the answer does not.
            usage=not self.stream or self.include_usage or caller.billed,
            logprobs=self.alternatives,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            lora=lora,
            message=message,
            guide=guide,
        )
        return Options(
            params=params,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            n=self.n or 1,
            max_tokens=self.output_limit,
            beam_search=bool(self.use_beam_search),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            bad_words=tuple(self.bad_words or ()),
            truncate_prompt=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            # As at vLLM, a stream may say 0, and is told of none.
            prompt_logprobs=None if self.stream else self.prompt_logprobs,
            stream=bool(self.stream),
            token_ids=bool(self.return_token_ids),
            guide_param=param,
            guide_parts=self.guide_parts,
            caller=caller,
        )

    def _check_beams(self, guide: Guide | None) -> None:
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise InvalidRequest(
                    "length_penalty is of use with use_beam_search only.", param="length_penalty"
                )
            return
        excluded = {
            "stream": self.stream,
            "logprobs": self.alternatives is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "response_format": guide,
        }
        for name, given in excluded.items():
            if given:
                raise InvalidRequest(f"use_beam_search excludes {name}.", param=name)

    def _plain(self) -> tuple[tuple[PlainParameter, float], ...]:
        given = [(name, getattr(self, name)) for name in _PLAIN]
        return tuple((name, v) for name, v in given if v is not None and v != _PLAIN[name])

    def _bias(self) -> tuple[tuple[int, float], ...]:
        """Token ids come as the keys of a JSON object, so as strings."""
        bias = self.logit_bias or {}
        if wrong := [key for key in bias if not _TOKEN_ID.fullmatch(key)]:
            raise InvalidRequest(
                f"logit_bias: found the key {wrong[0][:40]!r}; allowed: token ids.",
                param="logit_bias",
            )
        return tuple((int(key), value) for key, value in bias.items())

    def guide(self) -> tuple[Guide | None, str | None]:
        """What the answer must match, and the parameter that says so."""
        found: list[tuple[Guide, str]] = []
        if self.response_format is not None:
            guide = format_guide(self.response_format)
            found += [(guide, "response_format")] if guide else []
        if self.structured_outputs is not None:
            found.append((structured_guide(self.structured_outputs), "structured_outputs"))
        if len(found) > 1:
            raise InvalidRequest(
                "response_format and structured_outputs exclude each other.",
                param="structured_outputs",
            )
        return found[0] if found else (None, None)

    def guide_parts(self) -> Sequence[tuple[Guide, str]]:
        """What the guide is made of where that is several, with their parameters."""
        return ()


class ChatCompletionRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: Whole | None = Field(
        None, ge=1, json_schema_extra=_or_unset("max_completion_tokens")
    )
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt.",
                param="continue_final_message",
            )
        return self

    @property
    def output_limit(self) -> int | None:
        """`max_completion_tokens` replaced `max_tokens` and wins when both are sent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def guide(self) -> tuple[Guide | None, str | None]:
        guide, param = super().guide()
        if self.forced is None:
            return guide, param
        if guide is not None:
            raise InvalidRequest(
                f"tool_choice cannot force a call together with {param}.", param="tool_choice"
            )
        if not self.tools:
            raise InvalidRequest("tool_choice forces a call but tools is empty.", param="tools")
        parallel = self.parallel_tool_calls is not False
        return tool_guide(self.tools, self.forced, parallel=parallel), "tool_choice"

    def guide_parts(self) -> Sequence[tuple[Guide, str]]:
        if self.forced is None:
            return ()
        return [
            (guide, f"tools[{index}].function.parameters")
            for index, guide in guides_of_tools(self.tools or [], self.forced)
        ]

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them; None when none may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def strict_unenforced(self) -> str | None:
        """The first `strict` of a tool that is no more than a wish.

        Where the model decides whether it calls, its arguments could be guided from where a call
        begins: by a structural tag, which no release of the model repository takes.
        """
        if self.forced is not None or self.tool_choice == "none":
            return None
        strict = (i for i, tool in enumerate(self.tools or ()) if tool.function.strict)
        return next((f"tools[{index}].function.strict" for index in strict), None)

    @property
    def alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        return None

    @property
    def echoed(self) -> str:
        """As at vLLM: the last message, where the assistant has said that one, too."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def forced(self) -> ForcedCall | None:
        """The call that must happen, None where none must."""
        if isinstance(self.tool_choice, NamedChoice):
            return ForcedCall(self.tool_choice.function.name)
        return ForcedCall() if self.tool_choice == "required" else None


TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]


class CompletionRequest(GenerationRequest):
    """`prompt`: one text, several, the token ids of one, or the token ids of several."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    )

    max_tokens: Whole | None = Field(None, ge=0, json_schema_extra=_or_unset("max_tokens"))
    logprobs: Whole | None = Field(None, ge=0, le=20)
    best_of: Whole | None = Field(None, ge=1, le=20)

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
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
    def alternatives(self) -> int | None:
        return self.logprobs

    def options(
        self,
        lora: Lora | None = None,
        message: MessageForm | None = None,
        caller: Caller = ANYBODY,
    ) -> Options:
        """To choose the best, all are generated, with their log probabilities."""
        options = super().options(lora, message, caller)
        if self.echo:
            options = replace(options, echo=True)
        if self.best_of is None or self.best_of == options.n:
            return options
        if self.logprobs is None:
            options = replace(options, logprobs_param="best_of")
        params = replace(options.params, logprobs=self.logprobs or 0)
        return replace(options, params=params, n=self.best_of)

    @property
    def sequences(self) -> int:
        return super().sequences if self.best_of is None else self.best_of

    @property
    def keep(self) -> int | None:
        return self.n or 1 if self.best_of is not None else None

    @property
    def several(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, all text or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
