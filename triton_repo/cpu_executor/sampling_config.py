"""``SamplingConfig`` and ``OutputConfig`` of ``tensorrt_llm.bindings.executor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_repo.cpu_executor.checks import Field, as_bool, as_float, as_int, check, optional

# Value of TensorRT-LLM's constant kMaxBeamWidth.
MAX_BEAM_WIDTH = 1024


def _require(test: Callable[[Any], bool], text: str) -> Callable[[Any], str | None]:
    return lambda value: None if value is None or test(value) else text


class SamplingConfig:
    """Sampling parameters of a request. ``None`` selects the default, which ``sampling`` defines.

    ``random_seed`` and ``min_length`` are v0.17's names of ``seed`` and ``min_tokens``. If both
    names are given, the new one takes precedence.
    """

    beam_width = Field(
        as_int,
        _require(lambda x: 0 < x <= MAX_BEAM_WIDTH, "beamWidth > 0 && beamWidth <= kMaxBeamWidth"),
    )
    top_k = Field(optional(as_int), _require(lambda x: x >= 0, "topK.value() >= 0"))
    top_p = Field(
        optional(as_float),
        _require(lambda x: 0 < x <= 1, "topP.value() > 0.f && topP.value() <= 1.f"),
    )
    top_p_min = Field(
        optional(as_float),
        _require(lambda x: 0 <= x <= 1, "topPMin.value() >= 0.f && topPMin.value() <= 1.f"),
    )
    top_p_reset_ids = Field(optional(as_int), _require(lambda x: x >= 0, "topPResetIds >= 0"))
    top_p_decay = Field(
        optional(as_float),
        _require(lambda x: 0 < x <= 1, "topPDecay.value() > 0.f && topPDecay.value() <= 1.f"),
    )
    seed = Field(optional(as_int), _require(lambda x: 0 <= x < 2**64, "seed out of range"))
    temperature = Field(optional(as_float), _require(lambda x: x >= 0, "temperature >= 0.f"))
    min_tokens = Field(optional(as_int), _require(lambda x: x >= 0, "minTokens >= 0"))
    beam_search_diversity_rate = Field(
        optional(as_float), _require(lambda x: x >= 0, "beamSearchDiversityRate >= 0.f")
    )
    repetition_penalty = Field(
        optional(as_float), _require(lambda x: x > 0, "repetitionPenalty > 0.f")
    )
    presence_penalty = Field(optional(as_float))
    frequency_penalty = Field(optional(as_float))
    length_penalty = Field(optional(as_float))
    early_stopping = Field(optional(as_int))
    no_repeat_ngram_size = Field(optional(as_int), _require(lambda x: x >= 0, "value >= 0"))

    def __init__(
        self,
        beam_width: int = 1,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        top_p_min: float | None = None,
        top_p_reset_ids: int | None = None,
        top_p_decay: float | None = None,
        seed: int | None = None,
        random_seed: int | None = None,
        temperature: float | None = None,
        min_tokens: int | None = None,
        min_length: int | None = None,
        beam_search_diversity_rate: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        length_penalty: float | None = None,
        early_stopping: int | None = None,
        no_repeat_ngram_size: int | None = None,
        num_return_sequences: int | None = None,
    ) -> None:
        self.beam_width = beam_width
        self.top_k = top_k
        self.top_p = top_p
        self.top_p_min = top_p_min
        self.top_p_reset_ids = top_p_reset_ids
        self.top_p_decay = top_p_decay
        self.seed = random_seed if seed is None else seed
        self.temperature = temperature
        self.min_tokens = min_length if min_tokens is None else min_tokens
        self.beam_search_diversity_rate = beam_search_diversity_rate
        self.repetition_penalty = repetition_penalty
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        # Check these two values only in the constructor. Like TensorRT-LLM's class, this class does
        # not check a value that is assigned to the attribute later.
        check(length_penalty is None or length_penalty >= 0, "lengthPenalty >= 0.f")
        check(early_stopping is None or early_stopping >= 0, "earlyStopping >= 0")
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.num_return_sequences = num_return_sequences

    @property
    def num_return_sequences(self) -> int | None:
        return self._num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, value: int | None) -> None:
        count = optional(as_int)(value)
        if count is not None:
            check(count > 0, "numReturnSequences.value() > 0")
            check(
                self.beam_width == 1 or count <= self.beam_width,
                "beamWidth == 1 || numReturnSequences.value() <= beamWidth",
            )
        self._num_return_sequences = count

    @property
    def random_seed(self) -> int | None:
        seed: int | None = self.seed
        return seed

    @random_seed.setter
    def random_seed(self, value: int | None) -> None:
        self.seed = value

    @property
    def min_length(self) -> int | None:
        length: int | None = self.min_tokens
        return length

    @min_length.setter
    def min_length(self, value: int | None) -> None:
        self.min_tokens = value


class OutputConfig:
    """Optional parts of a response besides token ids. All flags default to False."""

    return_log_probs = Field(as_bool)
    return_context_logits = Field(as_bool)
    return_generation_logits = Field(as_bool)
    exclude_input_from_output = Field(as_bool)
    return_encoder_output = Field(as_bool)
    return_perf_metrics = Field(as_bool)

    def __init__(
        self,
        *,
        return_log_probs: bool = False,
        return_context_logits: bool = False,
        return_generation_logits: bool = False,
        exclude_input_from_output: bool = False,
        return_encoder_output: bool = False,
        return_perf_metrics: bool = False,
    ) -> None:
        self.return_log_probs = return_log_probs
        self.return_context_logits = return_context_logits
        self.return_generation_logits = return_generation_logits
        self.exclude_input_from_output = exclude_input_from_output
        self.return_encoder_output = return_encoder_output
        self.return_perf_metrics = return_perf_metrics
