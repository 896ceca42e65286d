"""What requests for a generation share, and what they ask for.

Reference: OpenAI API, "Create chat completion" and "Create completion" (2026). Types are strict: a
number in quotes is an error, as at OpenAI.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from gateway.api.chunks import UsageFrames
from gateway.api.field_types import (
    INT32,
    BadWords,
    Bias,
    Int64,
    StopString,
    StopStrings,
    StopTokenIds,
    TruncatedLength,
    Whole,
    or_unset,
)
from gateway.api.formats import ResponseFormat, StructuredOutputs
from gateway.api.guides import format_guide, structured_guide
from gateway.api.messages import Strict
from gateway.errors import InvalidRequest
from gateway.generation import (
    DEFAULT_CALLER,
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
    # What Volcengine calls `continuous_usage_stats`, of use without `include_usage`.
    chunk_include_usage: bool | None = None


class GenerationRequest(Strict):
    """What both endpoints share, with the extensions that vLLM clients send (`top_k` -1 is off)."""

    model: str
    max_tokens: Whole | None = Field(None, ge=1, json_schema_extra=or_unset("max_tokens"))
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: Whole | None = Field(None, ge=-1, le=1024)
    seed: Int64 | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, allow_inf_nan=False)
    min_tokens: Whole | None = Field(None, ge=0, lt=INT32)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    truncate_prompt_tokens: TruncatedLength | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Whole | None = Field(
        None, ge=0, le=20, json_schema_extra=or_unset("prompt_logprobs")
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
        options = self.stream_options
        return bool(options and (options.include_usage or options.chunk_include_usage))

    @property
    def usage_frames(self) -> UsageFrames:
        if not self.include_usage or self.stream_options is None:
            return "none"
        options = self.stream_options
        return "each" if options.continuous_usage_stats or options.chunk_include_usage else "last"

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    def options(
        self,
        lora: Lora | None = None,
        message: MessageForm | None = None,
        caller: Caller = DEFAULT_CALLER,
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
            looser_guide=self.looser_guide(),
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
            guide = format_guide(self.response_format, self.name_place)
            found += [(guide, self.name_place("response_format"))] if guide else []
        if self.structured_outputs is not None:
            found.append((structured_guide(self.structured_outputs), "structured_outputs"))
        if len(found) > 1:
            raise InvalidRequest(
                "response_format and structured_outputs exclude each other.",
                param="structured_outputs",
            )
        return found[0] if found else (None, None)

    def name_place(self, place: str) -> str:
        """Return what the protocol calls a schema's place in a chat's request."""
        return place

    def guide_parts(self) -> Sequence[tuple[Guide, str]]:
        """What the guide is made of where that is several, with their parameters."""
        return ()

    def looser_guide(self) -> Guide | None:
        """What to be content with where no engine can enforce the guide."""
        return None
