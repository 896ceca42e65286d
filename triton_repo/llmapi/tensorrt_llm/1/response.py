"""Translation of a `RequestOutput` of the LLM API to a Triton response."""

from collections.abc import Collection
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# Maps each output to the field of `request_perf_metrics` that has the output's value.
METRICS = {
    "kv_cache_reused_block": "kv_cache_metrics.num_reused_blocks",
    "kv_cache_missed_block": "kv_cache_metrics.num_missed_blocks",
    "kv_cache_alloc_new_blocks": "kv_cache_metrics.num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "kv_cache_metrics.num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_metrics.kv_cache_hit_rate",
    "arrival_time_ns": "timing_metrics.arrival_time",
    "first_scheduled_time_ns": "timing_metrics.first_scheduled_time",
    "first_token_time_ns": "timing_metrics.first_token_time",
    "last_token_time_ns": "timing_metrics.last_token_time",
    "acceptance_rate": "speculative_decoding.acceptance_rate",
    "total_accepted_draft_tokens": "speculative_decoding.total_accepted_draft_tokens",
    "total_draft_tokens": "speculative_decoding.total_draft_tokens",
}
MICROSECOND = timedelta(microseconds=1)


def build_response(output: Any, optional: Collection[str], wanted: Collection[str]) -> Any:
    """Return a response with the complete text so far, the `optional` outputs, and any metrics.

    As in upstream's model, all outputs are BYTES of shape [1]. Numbers are decimal text, and a
    missing value is the text "None". Times are in nanoseconds on the engine's clock.

    Args:
        output: the `RequestOutput`.
        optional: names of further outputs to include.
        wanted: names of the outputs that the client requested. All others are omitted: Triton 2.51
            frees unrequested outputs without the interpreter's lock, which can crash this process.
    """
    completion = output.outputs[0]
    values = {"text_output": completion.text}
    values |= {name: getattr(completion, name) for name in optional}
    metrics = getattr(completion, "request_perf_metrics", None)
    if metrics is not None:
        values |= {name: _number(attrgetter(field)(metrics)) for name, field in METRICS.items()}
    return pb_utils.InferenceResponse(
        [_tensor(name, value) for name, value in values.items() if name in wanted]
    )


def build_error(message: str) -> Any:
    """Return an error response.

    Like upstream's, the response also has "N/A" as its text. Clients must check for the error
    first.
    """
    return pb_utils.InferenceResponse(
        [_tensor("text_output", "N/A")], pb_utils.TritonError(message)
    )


def build_cancelled() -> Any:
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
    )


def build_empty() -> Any:
    return pb_utils.InferenceResponse([])


def _number(value: Any) -> Any:
    return value // MICROSECOND * 1000 if isinstance(value, timedelta) else value


def _tensor(name: str, value: Any) -> Any:
    return pb_utils.Tensor(name, np.array([str(value).encode()], np.object_))
