"""The classes of a ``Request``'s fields (TensorRT-LLM v0.17)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any

from triton_repo.cpu_executor.checks import (
    Field,
    ReadOnly,
    as_bool,
    as_duration,
    as_float,
    as_int,
    as_ints,
    as_str,
    as_tensor,
    check,
    optional,
)


class LoraConfig:
    """A LoRA adapter. The first request with a ``task_id`` must have the tensors.

    Attributes:
        weights: ``[rows, width]`` in the engine's dtype. A row has the values of A ``[rank, in]``,
            then the values of B ``[out, rank]``, then zeros.
        config: int32 ``[rows, 3 or 4]``, each row ``[module_id, layer, rank]``, optionally followed
            by a DoRA flag.
    """

    task_id = ReadOnly(as_int)
    weights = ReadOnly(optional(as_tensor))
    config = ReadOnly(optional(as_tensor))

    def __init__(self, task_id: int, weights: Any = None, config: Any = None) -> None:
        self.task_id = task_id
        self.weights = weights
        self.config = config
        if self.weights is not None or self.config is not None:
            check(
                self.weights is not None and self.config is not None,
                "Request for LoRA inference with lora weights must also have lora config",
            )
        if self.weights is not None and self.config is not None:
            check(self.weights.ndim == 2, "Expected weights tensor to have 2 dimensions")
            check(self.config.ndim == 2, "Expected config tensor to have 2 dimensions")
            check(
                self.weights.shape[0] == self.config.shape[0],
                "Expected dim 0 of lora weights and lora config to have the same size",
            )


class PromptTuningConfig:
    """A p-tuning table ``[virtual tokens, hidden]``, and an optional extra id per input token.

    Extra ids matter for the reuse of KV cache blocks: they distinguish prompts with equal token ids
    and different tables.
    """

    embedding_table = ReadOnly(as_tensor)
    input_token_extra_ids = ReadOnly[list[int] | None](optional(list))

    def __init__(
        self, embedding_table: Any, input_token_extra_ids: Iterable[int] | None = None
    ) -> None:
        self.embedding_table = embedding_table
        check(self.embedding_table.ndim == 2, "Expected prompt embedding table to be 2-D")
        self.input_token_extra_ids = input_token_extra_ids


class ExternalDraftTokensConfig:
    """Draft tokens of an external draft model.

    ``logits`` are ``[tokens, vocab]``. ``acceptance_threshold`` is above 0 and at most 1.
    """

    tokens = ReadOnly(as_ints)
    logits = ReadOnly(optional(as_tensor))
    acceptance_threshold = ReadOnly(optional(as_float))
    fast_logits = ReadOnly(optional(as_bool))

    def __init__(
        self,
        tokens: Iterable[int],
        logits: Any = None,
        acceptance_threshold: float | None = None,
        fast_logits: bool | None = None,
    ) -> None:
        self.tokens = tokens
        check(bool(self.tokens), "!mTokens.empty()")
        self.logits = logits
        self.acceptance_threshold = acceptance_threshold
        if self.acceptance_threshold is not None:
            check(
                0 < self.acceptance_threshold <= 1,
                "mAcceptanceThreshold.value() > 0.f && mAcceptanceThreshold.value() <= 1.f",
            )
        self.fast_logits = fast_logits


class TokenRange:
    """Retention priority (0 to 100) of the KV cache blocks of tokens ``[token_start, token_end)``.

    If ``token_end`` is None, the range includes all later tokens. If ``duration_ms`` is None, the
    priority does not expire.
    """

    token_start = Field(as_int)
    token_end = Field(optional(as_int))
    priority = Field(as_int)
    duration_ms = Field(optional(as_duration))

    def __init__(
        self,
        token_start: int,
        token_end: int | None,
        priority: int,
        duration_ms: timedelta | float | None = None,
    ) -> None:
        self.token_start = token_start
        self.token_end = token_end
        self.priority = priority
        check(0 <= self.priority <= 100, "Invalid priority value. Must be between 0 and 100")
        self.duration_ms = duration_ms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenRange) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class KvCacheRetentionConfig:
    """Eviction priorities of a request's KV cache blocks; the default priority is 35."""

    TokenRangeRetentionConfig = TokenRange

    token_range_retention_configs = ReadOnly[list[TokenRange]](list)
    decode_retention_priority = ReadOnly(as_int)
    decode_duration_ms = ReadOnly(optional(as_duration))

    def __init__(
        self,
        token_range_retention_configs: Iterable[TokenRange],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | float | None = None,
    ) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        ranges = sorted(self.token_range_retention_configs, key=lambda r: r.token_start)
        for left, right in itertools.pairwise(ranges):
            check(
                left.token_end is not None and left.token_end <= right.token_start,
                "Token ranges must not overlap",
            )
        self.decode_retention_priority = decode_retention_priority
        check(
            0 <= self.decode_retention_priority <= 100,
            "Invalid priority value. Must be between 0 and 100",
        )
        self.decode_duration_ms = decode_duration_ms


class GuideKind(IntEnum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3


class GuidedDecodingParams:
    """Constraint that the output of a request must follow.

    ``guide_type`` is JSON (any JSON object or array), JSON_SCHEMA, REGEX, or EBNF_GRAMMAR (a
    grammar with the start rule ``root``). ``guide`` is the text of the schema, the regular
    expression or the grammar. Only the type JSON does not need it.
    """

    GuideType = GuideKind

    guide_type = ReadOnly(GuideKind)
    guide = ReadOnly(optional(as_str))

    def __init__(self, guide_type: GuideKind, guide: str | None = None) -> None:
        self.guide_type = guide_type
        self.guide = guide
        check(
            self.guide is not None or self.guide_type == GuideKind.JSON,
            "The guide string must be provided unless using GuideType.JSON",
        )


class LookaheadDecodingConfig:
    """Sizes for lookahead decoding. The CPU executor refuses a request with this object."""

    max_window_size = ReadOnly(as_int)
    max_ngram_size = ReadOnly(as_int)
    max_verification_set_size = ReadOnly(as_int)

    def __init__(
        self, max_window_size: int, max_ngram_size: int, max_verification_set_size: int
    ) -> None:
        self.max_window_size = max_window_size
        self.max_ngram_size = max_ngram_size
        self.max_verification_set_size = max_verification_set_size


class MropeConfig:
    """Multimodal rotary positions. The CPU executor refuses a request with this object."""

    mrope_rotary_cos_sin = ReadOnly(as_tensor)
    mrope_position_deltas = ReadOnly(as_int)

    def __init__(self, mrope_rotary_cos_sin: Any, mrope_position_deltas: int) -> None:
        self.mrope_rotary_cos_sin = mrope_rotary_cos_sin
        self.mrope_position_deltas = mrope_position_deltas


class EagleConfig:
    """Options of Eagle speculative decoding, which the CPU executor does not support."""

    eagle_choices = ReadOnly[Any](optional(list))
    greedy_sampling = ReadOnly(as_bool)
    posterior_threshold = ReadOnly(optional(as_float))

    def __init__(
        self,
        eagle_choices: Iterable[Iterable[int]] | None = None,
        greedy_sampling: bool = True,
        posterior_threshold: float | None = None,
    ) -> None:
        self.eagle_choices = eagle_choices
        self.greedy_sampling = greedy_sampling
        self.posterior_threshold = posterior_threshold
