"""Translation of the model's parameters to the executor's configuration."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils
from booleans import parse_boolean
from executor_api import LOOKAHEAD, drop_unset, tokenizer_info, trtllm

T = TypeVar("T")

REFUSED = (
    "encoder_model_path",
    "participant_ids",
    "speculative_decoding_fast_logits",
    "xgrammar_tokenizer_info_path",
)


class ModelParameters:
    """Parser of the `parameters` in a model configuration.

    Methods return None for an unset parameter, and raise TritonModelException for a wrong value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._parameters = config.get("parameters", {})

    def text(self, name: str) -> str | None:
        value: str = self._parameters.get(name, {}).get("string_value", "")
        # Treat ${name} as unset: fill_template.py leaves it in the file if no value is given.
        return None if not value or value.startswith("${") else value

    def integer(self, name: str) -> int | None:
        return self._read(name, int, "an integer")

    def number(self, name: str) -> float | None:
        return self._read(name, float, "a number")

    def boolean(self, name: str) -> bool | None:
        return self._read(name, parse_boolean, "true or false")

    def integers(self, name: str) -> list[int] | None:
        return self._read(
            name, lambda value: [int(part) for part in value.split(",")], "integers and commas"
        )

    def paths(self, name: str) -> list[list[int]] | None:
        """Return the paths of a tree of draft tokens. The parameter's form is `{0, 0}, {0, 1}`."""
        return self._read(
            name,
            lambda value: [
                [int(part) for part in path.split(",")]
                for path in re.findall(r"\{([^{}]*)\}", value)
            ],
            "integers in braces, such as {0, 0}, {0, 1}",
        )

    def choice(self, name: str, choices: Mapping[str, T]) -> T | None:
        return self._read(name, lambda value: choices[value.lower()], ", ".join(choices))

    def _read(self, name: str, kind: Callable[[str], T], allowed: str) -> T | None:
        value = self.text(name)
        try:
            return None if value is None else kind(value)
        except (KeyError, ValueError):
            raise pb_utils.TritonModelException(
                f"{name}: found {value!r}; allowed: {allowed}"
            ) from None


def executor_config(config: Mapping[str, Any]) -> Any:
    """Build the `ExecutorConfig` from the model's configuration.

    Raises:
        TritonModelException: a parameter has a value that is not allowed or is not supported.
    """
    parameters = ModelParameters(config)
    for name in REFUSED:
        if parameters.text(name) not in (None, "false"):
            raise pb_utils.TritonModelException(
                f"{name}: not supported by triton_backend: python; leave it out"
            )
    if os.environ.get("TRTLLM_ORCHESTRATOR", "0") == "1":
        raise pb_utils.TritonModelException(
            "TRTLLM_ORCHESTRATOR: orchestrator mode is not supported by triton_backend: python"
        )
    if parameters.integer("num_nodes") not in (None, 1):
        raise pb_utils.TritonModelException(
            "num_nodes: more than 1 needs orchestrator mode, which triton_backend: python has not"
        )
    queue = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return trtllm.ExecutorConfig(
        **drop_unset(
            max_beam_width=parameters.integer("max_beam_width"),
            scheduler_config=_scheduler(parameters),
            kv_cache_config=_kv_cache(parameters),
            enable_chunked_context=parameters.boolean("enable_chunked_context"),
            normalize_log_probs=parameters.boolean("normalize_log_probs"),
            iter_stats_max_iterations=parameters.integer("iter_stats_max_iterations"),
            request_stats_max_iterations=parameters.integer("request_stats_max_iterations"),
            batching_type=_batching(parameters),
            parallel_config=_parallel(parameters),
            peft_cache_config=_peft_cache(parameters),
            decoding_config=_decoding(parameters),
            gpu_weights_percent=parameters.number("gpu_weights_percent"),
            # Use the queue limit of Triton's configuration. In Triton and in the executor, 0 means
            # no limit.
            max_queue_size=queue.get("max_queue_size"),
            extended_runtime_perf_knob_config=_perf_knobs(parameters),
            guided_decoding_config=_guided_decoding(parameters),
        )
    )


def _batching(parameters: ModelParameters) -> Any:
    try:
        return parameters.choice(
            "gpt_model_type",
            {
                "inflight_fused_batching": trtllm.BatchingType.INFLIGHT,
                "inflight_batching": trtllm.BatchingType.INFLIGHT,
                "v1": trtllm.BatchingType.STATIC,
            },
        )
    except pb_utils.TritonModelException:
        raise pb_utils.TritonModelException(
            "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching."
        ) from None


