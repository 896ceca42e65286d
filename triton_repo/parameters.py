"""The parameters of the inflight_batcher_llm templates, with their types and allowed values.

Names, mandatory flags and allowed values are those of tensorrtllm_backend (upstream) v0.17 and
v0.19. They were taken from upstream's files `docs/model_config.md` and `tools/fill_template.py`.
`Parameter.releases` names the template sets in `triton_repo.releases` that have the parameter. The
template set V0_20 has the same parameters as V0_19. The parameters of guided decoding are in all
template sets, although upstream added them in v0.19, and the value "llguidance" even later.

Two parameters exist only in this project:
- `lora_weights_data_type` is the data type of LoRA weights. The templates contain float16, like
  upstream's, and `render` writes the parameter's value instead. With upstream's own templates,
  users must edit three files to change the data type.
- `trust_remote_code` allows code in a tokenizer's folder to run. Upstream's models always run such
  code.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from triton_repo.releases import RELEASES, V0_17, V0_19, V0_20

SINCE_V0_19 = (V0_19, V0_20)

Value = str | int | float | bool

PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
ENSEMBLE = "ensemble"
CORE = "tensorrt_llm"
BLS = "tensorrt_llm_bls"
MODELS = (PREPROCESSING, CORE, POSTPROCESSING, ENSEMBLE, BLS)


_BOOLEAN = "true or false"


@dataclass(frozen=True)
class ParameterKind:
    """A type of parameter: its allowed values in words, and its conversion to pbtxt text."""

    allowed: str
    write: Callable[[Value], str | None]
    """Function that returns a value as pbtxt text, or None if the value is not allowed."""


def integer(minimum: int = 0) -> ParameterKind:
    def write(value: Value) -> str | None:
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value, re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return str(value) if value >= minimum else None

    return ParameterKind(f"an integer of at least {minimum}", write)


def fraction(*, zero: bool = False) -> ParameterKind:
    def write(value: Value) -> str | None:
        if isinstance(value, bool):
            return None
        try:
            found = float(value)
        except ValueError:
            return None
        return repr(found) if 0 < found <= 1 or (zero and found == 0) else None

    return ParameterKind("a number from 0 to 1" if zero else "a number above 0 and up to 1", write)


def boolean() -> ParameterKind:
    def write(value: Value) -> str | None:
        text = str(value).lower() if isinstance(value, str | bool) else ""
        return text if text in ("true", "false") else None

    return ParameterKind(_BOOLEAN, write)


def text() -> ParameterKind:
    def write(value: Value) -> str | None:
        # Refuse ${...}, because both Triton backends treat such a value as unset.
        if not isinstance(value, str) or not value.isprintable() or not value or "${" in value:
            return None
        return value.replace("\\", "\\\\").replace('"', '\\"')

    return ParameterKind("a printable, non-empty string without ${", write)


def is_boolean(kind: ParameterKind) -> bool:
    """Return True if `kind` is the type of boolean parameters.

    The check of existing files (`ops.deployment.check_values`) does not use `kind.write` for
    boolean parameters, because some models also accept other words (`triton_repo.booleans`).
    """
    return kind.allowed == _BOOLEAN


def one_of(*choices: str) -> ParameterKind:
    return ParameterKind(
        "one of " + ", ".join(choices), lambda value: str(value) if value in choices else None
    )


def matching(pattern: str, allowed: str) -> ParameterKind:
    def write(value: Value) -> str | None:
        found = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        return found if re.fullmatch(pattern, found, re.ASCII) else None

    return ParameterKind(allowed, write)


def integers() -> ParameterKind:
    return matching(r"\d+(,\d+)*", "integers joined by commas, such as 4096,1024")


def device_ids() -> ParameterKind:
    return matching(
        r"\d+(,\d+)*(;\d+(,\d+)*)*",
        "GPU numbers, `,` within an instance and `;` between instances, such as 0,1;2,3",
    )


def tree() -> ParameterKind:
    path = r"\{\s*\d+(\s*,\s*\d+)*\s*\}"
    return matching(rf"{path}(\s*,\s*{path})*", "paths of a token tree, such as {0, 0}, {0, 1}")


@dataclass(frozen=True)
class Parameter:
    """A template parameter: a placeholder `${name}` in the templates.

    Attributes:
        name: the parameter's name.
        models: the models whose template contains the parameter.
        kind: the type and the allowed values.
        mandatory: True if rendering fails without a value.
        default: text to write if no value is given; "" leaves the server's own default.
        releases: the template sets that have the parameter.
    """

    name: str
    models: tuple[str, ...]
    kind: ParameterKind
    mandatory: bool = False
    default: str = ""
    releases: tuple[str, ...] = RELEASES


DATA_TYPE = one_of("TYPE_FP32", "TYPE_FP16", "TYPE_BF16")

PARAMETERS = (
    # Parameters of several models
    Parameter("triton_max_batch_size", MODELS, integer(1), mandatory=True),
    Parameter("decoupled_mode", (CORE, BLS), boolean(), mandatory=True),
    Parameter("logits_datatype", (CORE, ENSEMBLE, BLS), DATA_TYPE, mandatory=True),
    Parameter("lora_weights_data_type", (CORE, ENSEMBLE, BLS), DATA_TYPE, default="TYPE_FP16"),
    Parameter("engine_dir", (CORE, PREPROCESSING), text(), mandatory=True),
    Parameter("tokenizer_dir", (PREPROCESSING, POSTPROCESSING), text(), mandatory=True),
    # Parameters of preprocessing and postprocessing
    Parameter("preprocessing_instance_count", (PREPROCESSING,), integer(1), mandatory=True),
    Parameter("trust_remote_code", (PREPROCESSING, POSTPROCESSING), boolean()),
    Parameter("add_special_tokens", (PREPROCESSING,), boolean()),
    Parameter("visual_model_path", (PREPROCESSING,), text(), releases=(V0_17,)),
    Parameter("multimodal_model_path", (PREPROCESSING,), text(), releases=SINCE_V0_19),
    Parameter("max_num_images", (PREPROCESSING,), integer(1)),
    Parameter("postprocessing_instance_count", (POSTPROCESSING,), integer(1), mandatory=True),
    Parameter("skip_special_tokens", (POSTPROCESSING,), boolean()),
    # Parameters of tensorrt_llm_bls
    Parameter("bls_instance_count", (BLS,), integer(1), mandatory=True),
    Parameter("accumulate_tokens", (BLS,), boolean()),
    Parameter("tensorrt_llm_model_name", (BLS,), text()),
    Parameter("tensorrt_llm_draft_model_name", (BLS,), text()),
    Parameter("multimodal_encoders_name", (BLS,), text()),
    # Parameters of the model tensorrt_llm that configure Triton's model
    Parameter("triton_backend", (CORE,), one_of("tensorrtllm", "python"), mandatory=True),
    Parameter("max_queue_delay_microseconds", (CORE,), integer(), mandatory=True),
    Parameter(
        "max_queue_delay_microseconds",
        *((PREPROCESSING,), integer()),
        default="0",
        releases=SINCE_V0_19,
    ),
    Parameter("max_queue_size", (CORE,), integer(), default="0"),
    Parameter("max_queue_size", (PREPROCESSING,), integer(), default="0", releases=SINCE_V0_19),
    Parameter("encoder_input_features_data_type", (CORE,), DATA_TYPE, mandatory=True),
    Parameter("exclude_input_in_output", (CORE,), boolean()),
    Parameter("cancellation_check_period_ms", (CORE,), integer(1)),
    Parameter("stats_check_period_ms", (CORE,), integer(1)),
    Parameter("iter_stats_max_iterations", (CORE,), integer()),
    Parameter("request_stats_max_iterations", (CORE,), integer()),
    # Parameters of the model tensorrt_llm that concern the engine
    Parameter("encoder_engine_dir", (CORE,), text()),
    Parameter(
        "batching_strategy",
        (CORE,),
        one_of("inflight_fused_batching", "inflight_batching", "V1"),
        mandatory=True,
    ),
    Parameter("batch_scheduler_policy", (CORE,), one_of("guaranteed_no_evict", "max_utilization")),
    Parameter("max_beam_width", (CORE,), integer(1)),
    Parameter("enable_chunked_context", (CORE,), boolean()),
    Parameter("normalize_log_probs", (CORE,), boolean()),
    Parameter("gpu_device_ids", (CORE,), device_ids()),
    Parameter("participant_ids", (CORE,), integers()),
    Parameter("num_nodes", (CORE,), integer(1), releases=SINCE_V0_19),
    Parameter("gpu_weights_percent", (CORE,), fraction(zero=True)),
    Parameter("enable_context_fmha_fp32_acc", (CORE,), boolean()),
    Parameter("multi_block_mode", (CORE,), boolean()),
    Parameter("cuda_graph_mode", (CORE,), boolean()),
    Parameter("cuda_graph_cache_size", (CORE,), integer()),
    # Parameters of the model tensorrt_llm that concern the KV cache
    Parameter("max_tokens_in_paged_kv_cache", (CORE,), integer(1)),
    Parameter("max_attention_window_size", (CORE,), integers()),
    Parameter("sink_token_length", (CORE,), integer()),
    Parameter("kv_cache_free_gpu_mem_fraction", (CORE,), fraction()),
    Parameter("cross_kv_cache_fraction", (CORE,), fraction()),
    Parameter("kv_cache_host_memory_bytes", (CORE,), integer()),
    Parameter("kv_cache_onboard_blocks", (CORE,), boolean()),
    Parameter("enable_kv_cache_reuse", (CORE,), boolean(), releases=(V0_17,)),
    Parameter("enable_kv_cache_reuse", (CORE,), boolean(), default="true", releases=SINCE_V0_19),
    # Parameters of the model tensorrt_llm that concern the LoRA cache
    Parameter("lora_cache_optimal_adapter_size", (CORE,), integer(1)),
    Parameter("lora_cache_max_adapter_size", (CORE,), integer(1)),
    Parameter("lora_cache_gpu_memory_fraction", (CORE,), fraction()),
    Parameter("lora_cache_host_memory_bytes", (CORE,), integer(1)),
    Parameter("lora_prefetch_dir", (CORE,), text(), releases=SINCE_V0_19),
    # Parameters of the model tensorrt_llm that concern decoding
    Parameter(
        "decoding_mode",
        (CORE,),
        one_of(
            *("auto", "top_k", "top_p", "top_k_top_p", "beam_search"),
            *("medusa", "redrafter", "lookahead", "eagle"),
        ),
    ),
    Parameter("lookahead_window_size", (CORE,), integer(1), releases=SINCE_V0_19),
    Parameter("lookahead_ngram_size", (CORE,), integer(1), releases=SINCE_V0_19),
    Parameter("lookahead_verification_set_size", (CORE,), integer(1), releases=SINCE_V0_19),
    Parameter("medusa_choices", (CORE,), tree()),
    Parameter("eagle_choices", (CORE,), tree()),
    Parameter("speculative_decoding_fast_logits", (CORE,), boolean()),
    # Parameters of the model tensorrt_llm that concern guided decoding. `triton_backend: python`
    # needs tokenizer_dir; `tensorrtllm` needs the output of generate_xgrammar_tokenizer_info.py.
    Parameter("guided_decoding_backend", (CORE,), one_of("xgrammar", "llguidance")),
    Parameter("tokenizer_dir", (CORE,), text()),
    Parameter("xgrammar_tokenizer_info_path", (CORE,), text()),
)


def parameters_of(release: str) -> tuple[Parameter, ...]:
    """Return the parameters of one template set."""
    return tuple(entry for entry in PARAMETERS if release in entry.releases)
