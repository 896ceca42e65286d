"""``Result`` and ``Response`` of ``tensorrt_llm.bindings.executor`` (TensorRT-LLM v0.17)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from triton_repo.cpu_executor.checks import check
from triton_repo.cpu_executor.enums import FinishReason


@dataclass
class KvCacheMetrics:
    """Counts of the KV cache blocks that were allocated or reused for a request's prompt."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class TimingMetrics:
    """Times of a request's events on a monotonic clock.

    The time of an event that did not happen is 0.
    """

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()


@dataclass
class SpeculativeDecodingMetrics:
    """Counts of a request's draft tokens. All fields are 0 for a request without draft tokens."""

    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(
        default_factory=SpeculativeDecodingMetrics
    )
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass
class Result:
    """The output of one sequence, or of all beams, in one response of the executor.

    Logits are float32 tensors of torch, or of the module `torch_tensors` if torch is not loaded.

    Attributes:
        output_token_ids: a list of token ids per beam.
        log_probs: per beam, the log probabilities of all tokens generated so far.
        context_logits: ``[prompt, vocab]``.
        generation_logits: ``[beams, max_tokens, vocab]``; streaming: ``[new tokens, 1, vocab]``.
    """

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: Any = None
    generation_logits: Any = None
    encoder_output: Any = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    decoding_iter: int = 0
    sequence_index: int = 0
    is_sequence_final: bool = False
    context_phase_params: Any = None
    spec_dec_fast_logits_info: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None


class Response:
    """A response to a request: either a ``Result`` or an error text."""

    def __init__(
        self,
        request_id: int,
        result: Result | str | None = None,
        client_id: int | None = None,
        *,
        error_msg: str | None = None,
    ) -> None:
        self._request_id = request_id
        self._client_id = client_id
        text = result if isinstance(result, str) else error_msg
        self._error_msg = text
        self._result = result if isinstance(result, Result) else None
        if (self._result is None) == (text is None):
            raise TypeError("Response needs either a result or an error_msg")

    @property
    def request_id(self) -> int:
        return self._request_id

    @property
    def client_id(self) -> int | None:
        return self._client_id

    def has_error(self) -> bool:
        return self._error_msg is not None

    @property
    def error_msg(self) -> str:
        check(self._error_msg is not None, "hasError()")
        return self._error_msg or ""

    @property
    def result(self) -> Result:
        check(self._result is not None, f"!hasError() ({self._error_msg})")
        assert self._result is not None
        return self._result

    def __repr__(self) -> str:
        what = self._error_msg if self._result is None else self._result
        return f"Response(request_id={self._request_id}, {what!r})"
