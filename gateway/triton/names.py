"""Names of model inputs in all releases of TensorRT-LLM, and the inputs that a model declares.

The gateway's code uses logical names such as "seed". The tables list the names that each logical
input has in Triton, the name in the oldest release first. (Sources: tensorrtllm_backend v0.5 to
v0.19, then TensorRT-LLM's triton_backend folder. The GPT repository uses the same names. The llmapi
repository uses other names, which have a separate table.)

See decision 051 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adapters.adapter import Dtype
from gateway.triton.protobuf import model_config_pb2

LogicalInput = Literal[
    "bad_words",
    "beam_width",
    "bias",
    "bias_weights",
    "cache_stats",
    "context_logits",
    "end_id",
    "exclude_prompt",
    "finish_reason",
    "frequency_penalty",
    "generation_logits",
    "guide",
    "guide_type",
    "length_penalty",
    "log_probs",
    "lora_config",
    "lora_id",
    "lora_name",
    "lora_path",
    "lora_task_id",
    "lora_weights",
    "max_tokens",
    "min_tokens",
    "pad_id",
    "presence_penalty",
    "prompt",
    "prompt_length",
    "repetition_penalty",
    "seed",
    "sequences",
    "stop",
    "stop_reason",
    "stop_words",
    "streaming",
    "temperature",
    "top_k",
    "top_p",
]

_SHARED: dict[LogicalInput, tuple[str, ...]] = {
    "beam_width": ("beam_width",),
    "cache_stats": ("return_kv_cache_reuse_stats", "return_perf_metrics"),
    "context_logits": ("return_context_logits",),
    "end_id": ("end_id",),
    "exclude_prompt": ("exclude_input_in_output",),
    "frequency_penalty": ("frequency_penalty",),
    "generation_logits": ("return_generation_logits",),
    "guide": ("guided_decoding_guide",),
    "guide_type": ("guided_decoding_guide_type",),
    "log_probs": ("return_log_probs",),
    "lora_config": ("lora_config",),
    "lora_task_id": ("lora_task_id",),
    "lora_weights": ("lora_weights",),
    "min_tokens": ("min_length", "min_tokens"),
    "pad_id": ("pad_id",),
    "presence_penalty": ("presence_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "seed": ("random_seed", "seed"),
    "sequences": ("num_return_sequences",),
    "temperature": ("temperature",),
}
CORE: dict[LogicalInput, tuple[str, ...]] = _SHARED | {
    "bad_words": ("bad_words_list",),
    "bias": ("embedding_bias",),
    "length_penalty": ("len_penalty",),
    "max_tokens": ("request_output_len",),
    "prompt": ("input_ids",),
    "prompt_length": ("input_lengths",),
    "stop": ("stop",),
    "stop_words": ("stop_words_list",),
    "streaming": ("streaming",),
    "top_k": ("runtime_top_k",),
    "top_p": ("runtime_top_p",),
}
"""Names of the inputs of the core model, `tensorrt_llm`."""
TEXT: dict[LogicalInput, tuple[str, ...]] = _SHARED | {
    "bad_words": ("bad_words",),
    "bias": ("embedding_bias_words",),
    "bias_weights": ("embedding_bias_weights",),
    "length_penalty": ("length_penalty",),
    "max_tokens": ("max_tokens",),
    "prompt": ("text_input",),
    "stop_words": ("stop_words",),
    "streaming": ("stream",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
}
"""Names of the inputs of the text models, `ensemble` and `tensorrt_llm_bls`."""
LLMAPI: dict[LogicalInput, tuple[str, ...]] = {
    "cache_stats": ("sampling_param_return_perf_metrics",),
    "exclude_prompt": ("sampling_param_exclude_input_from_output",),
    "finish_reason": ("return_finish_reason",),
    "frequency_penalty": ("sampling_param_frequency_penalty",),
    "lora_id": ("lora_id",),
    "lora_name": ("lora_name",),
    "lora_path": ("lora_path",),
    "max_tokens": ("sampling_param_max_tokens",),
    "presence_penalty": ("sampling_param_presence_penalty",),
    "prompt": ("text_input",),
    "seed": ("sampling_param_seed",),
    "stop": ("stop",),
    "stop_reason": ("return_stop_reason",),
    "streaming": ("streaming",),
    "temperature": ("sampling_param_temperature",),
    "top_k": ("sampling_param_top_k",),
    "top_p": ("sampling_param_top_p",),
}
"""Names of the inputs of the llmapi repository's model, `tensorrt_llm`."""


RENAMED: tuple[tuple[str, ...], ...] = tuple(
    sorted({known for known in [*CORE.values(), *TEXT.values()] if len(known) > 1})
)
"""All names of each input that `inflight_batcher_llm` has ever renamed, oldest name first."""

_LORA: tuple[LogicalInput, ...] = ("lora_task_id", "lora_weights", "lora_config")
LORA_DATATYPES: Mapping[Dtype, str] = {"float16": "FP16", "bfloat16": "BF16"}
"""Triton's names of the data types that `lora_weights` may have."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input that a model declares. `datatype` is the data type in Triton, such as INT32."""

    name: str
    datatype: str
    optional: bool = True


Inputs = Mapping[LogicalInput, Input]


def read_inputs(config: Any, names: Mapping[LogicalInput, tuple[str, ...]]) -> Inputs:
    """Return the inputs of an `inference.ModelConfig` by their logical name.

    Inputs that are not in the table `names` are left out.
    """
    declared = {tensor.name: tensor for tensor in config.input}
    return {
        logical: Input(name, datatype(declared[name].data_type), declared[name].optional)
        for logical, known in names.items()
        for name in known
        if name in declared
    }


def names_outputs(config: Any) -> bool:
    """Return True if requests to a model should name the outputs that they need.

    Return False for a Python model. NVIDIA's Python models may return outputs that the request does
    not name: `batch_index` for batched requests, and all statistics if one was requested. Triton's
    Python backend (2.51) frees these additional outputs without holding the GIL, which sooner or
    later crashes the model's process.

    Return True for a C++ model. If a request names no outputs, the model returns all outputs.
    Releases v0.10 to v0.13 would then send zeros in the outputs that the gateway does not need.
    """
    return bool(config.backend != "python")


def lora_dtype(inputs: Inputs) -> Dtype | None:
    """Return the data type that `lora_weights` must have.

    Return None if the model does not support adapters.
    """
    if not all(logical in inputs for logical in _LORA):
        return None
    declared = inputs["lora_weights"].datatype
    return next((dtype for dtype, wire in LORA_DATATYPES.items() if wire == declared), None)


def datatype(data_type: int) -> str:
    """Return the name that a ModelConfig data type has in requests.

    For example, TYPE_INT32 is called INT32, and TYPE_STRING is called BYTES.
    """
    name: str = model_config_pb2.DataType.Name(data_type)
    return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
