"""Translation of a request's `RequestPerfMetrics` to output tensors."""

from collections.abc import Collection
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

# Maps each output to (field of `RequestPerfMetrics` with the output's value, type of the output).
FIELDS: dict[str, tuple[str, type[np.generic]]] = {
    "kv_cache_alloc_new_blocks": ("kv_cache_metrics.num_new_allocated_blocks", np.int32),
    "kv_cache_reused_blocks": ("kv_cache_metrics.num_reused_blocks", np.int32),
    "kv_cache_alloc_total_blocks": ("kv_cache_metrics.num_total_allocated_blocks", np.int32),
    "arrival_time_ns": ("timing_metrics.arrival_time", np.int64),
    "first_scheduled_time_ns": ("timing_metrics.first_scheduled_time", np.int64),
    "first_token_time_ns": ("timing_metrics.first_token_time", np.int64),
    "last_token_time_ns": ("timing_metrics.last_token_time", np.int64),
    "acceptance_rate": ("speculative_decoding.acceptance_rate", np.float32),
    "total_accepted_draft_tokens": (
        "speculative_decoding.total_accepted_draft_tokens",
        np.int32,
    ),
    "total_draft_tokens": ("speculative_decoding.total_draft_tokens", np.int32),
}
MICROSECOND = timedelta(microseconds=1)


def perf_tensors(metrics: Any, outputs: Collection[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the requested performance outputs by name, each of shape [1, 1].

    Blocks and draft tokens are int32, the acceptance rate is float32. Times are int64, in
    nanoseconds on the executor's monotonic clock; 0 for an event that has not happened yet. Fields
    of other outputs are not read, because v0.17's executor may lack fields that v0.19 added.
    """
    tensors = {}
    for name, (field, dtype) in FIELDS.items():
        if name in outputs:
            value = attrgetter(field)(metrics)
            if isinstance(value, timedelta):
                value = value // MICROSECOND * 1000
            tensors[name] = np.array([[value]], dtype)
    return tensors
