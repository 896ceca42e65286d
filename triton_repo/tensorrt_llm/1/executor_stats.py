"""Translation of the executor's iteration statistics to the `nv_trt_llm_*` metrics."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import triton_python_backend_utils as pb_utils

# Maps each metric family to (description, name of the label, fields). `fields` maps each value of
# the label to the field of the executor's statistics that has the metric's value.
GAUGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": (
        "TRT LLM request metrics",
        "request_type",
        {
            "active": "num_active_requests",
            "max": "max_num_active_requests",
            "scheduled": "num_scheduled_requests",
            "context": "num_context_requests",
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "TRT LLM runtime memory metrics",
        "memory_type",
        {"cpu": "cpu_mem_usage", "gpu": "gpu_mem_usage", "pinned": "pinned_mem_usage"},
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": "max_num_blocks",
            "free": "free_num_blocks",
            "used": "used_num_blocks",
            "tokens_per": "tokens_per_block",
            "reused": "reused_blocks",
        },
    ),
    "nv_trt_llm_general_metrics": (
        "General TRT LLM metrics",
        "general_type",
        {"timestamp": "timestamp", "iteration_counter": "iter"},
    ),
}
INFLIGHT_GAUGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "nv_trt_llm_inflight_batcher_metrics": (
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": "num_ctx_tokens",
            "generation_requests": "num_gen_requests",
            "micro_batch_id": "micro_batch_id",
            "paused_requests": "num_paused_requests",
        },
    ),
}
STATIC_GAUGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "nv_trt_llm_v1_metrics": (
        "TRT LLM v1-specific metrics",
        "v1_specific_metric",
        {
            "total_context_tokens": "num_ctx_tokens",
            "total_generation_tokens": "num_gen_tokens",
            "empty_generation_slots": "empty_gen_slots",
        },
    ),
}
TOKEN_BUCKETS = [10, 50, 100, 500, 1000]


class Gauges:
    """The gauges of the model. A gauge is written only when its value changes."""

    def __init__(self, labels: Mapping[str, str], *, inflight: bool) -> None:
        # Keep references to the metric families. If Python deletes a family object, Triton deletes
        # the metrics of the family.
        self._families = []
        self._metrics = []
        for name, (description, label, fields) in (
            GAUGES | (INFLIGHT_GAUGES if inflight else STATIC_GAUGES)
        ).items():
            family = pb_utils.MetricFamily(
                name=name, description=description, kind=pb_utils.MetricFamily.GAUGE
            )
            self._families.append(family)
            for value, field in fields.items():
                self._metrics.append((field, family.Metric(labels={**labels, label: value})))
        self._last: dict[str, float] = {}

    def update(self, stats: Any) -> None:
        """Set the gauges to the values of one `IterationStats`."""
        for field, metric in self._metrics:
            value = _read(stats, field)
            if value is not None and value != self._last.get(field):
                self._last[field] = value
                metric.set(value)


def _read(stats: Any, field: str) -> float | None:
    parts = (
        *(stats, stats.kv_cache_stats),
        *(stats.static_batching_stats, stats.inflight_batching_stats),
    )
    value = next((getattr(part, field) for part in parts if hasattr(part, field)), None)
    if field == "timestamp" and value is not None:
        return datetime.strptime(value, "%m-%d-%Y %H:%M:%S.%f").timestamp()
    return value


class TokenHistograms:
    """Histograms of prompt and generated tokens, with one observation per finished request."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._families = []
        self._metrics = []
        for name, description, value in (
            ("nv_llm_input_token_len", "TRT LLM prompt tokens", "total_input_tokens"),
            ("nv_llm_output_token_len", "TRT LLM generated tokens", "total_output_tokens"),
        ):
            family = pb_utils.MetricFamily(
                name=name, description=description, kind=pb_utils.MetricFamily.HISTOGRAM
            )
            self._families.append(family)
            self._metrics.append(
                family.Metric(
                    labels={**labels, "response_metric_type": value}, buckets=TOKEN_BUCKETS
                )
            )

    def observe(self, prompt: int, generated: int) -> None:
        for metric, value in zip(self._metrics, (prompt, generated), strict=True):
            metric.observe(value)
