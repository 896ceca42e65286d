"""``Request`` of ``tensorrt_llm.bindings.executor`` (TensorRT-LLM v0.17)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.checks import (
    Field,
    as_bool,
    as_float,
    as_int,
    as_ints,
    as_str,
    as_tensor,
    as_words,
    check,
    optional,
)
from triton_repo.cpu_executor.enums import RequestType
from triton_repo.cpu_executor.request_config import (
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    PromptTuningConfig,
)
from triton_repo.cpu_executor.sampling_config import OutputConfig, SamplingConfig


def _instance(kind: type) -> Any:
    def convert(value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"incompatible argument: expected {kind.__name__}, found {value!r}")
        return value

    return convert


class Request:
    """A prompt, and the options of generation.

    ``max_tokens`` is required; ``max_new_tokens`` is v0.17's name of the same field. Generation
    does not stop at EOS if ``end_id`` is None or -1. ``bad_words`` and ``stop_words`` are lists of
    words, each a list of token ids. ``embedding_bias``, ``[vocab]``, is added to the logits. The
    properties ``sampling_config`` and ``output_config`` return copies.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    streaming = Field(as_bool)
    return_all_generated_tokens = Field(as_bool)
    end_id = Field(optional(as_int))
    pad_id = Field(optional(as_int))
    position_ids = Field(optional(as_ints))
    bad_words = Field(optional(as_words))
    stop_words = Field(optional(as_words))
    external_draft_tokens_config = Field[Any](_instance(ExternalDraftTokensConfig))
    prompt_tuning_config = Field[Any](_instance(PromptTuningConfig))
    mrope_config = Field[Any](_instance(MropeConfig))
    lora_config = Field[LoraConfig | None](_instance(LoraConfig))
    lookahead_config = Field[Any](_instance(LookaheadDecodingConfig))
    kv_cache_retention_config = Field[KvCacheRetentionConfig | None](
        _instance(KvCacheRetentionConfig)
    )
    eagle_config = Field[Any](_instance(EagleConfig))
    guided_decoding_params = Field[GuidedDecodingParams | None](_instance(GuidedDecodingParams))
    context_phase_params = Field[Any](lambda value: value)
    logits_post_processor_name = Field(optional(as_str))
    encoder_input_token_ids = Field(optional(as_ints))
    encoder_input_features = Field(optional(as_tensor))
    encoder_output_length = Field(optional(as_int))
    cross_attention_mask = Field(optional(as_tensor))
    skip_cross_attn_blocks = Field(optional(as_tensor))
    client_id = Field(optional(as_int))
    priority = Field(
        as_float, lambda x: None if 0 <= x <= 1 else "priority >= 0.f && priority <= 1.f"
    )
    request_type = Field(RequestType)

    def __init__(
        self,
        input_token_ids: Iterable[int],
        max_tokens: int | None = None,
        *,
        max_new_tokens: int | None = None,
        streaming: bool | None = False,
        sampling_config: SamplingConfig | None = None,
        output_config: OutputConfig | None = None,
        end_id: int | None = None,
        pad_id: int | None = None,
        position_ids: Iterable[int] | None = None,
        bad_words: Iterable[Iterable[int]] | None = None,
        stop_words: Iterable[Iterable[int]] | None = None,
        embedding_bias: Any = None,
        external_draft_tokens_config: ExternalDraftTokensConfig | None = None,
        prompt_tuning_config: PromptTuningConfig | None = None,
        mrope_config: MropeConfig | None = None,
        lora_config: LoraConfig | None = None,
        lookahead_config: LookaheadDecodingConfig | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        logits_post_processor_name: str | None = None,
        encoder_input_token_ids: Iterable[int] | None = None,
        client_id: int | None = None,
        return_all_generated_tokens: bool = False,
        priority: float = 0.5,
        type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
        context_phase_params: Any = None,
        encoder_input_features: Any = None,
        encoder_output_length: int | None = None,
        cross_attention_mask: Any = None,
        eagle_config: EagleConfig | None = None,
        skip_cross_attn_blocks: Any = None,
        guided_decoding_params: GuidedDecodingParams | None = None,
    ) -> None:
        self._input_token_ids = as_ints(input_token_ids)
        limit = max_new_tokens if max_tokens is None else max_tokens
        if limit is None:
            raise TypeError("missing required argument max_tokens")
        self._max_tokens = as_int(limit)
        check(bool(self._input_token_ids), "!mInputTokenIds.empty()")
        check(self._max_tokens > 0, "mMaxNewTokens > 0")
        self.streaming = streaming
        self.sampling_config = SamplingConfig() if sampling_config is None else sampling_config
        self.output_config = OutputConfig() if output_config is None else output_config
        self.end_id = end_id
        self.pad_id = pad_id
        self.position_ids = position_ids
        self.bad_words = bad_words
        self.stop_words = stop_words
        self.embedding_bias = embedding_bias
        self.external_draft_tokens_config = external_draft_tokens_config
        self.prompt_tuning_config = prompt_tuning_config
        self.mrope_config = mrope_config
        self.lora_config = lora_config
        self.lookahead_config = lookahead_config
        self.kv_cache_retention_config = kv_cache_retention_config
        self.logits_post_processor_name = logits_post_processor_name
        self.encoder_input_token_ids = encoder_input_token_ids
        self.client_id = client_id
        self.return_all_generated_tokens = return_all_generated_tokens
        self.priority = priority
        self.request_type = type
        self.context_phase_params = context_phase_params
        self.encoder_input_features = encoder_input_features
        self.encoder_output_length = encoder_output_length
        self.cross_attention_mask = cross_attention_mask
        self.eagle_config = eagle_config
        self.skip_cross_attn_blocks = skip_cross_attn_blocks
        self.guided_decoding_params = guided_decoding_params
        check(
            self.guided_decoding_params is None or self.sampling_config.beam_width == 1,
            "Guided decoding does not support with beam search.",
        )

    @property
    def input_token_ids(self) -> list[int]:
        return list(self._input_token_ids)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def max_new_tokens(self) -> int:
        return self._max_tokens

    @property
    def sampling_config(self) -> SamplingConfig:
        return copy.copy(self._sampling_config)

    @sampling_config.setter
    def sampling_config(self, value: SamplingConfig) -> None:
        if not isinstance(value, SamplingConfig):
            raise TypeError(f"incompatible argument: expected SamplingConfig, found {value!r}")
        self._sampling_config = copy.copy(value)

    @property
    def output_config(self) -> OutputConfig:
        return copy.copy(self._output_config)

    @output_config.setter
    def output_config(self, value: OutputConfig) -> None:
        if not isinstance(value, OutputConfig):
            raise TypeError(f"incompatible argument: expected OutputConfig, found {value!r}")
        self._output_config = copy.copy(value)

    @property
    def embedding_bias(self) -> NDArray[np.float32] | None:
        return self._embedding_bias

    @embedding_bias.setter
    def embedding_bias(self, value: Any) -> None:
        self._embedding_bias: NDArray[np.float32] | None = None
        if value is not None:
            bias = as_tensor(value)
            check(bias.ndim == 1, "embeddingBias.value().getShape().size() == 1")
            self._embedding_bias = bias.astype(np.float32)