def _scheduler(parameters: ModelParameters) -> Any:
    policies = trtllm.CapacitySchedulerPolicy
    policy = parameters.choice(
        "batch_scheduler_policy",
        {
            "guaranteed_no_evict": policies.GUARANTEED_NO_EVICT,
            "max_utilization": policies.MAX_UTILIZATION,
        },
    )
    return None if policy is None else trtllm.SchedulerConfig(policy)


def _kv_cache(parameters: ModelParameters) -> Any:
    return trtllm.KvCacheConfig(
        # Turn block reuse off by default, as v0.17 documents. The executor's own default is on.
        enable_block_reuse=bool(parameters.boolean("enable_kv_cache_reuse")),
        **drop_unset(
            max_tokens=parameters.integer("max_tokens_in_paged_kv_cache"),
            max_attention_window=parameters.integers("max_attention_window_size"),
            sink_token_length=parameters.integer("sink_token_length"),
            free_gpu_memory_fraction=parameters.number("kv_cache_free_gpu_mem_fraction"),
            cross_kv_cache_fraction=parameters.number("cross_kv_cache_fraction"),
            host_cache_size=parameters.integer("kv_cache_host_memory_bytes"),
            onboard_blocks=parameters.boolean("kv_cache_onboard_blocks"),
        ),
    )


def _parallel(parameters: ModelParameters) -> Any:
    # Accept only a single group of device ids. Several groups, joined by `;`, would be for several
    # instances of the model, but this model always has one instance.
    device_ids = parameters.integers("gpu_device_ids")
    return None if device_ids is None else trtllm.ParallelConfig(device_ids=device_ids)


def _peft_cache(parameters: ModelParameters) -> Any:
    return trtllm.PeftCacheConfig(
        **drop_unset(
            optimal_adapter_size=parameters.integer("lora_cache_optimal_adapter_size"),
            max_adapter_size=parameters.integer("lora_cache_max_adapter_size"),
            device_cache_percent=parameters.number("lora_cache_gpu_memory_fraction"),
            host_cache_size=parameters.integer("lora_cache_host_memory_bytes"),
            lora_prefetch_dir=parameters.text("lora_prefetch_dir"),
        )
    )


def _decoding(parameters: ModelParameters) -> Any:
    modes = trtllm.DecodingMode
    mode = parameters.choice(
        "decoding_mode",
        {
            "auto": modes.Auto,
            "top_k": modes.TopK,
            "top_p": modes.TopP,
            "top_k_top_p": modes.TopKTopP,
            "beam_search": modes.BeamSearch,
            "medusa": modes.Medusa,
            "redrafter": modes.ExplicitDraftTokens,
            "lookahead": modes.Lookahead,
            "eagle": modes.Eagle,
        },
    )
    eagle_choices = parameters.paths("eagle_choices")
    lookahead = [parameters.integer(name) for name in LOOKAHEAD]
    if any(lookahead) and not all(lookahead):
        raise pb_utils.TritonModelException(f"{', '.join(LOOKAHEAD)}: set all of them, or none")
    return trtllm.DecodingConfig(
        **drop_unset(
            decoding_mode=mode and mode(),
            lookahead_decoding_config=trtllm.LookaheadDecodingConfig(*lookahead)
            if all(lookahead)
            else None,
            medusa_choices=parameters.paths("medusa_choices"),
            eagle_config=eagle_choices and trtllm.EagleConfig(eagle_choices),
        )
    )


def _perf_knobs(parameters: ModelParameters) -> Any:
    knobs = trtllm.ExtendedRuntimePerfKnobConfig(
        **drop_unset(
            multi_block_mode=parameters.boolean("multi_block_mode"),
            enable_context_fmha_fp32_acc=parameters.boolean("enable_context_fmha_fp32_acc"),
        )
    )
    # Set these two fields as attributes: the constructor does not take them.
    for name, value in drop_unset(
        cuda_graph_mode=parameters.boolean("cuda_graph_mode"),
        cuda_graph_cache_size=parameters.integer("cuda_graph_cache_size"),
    ).items():
        setattr(knobs, name, value)
    return knobs


def _guided_decoding(parameters: ModelParameters) -> Any:
    if parameters.text("guided_decoding_backend") is None:
        return None
    backends = trtllm.GuidedDecodingConfig.GuidedDecodingBackend.__members__
    backend = parameters.choice(
        "guided_decoding_backend", {name.lower(): member for name, member in backends.items()}
    )
    folder = parameters.text("tokenizer_dir")
    if folder is None:
        raise pb_utils.TritonModelException(
            "Guided decoding requires tokenizer's information. Please provide 'tokenizer_dir'."
        )
    return trtllm.GuidedDecodingConfig(backend=backend, **tokenizer_info(folder))
