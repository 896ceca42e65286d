"""Iteration statistics of ``tensorrt_llm.bindings.executor`` (TensorRT-LLM v0.17).

A class in this module must not have an attribute that TensorRT-LLM's class lacks. For each metric,
``model.py`` searches several statistics objects with ``hasattr``, and reads the value from the
first object that has the attribute. An additional attribute could therefore be read by mistake.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime

from triton_repo.cpu_executor.enums import RequestStage


@dataclass
class KvCacheStats:
    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass
class StaticBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0


@dataclass
class InflightBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass
class IterationStats:
    """Statistics of one iteration of the loop. Memory is in bytes, times are in milliseconds."""

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None

    def to_json_str(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class RequestStats:
    """Statistics of an active request after one iteration.

    The token counts are those of the request's longest sequence. The block counts are those of its
    prompt.
    """

    id: int
    stage: RequestStage
    context_prefill_position: int
    num_generated_tokens: int
    avg_num_decoded_tokens_per_iter: float
    scheduled: bool
    paused: bool
    dis_serving_stats: None = None
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0

    def to_json_str(self) -> str:
        return json.dumps(asdict(self) | {"stage": self.stage.name})


@dataclass
class RequestStatsPerIteration:
    iter: int
    request_stats: list[RequestStats]


def timestamp() -> str:
    """Return the local time in the format of TensorRT-LLM's iteration statistics."""
    return datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f")
