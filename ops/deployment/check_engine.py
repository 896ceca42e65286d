"""Rules that check the parameters of the `tensorrt_llm` model against its engine.

`gateway repo render` refuses a repository with errors; `gateway repo check` reports all findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from adapters.adapter import MODULE_IDS
from adapters.base_model import engine_base_model
from adapters.config_json import FILE
from adapters.engine_config import EngineConfig
from adapters.errors import UnsupportedEngine
from adapters.sizes import (
    DEFAULT_HOST_BYTES,
    DEFAULT_MAX_SIZE,
    DEFAULT_OPTIMAL_SIZE,
    CacheSettings,
    cache_fit,
)
from ops.deployment.check_findings import Finding, Severity
from triton_repo.booleans import parse_boolean
from triton_repo.parameters import CORE

Values = Mapping[str, str]
"""Values of template parameters as text, by parameter name. Unset parameters are absent."""

DATA_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
LORA_PARAMETERS = (
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
)
_PAGED_PARAMETERS = ("max_tokens_in_paged_kv_cache", "kv_cache_host_memory_bytes")
_LIMITS = (
    ("triton_max_batch_size", "max_batch_size", "larger batches never run"),
    ("max_beam_width", "max_beam_width", "the executor refuses to start or wider requests fail"),
)


def engine_findings(values: Values, engine: EngineConfig, engine_dir: Path) -> list[Finding]:
    """Return a finding for each parameter value that contradicts the engine or another parameter.

    A property that the engine's config.json does not state is not checked. `engine_dir` is used
    only in messages.
    """
    config = str(engine_dir / FILE)
    return [finding for rule in _RULES for finding in rule(values, engine, config)]


def is_on(values: Values, name: str) -> bool:
    """Return True if a boolean parameter is on. A value that no backend can parse counts as off."""
    try:
        return parse_boolean(values.get(name, "false"))
    except ValueError:
        return False


def is_static(values: Values) -> bool:
    return values.get("batching_strategy", "").lower() == "v1"


def _finding(field: str, problem: str, fix: str, severity: Severity = "error") -> Finding:
    return Finding(severity, CORE, field, problem, fix)


def _check_limits(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    for field, fact, consequence in _LIMITS:
        found, limit = values.get(field, ""), getattr(engine, fact)
        if found.isdecimal() and limit is not None and int(found) > limit:
            yield _finding(
                field,
                f"found {found}, but {config} says {fact} {limit}: {consequence}",
                f"set {field}:{limit}, or build the engine with --{fact} {found}",
            )


def _check_data_types(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    logits, lora = engine.logits_dtype or "", engine.lora_dtype or ""
    for field, dtype, fact, consequence in (
        ("logits_datatype", logits, "logits_dtype", "logits come out as other numbers or fail"),
        ("lora_weights_data_type", lora, "lora_plugin", "every request with LoRA weights fails"),
    ):
        found, wanted = values.get(field), DATA_TYPES.get(dtype)
        if found is not None and wanted is not None and found != wanted:
            yield _finding(
                field,
                f"declared {found}, but {config} says {fact} {dtype}: {consequence}",
                f"declare {wanted} in every model of the repository that has it",
            )


def _check_paged_blocks(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    for field in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if not is_on(values, field):
            continue
        if engine.paged_kv_cache is False:
            yield _finding(
                field,
                f"found true, but {config} says that the KV cache is not paged: "
                "the executor refuses to start",
                f"set {field}:false, or build the engine with --kv_cache_type paged",
            )
        elif engine.use_paged_context_fmha is False:
            yield _finding(
                field,
                f"found true, but {config} says use_paged_context_fmha false: "
                "the executor refuses to start or switches it off",
                f"set {field}:false, or build the engine with --use_paged_context_fmha enable",
            )
    for field in _PAGED_PARAMETERS:
        if values.get(field, "0") != "0" and engine.paged_kv_cache is False:
            yield _finding(
                field,
                f"found {values[field]}, but {config} says that the KV cache is not paged: "
                "it has no effect",
                "leave it out, or build the engine with --kv_cache_type paged",
            )


def _check_offload(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    is_off = "enable_kv_cache_reuse" in values and not is_on(values, "enable_kv_cache_reuse")
    if values.get("kv_cache_host_memory_bytes", "0") != "0" and is_off:
        yield _finding(
            "kv_cache_host_memory_bytes",
            "host memory keeps blocks for reuse, and enable_kv_cache_reuse is false: "
            "the memory is taken and never used",
            "set enable_kv_cache_reuse:true, or leave it out",
        )


def _check_static_batching(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    if not is_static(values):
        return
    policy = values.get("batch_scheduler_policy")
    for field, used in (
        ("enable_kv_cache_reuse", is_on(values, "enable_kv_cache_reuse")),
        ("enable_chunked_context", is_on(values, "enable_chunked_context")),
        ("batch_scheduler_policy", policy == "max_utilization"),
        ("guided_decoding_backend", "guided_decoding_backend" in values),
    ):
        if used:
            yield _finding(
                field,
                f"found {values[field]} with batching_strategy V1: only in-flight batching "
                "implements it",
                f"leave {field} out, or set batching_strategy:inflight_fused_batching",
            )
    if is_on(values, "decoupled_mode"):
        yield _finding(
            "batching_strategy",
            "V1 with decoupled_mode true: a streamed answer comes in one piece at its end",
            "set batching_strategy:inflight_fused_batching to stream",
            "warning",
        )


def _check_lora(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    if engine.lora_plugin is None:
        for field in LORA_PARAMETERS:
            if field in values:
                yield _finding(
                    field,
                    f"found {values[field]}, but {config} says that the engine has no LoRA plugin: "
                    "no adapter can be served",
                    f"leave {field} out, or build the engine with --lora_plugin auto and "
                    "--lora_target_modules",
                )
        return
    if later := sorted(set(engine.lora_target_modules) - MODULE_IDS.keys()):
        yield _finding(
            "engine_dir",
            f"{config} has the LoRA modules {', '.join(later)}, which the gateway does not know: "
            "it refuses adapters with them and takes all others",
            "nothing, if no adapter has them; else build the engine without them",
            "warning",
        )
    host = int(_number(values, "lora_cache_host_memory_bytes", DEFAULT_HOST_BYTES))
    settings = CacheSettings(
        host_bytes=host,
        optimal_adapter_size=_number(
            values, "lora_cache_optimal_adapter_size", DEFAULT_OPTIMAL_SIZE
        ),
        max_adapter_size=_number(values, "lora_cache_max_adapter_size", DEFAULT_MAX_SIZE),
    )
    try:
        base = engine_base_model(engine, (), config)
        needed = cache_fit(base, (), settings).host_min_bytes
    except UnsupportedEngine:
        return  # the required cache size is unknown for this engine
    if host < needed:
        given = "" if "lora_cache_host_memory_bytes" in values else " (the default)"
        yield _finding(
            "lora_cache_host_memory_bytes",
            f"found {host}{given}, but one adapter of the largest size takes {needed} bytes: "
            'TensorRT-LLM stops with "Not enough space allocated to host LoRA cache to hold 1 '
            'max sized LoRA"',
            f"set lora_cache_host_memory_bytes to at least {needed}, or lower "
            f"lora_cache_max_adapter_size, now {settings.max_adapter_size}",
        )


def _check_guided_decoding(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    if "guided_decoding_backend" not in values:
        return
    backend = values.get("triton_backend")
    needed = {"tensorrtllm": "xgrammar_tokenizer_info_path", "python": "tokenizer_dir"}
    field = needed.get(backend or "")
    if field is not None and field not in values:
        how = (
            "the file that examples/generate_xgrammar_tokenizer_info.py makes"
            if field == "xgrammar_tokenizer_info_path"
            else "the tokenizer's folder"
        )
        yield _finding(
            "guided_decoding_backend",
            f"found {values['guided_decoding_backend']} with triton_backend {backend}, "
            f"but {field} is not set: the model does not load",
            f"set {field} to {how}, or leave guided_decoding_backend out",
        )


def _check_max_utilization(values: Values, engine: EngineConfig, config: str) -> Iterator[Finding]:
    if (
        values.get("batch_scheduler_policy") != "max_utilization"
        or not is_on(values, "decoupled_mode")
        or is_on(values, "enable_chunked_context")
        or is_static(values)
    ):
        return
    prompt, total = engine.max_input_len, engine.max_seq_len
    if prompt is not None and total is not None and prompt >= total:
        return
    yield _finding(
        "batch_scheduler_policy",
        "max_utilization with streaming and without chunked context: a streamed request whose "
        "prompt and output together may pass max_input_len "
        f"({'unknown' if prompt is None else prompt}) is refused",
        "set enable_chunked_context:true, or batch_scheduler_policy:guaranteed_no_evict",
        "warning",
    )


def _number(values: Values, name: str, default: int) -> int:
    found = values.get(name, "")
    return int(found) if found.isdecimal() else default


_RULES: tuple[Callable[[Values, EngineConfig, str], Iterator[Finding]], ...] = (
    _check_limits,
    _check_data_types,
    _check_paged_blocks,
    _check_offload,
    _check_static_batching,
    _check_lora,
    _check_guided_decoding,
    _check_max_utilization,
)
