"""The fields that chat and completion requests have in common, and their conversion to `Options`.

Reference: OpenAI API, "Create chat completion" and "Create completion" (2026). As at OpenAI, types
are strict: a number in quotes is an error.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from gateway.api.field_types import (
    INT32,
    BadWords,
    Bias,
    Int64,
    JsonInt,
    StopString,
    StopStrings,
    StopTokenIds,
    TruncatedLength,
    allow_unset,
)
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.formats import ResponseFormat, StructuredOutputs
from gateway.api.openai.guides import build_format_guide, build_structured_guide
from gateway.api.openai.messages import Strict
from gateway.errors import InvalidRequest
from gateway.generation.lora import Lora
from gateway.generation.options import (
    DEFAULT_CALLER,
    MAX_CHOICES,
    Caller,
    GenerationParams,
    Guide,
    Options,
    PlainParameter,
)
from gateway.parsers.message import MessageForm

# For each penalty, the value that has no effect.
_NEUTRAL_PENALTIES: dict[PlainParameter, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_PENALTY_NAMES = frozenset(_NEUTRAL_PENALTIES)
_TOKEN_ID = re.compile("[0-9]{1,10}")


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    # Volcengine's name for `continuous_usage_stats`. It also works without `include_usage`.
    chunk_include_usage: bool | None = None


class GenerationRequest(Strict):
    """Base class of chat and completion requests, with vLLM's extensions of OpenAI's parameters.

    `top_k` -1 and 0 mean no limit.
    """

    model: str
    max_tokens: JsonInt | None = Field(None, ge=1, json_schema_extra=allow_unset("max_tokens"))
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: JsonInt | None = Field(None, ge=-1, le=1024)
    seed: Int64 | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, allow_inf_nan=False)
    min_tokens: JsonInt | None = Field(None, ge=0, lt=INT32)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    truncate_prompt_tokens: TruncatedLength | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: JsonInt | None = Field(
        None, ge=0, le=20, json_schema_extra=allow_unset("prompt_logprobs")
    )
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    stop: StopString | StopStrings | None = None
    n: JsonInt | None = Field(None, ge=1, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_alternatives(self) -> int | None:
        """Number of alternative tokens to report with each generated token.

        None if no log probabilities are reported at all.
        """
        return None

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate for each prompt."""
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def num_returned(self) -> int | None:
        """Number of choices to return for each prompt; None to return all choices.

        If more choices are generated, the likeliest ones are returned.
        """
        return None

    @property
    def echo_text(self) -> str:
        """Text with which the answer to a chat begins before the generated text; "" for none.

        Only requests with the parameter `echo` have such a text.
        """
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

    def build_options(
        self,
        lora: Lora | None = None,
        message: MessageForm | None = None,
        caller: Caller = DEFAULT_CALLER,
    ) -> Options:
        """Return the request as `Options`.

        Missing parameters get OpenAI's defaults: temperature 1, top_p 1, a random seed.

        Args:
            lora: the adapter that serves the request.
            message: the `MessageForm` for parsing the answer; None if the answer is plain text.
            caller: the tenant that sent the request, with the tenant's priority and time limits.

        Raises:
            InvalidRequest: Parameters contradict each other, or a format is malformed.
        """
        guide, param = self.build_guide()
        self._check_beams(guide)
        if self.output_limit is not None and (self.min_tokens or 0) > self.output_limit:
            raise InvalidRequest("min_tokens must not exceed max_tokens.", param="min_tokens")
        if self.stream and self.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs excludes stream.", param="prompt_logprobs")
        stop = [self.stop] if self.stop and isinstance(self.stop, str) else self.stop or ()
        params = GenerationParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_tokens=self.min_tokens or 0,
            plain=()
            if _PENALTY_NAMES.isdisjoint(self.model_fields_set)
            else self._list_penalties(),
            logit_bias=self._parse_bias(),
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            # The tenant's bill includes the number of cached tokens, so ask the engine for this
            # number even if the answer does not report it.
            usage=not self.stream or self.include_usage or caller.billed,
            logprobs=self.num_alternatives,
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
            # Ignore `prompt_logprobs: 0` in a stream, as vLLM does.
            prompt_logprobs=None if self.stream else self.prompt_logprobs,
            stream=bool(self.stream),
            token_ids=bool(self.return_token_ids),
            guide_param=param,
            guide_parts=self.build_guide_parts,
            looser_guide=self.build_looser_guide(),
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
            "logprobs": self.num_alternatives is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "response_format": guide,
        }
        for name, given in excluded.items():
            if given:
                raise InvalidRequest(f"use_beam_search excludes {name}.", param=name)

    def _list_penalties(self) -> tuple[tuple[PlainParameter, float], ...]:
        given = [(name, getattr(self, name)) for name in _NEUTRAL_PENALTIES]
        return tuple(
            (name, v) for name, v in given if v is not None and v != _NEUTRAL_PENALTIES[name]
        )

    def _parse_bias(self) -> tuple[tuple[int, float], ...]:
        """Return `logit_bias` as (token id, bias) pairs.

        Raise InvalidRequest for a key that is not a token id.
        """
        bias = self.logit_bias or {}
        if wrong := [key for key in bias if not _TOKEN_ID.fullmatch(key)]:
            raise InvalidRequest(
                f"logit_bias: found the key {wrong[0][:40]!r}; allowed: token ids.",
                param="logit_bias",
            )
        return tuple((int(key), value) for key, value in bias.items())

    def build_guide(self) -> tuple[Guide | None, str | None]:
        """Return the guide (constraint for guided decoding), and the parameter that sets the guide.

        Both are None if the answer may be any text. Raise InvalidRequest for a malformed format,
        and if several parameters set a guide.
        """
        found: list[tuple[Guide, str]] = []
        if self.response_format is not None:
            guide = build_format_guide(self.response_format, self.describe_path)
            found += [(guide, self.describe_path("response_format"))] if guide else []
        if self.structured_outputs is not None:
            found.append((build_structured_guide(self.structured_outputs), "structured_outputs"))
        if len(found) > 1:
            raise InvalidRequest(
                "response_format and structured_outputs exclude each other.",
                param="structured_outputs",
            )
        return found[0] if found else (None, None)

    def describe_path(self, path: str) -> str:
        """Convert the path of a field of the chat request to the path in the client's protocol."""
        return path

    def build_guide_parts(self) -> Sequence[tuple[Guide, str]]:
        """Return the guides that `build_guide` combines into one guide; () if it combines none.

        Each guide is paired with the path of its parameter. If the combined guide is invalid, the
        gateway compiles each part separately to find the invalid parameter.
        """
        return ()

    def build_looser_guide(self) -> Guide | None:
        """Return a guide that is less strict than that of `build_guide`; None if there is none.

        The gateway uses the returned guide in two cases: if the stricter guide does not compile, or
        if it does not check the tenant's guides (`Caller.guides` is `unchecked`). This base class
        returns None.
        """
        return None
