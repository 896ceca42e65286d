"""Requirements for an engine, and checks of them against the model and the release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapters.adapter import DTYPES, Dtype
from adapters.base_model import BaseModel
from adapters.engine_config import EngineConfig
from ops.deployment.checkpoint import Checkpoint
from ops.deployment.release import GUIDED_DECODING, NEWEST, UNEVEN_STAGES, Release

# Default limit of prompt plus output, in tokens. Models allow up to 131,072 tokens, but few GPUs
# can hold even one request of that length.
DEFAULT_MAX_SEQ_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """Requirements for an engine. Lengths are in tokens.

    Attributes:
        dtype: data type of the weights, the KV cache and the LoRA tensors.
        tp: tensor parallelism: number of GPUs that share each layer.
        pp: pipeline parallelism: number of groups of GPUs that have different layers.
        lora_modules: modules that adapters may change, by TensorRT-LLM's names; empty for an engine
            without LoRA.
        lora_adapters: number of adapters of the largest rank that the LoRA caches must hold.
        max_seq_len: limit of prompt plus output.
        max_num_tokens: limit of the tokens of all requests in one step of the engine.
    """

    dtype: Dtype
    tp: int = 1
    pp: int = 1
    lora_modules: tuple[str, ...] = ()
    max_lora_rank: int = 64
    lora_adapters: int = 8
    max_batch_size: int = 64
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int = 1
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    guided_decoding: bool = False


def default_dtype(checkpoint: Checkpoint) -> Dtype:
    """Return the dtype of the weights if an engine supports it, else float16."""
    return next((name for name in DTYPES if name == checkpoint.dtype), "float16")


def problems(checkpoint: Checkpoint, intent: Intent, release: Release | None) -> list[str]:
    """Return an error message for each requirement that the model or the release does not allow.

    If no engine is built, because TensorRT-LLM serves the checkpoint directly, `release` is None.
    """
    conversion = _loading(checkpoint)
    if release is not None:
        conversion = _conversion(checkpoint, intent, release)
    return [*conversion, *_limits(checkpoint, intent, release or NEWEST)]


def base_model(checkpoint: Checkpoint, intent: Intent) -> BaseModel:
    """Return the planned engine as a `BaseModel`.

    Functions that compute LoRA module names and LoRA cache sizes need a `BaseModel`.
    """
    return BaseModel(
        names=(checkpoint.folder.resolve().name,),
        architecture=checkpoint.architecture,
        dtype=intent.dtype,
        num_hidden_layers=checkpoint.num_hidden_layers,
        hidden_size=checkpoint.hidden_size,
        num_attention_heads=checkpoint.num_attention_heads,
        num_key_value_heads=checkpoint.num_key_value_heads,
        head_size=checkpoint.head_size,
        intermediate_size=checkpoint.intermediate_size,
        num_experts=checkpoint.num_experts,
        lora_target_modules=intent.lora_modules,
        max_lora_rank=intent.max_lora_rank,
        tp_size=intent.tp,
        pp_size=intent.pp,
    )


def planned_engine(checkpoint: Checkpoint, intent: Intent, release: Release | None) -> EngineConfig:
    """Return the contents of the config.json that the planned engine will have."""
    return EngineConfig(
        version=release and str(release),
        architecture=checkpoint.architecture,
        dtype=intent.dtype,
        logits_dtype="float32",
        vocab_size=checkpoint.vocab_size,
        num_hidden_layers=checkpoint.num_hidden_layers,
        hidden_size=checkpoint.hidden_size,
        num_attention_heads=checkpoint.num_attention_heads,
        num_key_value_heads=checkpoint.num_key_value_heads,
        head_size=checkpoint.head_size,
        intermediate_size=checkpoint.intermediate_size,
        num_experts=checkpoint.num_experts,
        max_position_embeddings=checkpoint.max_position_embeddings,
        world_size=intent.tp * intent.pp,
        tp_size=intent.tp,
        pp_size=intent.pp,
        max_batch_size=intent.max_batch_size,
        max_input_len=intent.max_input_len,
        max_seq_len=intent.max_seq_len,
        max_num_tokens=intent.max_num_tokens,
        max_beam_width=intent.max_beam_width,
        gather_context_logits=intent.gather_context_logits,
        gather_generation_logits=intent.gather_generation_logits,
        paged_kv_cache=True,
        use_paged_context_fmha=True,
        lora_plugin=intent.dtype if intent.lora_modules else None,
        lora_target_modules=intent.lora_modules,
        max_lora_rank=intent.max_lora_rank if intent.lora_modules else None,
    )


def _loading(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.quantization:
        yield (
            f"{checkpoint.folder}: quantized ({checkpoint.quantization}), and the memory of that "
            "is not planned here; allowed: weights in float16, bfloat16 or float32, or "
            "gateway repo render --repository llmapi, which plans nothing"
        )


def _conversion(checkpoint: Checkpoint, intent: Intent, release: Release) -> Iterator[str]:
    kind, name = checkpoint.kind, checkpoint.architecture
    if release < kind.since:
        yield f"{name}: converted since TensorRT-LLM {kind.since}, found {release}"
    if intent.lora_modules and release < kind.lora_since:
        yield (
            f"--lora-modules: LoRA with {name} is served since TensorRT-LLM {kind.lora_since}, "
            f"found {release}"
        )
    if intent.guided_decoding and release < GUIDED_DECODING:
        yield (
            f"--guided-decoding: in the Triton repository since {GUIDED_DECODING}, found {release}"
        )
    if checkpoint.quantization:
        yield (
            f"{checkpoint.folder}: quantized ({checkpoint.quantization}); allowed: weights in "
            "float16, bfloat16 or float32. Quantized engines are made with "
            "examples/quantization/quantize.py, which is not planned here"
        )
    if intent.pp > 1 and not kind.pipeline:
        yield f"--pp: found {intent.pp}; the conversion script of {name} allows only 1"


def _limits(checkpoint: Checkpoint, intent: Intent, release: Release) -> Iterator[str]:
    heads, kv_heads = checkpoint.num_attention_heads, checkpoint.num_key_value_heads
    if heads % intent.tp or checkpoint.intermediate_size % intent.tp:
        yield (
            f"--tp: found {intent.tp}; allowed: divisors of {heads} attention heads and of the "
            f"MLP's {checkpoint.intermediate_size}"
        )
    elif kv_heads % intent.tp and intent.tp % kv_heads:
        yield f"--tp: found {intent.tp}; allowed: divisors or multiples of {kv_heads} KV heads"
    layers = checkpoint.num_hidden_layers
    if intent.pp > layers or (layers % intent.pp and release < UNEVEN_STAGES):
        yield f"--pp: found {intent.pp}; allowed: divisors of {layers} layers"
    # Refuse pipeline stages of unequal size with LoRA: the computation of the cache size assumes
    # equal stages, as TensorRT-LLM's PeftCacheManager does.
    elif layers % intent.pp and intent.lora_modules:
        yield f"--pp: found {intent.pp}; allowed with LoRA: divisors of {layers} layers"
    if intent.max_seq_len > checkpoint.max_position_embeddings:
        yield (
            f"--max-seq-len: found {intent.max_seq_len}; allowed: up to the model's "
            f"{checkpoint.max_position_embeddings}"
        )
    if intent.max_input_len > intent.max_seq_len:
        yield (
            f"--max-input-len: found {intent.max_input_len}; allowed: up to --max-seq-len, "
            f"{intent.max_seq_len}"
        )
