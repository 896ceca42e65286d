"""GPU memory that an engine needs, and what remains for KV cache and LoRA adapters.

All sizes are bytes on one GPU, the fullest one where ranks differ. Weights and KV cache are exact
up to alignment. The workspace is an estimate, because TensorRT decides on it during the build.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adapters.adapter import ITEM_BYTES, ModuleRows
from adapters.sizes import recommend
from ops.deployment.checkpoint import Checkpoint
from ops.deployment.gpus import Gpu
from ops.deployment.intent import Intent, base_model

LOGIT_BYTES = 4  # logits are float32 unless an engine is built otherwise
# CUDA context, cuBLAS and TensorRT; with several GPUs also NCCL and all-reduce buffers. Rough.
RUNTIME_BYTES = 1024**3
COMMUNICATION_BYTES = 512 * 1024**2
# TensorRT-LLM's own defaults, as parameters of the `tensorrt_llm` model.
KV_FRACTION = 0.9
LORA_FRACTION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCachePlan:
    """Cache parameters of the `tensorrt_llm` model that hold `adapters` at the largest rank.

    The sizes are ranks. `bytes` is the size of the host cache, and of the GPU cache.
    """

    adapters: int
    bytes: int
    optimal_adapter_size: int
    max_adapter_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCachePlan:
    """The KV cache pool, its capacity in `tokens`, and the parameters that divide the memory.

    `fraction` is kv_cache_free_gpu_mem_fraction. `lora_fraction` is lora_cache_gpu_memory_fraction,
    relative to the memory outside the pool, or None without LoRA.
    """

    bytes: int
    tokens: int
    fraction: float
    lora_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one GPU; `kv_cache` is None if the GPU is unknown or no memory is left for it."""

    gpu: Gpu | None
    weights: int
    workspace: int
    kv_bytes_per_token: int
    lora: LoraCachePlan | None
    kv_cache: KvCachePlan | None

    def fits(self, intent: Intent) -> bool | None:
        """Return True if one request of the largest size can run; None if the GPU is unknown."""
        if self.gpu is None:
            return None
        return self.kv_cache is not None and self.kv_cache.tokens >= largest_request(intent)


def largest_request(intent: Intent) -> int:
    """Return the KV cache tokens of the largest request at its end; beams share the prompt."""
    outputs = intent.max_seq_len - intent.max_input_len
    return intent.max_input_len + intent.max_beam_width * outputs


def parameter_count(checkpoint: Checkpoint) -> int:
    """Return the weights of the complete model, each counted once, as model cards count them."""
    hidden, vocab = checkpoint.hidden_size, checkpoint.vocab_size
    tables = vocab * hidden * (1 if checkpoint.tied_embeddings else 2)
    layers = checkpoint.num_hidden_layers * _layer(checkpoint, tp=1)
    return tables + layers + _ends(checkpoint)


def weight_bytes(checkpoint: Checkpoint, intent: Intent) -> int:
    """Return the bytes of the weights on one rank.

    Tensor parallelism splits the matrices of a layer and lm_head, but not norms, router and
    embedding. If there are fewer KV heads than ranks, several ranks have the same head. Pipeline
    stages hold complete layers, and the first one holds the embedding, the larger table. Tied
    tables are counted twice, because only some builds share them.
    """
    table = checkpoint.vocab_size * checkpoint.hidden_size
    head = math.ceil(table / intent.tp)
    tables = table + head if intent.pp == 1 else table
    layers = math.ceil(checkpoint.num_hidden_layers / intent.pp) * _layer(checkpoint, intent.tp)
    return (tables + layers + _ends(checkpoint)) * ITEM_BYTES


def kv_bytes_per_token(checkpoint: Checkpoint, intent: Intent, item_bytes: int = ITEM_BYTES) -> int:
    """Return the bytes of one token's keys and values in the layers and KV heads of one rank."""
    layers = math.ceil(checkpoint.num_hidden_layers / intent.pp)
    return 2 * layers * _kv_size(checkpoint, intent.tp) * item_bytes


def workspace_bytes(checkpoint: Checkpoint, intent: Intent) -> int:
    """Return an estimate of activations, logits and the runtime's own memory.

    Per token of a step: the residual and its norm, and the wider of (queries, keys, values,
    attention output) and (the MLP's two halves and their product). Logits: of the last token of
    each beam, plus twice as much for sampling; of every token when context logits are gathered.
    """
    tokens = intent.max_num_tokens
    q = checkpoint.num_attention_heads * checkpoint.head_size // intent.tp
    attention = 2 * q + 2 * _kv_size(checkpoint, intent.tp)
    mlp = checkpoint.kind.mlp_matrices * checkpoint.intermediate_size // intent.tp
    activations = tokens * (2 * checkpoint.hidden_size + max(attention, mlp)) * ITEM_BYTES
    rows = 3 * intent.max_batch_size * intent.max_beam_width
    if intent.gather_context_logits:
        rows += tokens
    logits = rows * checkpoint.vocab_size * LOGIT_BYTES
    several = COMMUNICATION_BYTES if intent.tp * intent.pp > 1 else 0
    return activations + logits + RUNTIME_BYTES + several


def lora_cache(checkpoint: Checkpoint, intent: Intent) -> LoraCachePlan | None:
    """Return settings for `intent.lora_adapters` adapters of all modules at the largest rank."""
    if not intent.lora_modules:
        return None
    base = base_model(checkpoint, intent)
    layers = tuple(range(checkpoint.num_hidden_layers))
    adapter = [ModuleRows(module, intent.max_lora_rank, layers) for module in intent.lora_modules]
    adapters = [adapter] * intent.lora_adapters
    best = recommend(base, adapters)
    return LoraCachePlan(
        adapters=intent.lora_adapters,
        bytes=best.host_bytes,
        optimal_adapter_size=best.optimal_adapter_size,
        max_adapter_size=best.max_adapter_size,
    )


def plan_memory(checkpoint: Checkpoint, intent: Intent, gpu: Gpu | None) -> MemoryPlan:
    """Return the memory plan for one `gpu`."""
    weights, workspace = weight_bytes(checkpoint, intent), workspace_bytes(checkpoint, intent)
    per_token = kv_bytes_per_token(checkpoint, intent)
    lora = lora_cache(checkpoint, intent)
    free = 0 if gpu is None else gpu.memory - weights - workspace
    return MemoryPlan(
        gpu=gpu,
        weights=weights,
        workspace=workspace,
        kv_bytes_per_token=per_token,
        lora=lora,
        kv_cache=_divide(free, per_token, lora),
    )


def _divide(free: int, per_token: int, lora: LoraCachePlan | None) -> KvCachePlan | None:
    """Give the LoRA cache what it needs, and the KV cache the rest up to `KV_FRACTION`."""
    if free <= 0:
        return None
    if lora is None:
        fraction, lora_fraction = KV_FRACTION, None
    else:
        # A tenth of the memory outside the KV pool stays free: a fraction of 1 would leave nothing.
        possible = math.floor((1 - lora.bytes / (0.9 * free)) * 100) / 100
        if possible <= 0:
            return None
        fraction = min(KV_FRACTION, possible)
        needed = math.ceil(lora.bytes / (free * (1 - fraction)) * 100) / 100
        lora_fraction = max(LORA_FRACTION, needed)
    pool = int(free * fraction)
    return KvCachePlan(
        bytes=pool, tokens=pool // per_token, fraction=fraction, lora_fraction=lora_fraction
    )


def _kv_size(checkpoint: Checkpoint, tp: int) -> int:
    """Return the number of values of one token's keys in one layer of one rank."""
    return max(1, checkpoint.num_key_value_heads // tp) * checkpoint.head_size


def _layer(checkpoint: Checkpoint, tp: int) -> int:
    """Return the number of weights of one transformer layer on one of `tp` ranks."""
    kind, hidden = checkpoint.kind, checkpoint.hidden_size
    q, kv = checkpoint.num_attention_heads * checkpoint.head_size // tp, _kv_size(checkpoint, tp)
    mlp = checkpoint.intermediate_size // tp
    weights = hidden * (q + 2 * kv) + q * hidden
    weights += kind.mlp_matrices * hidden * mlp * max(1, checkpoint.num_experts)
    weights += hidden * checkpoint.num_experts  # the router
    weights += kind.norms * hidden
    if kind.qk_norms:
        weights += 2 * checkpoint.head_size
    if checkpoint.attention_bias:
        weights += q + 2 * kv
        # Llama's and Qwen 3's `attention_bias` also applies to the output; Qwen 2's does not.
        weights += 0 if kind.qkv_bias else hidden
    if kind.biases:
        weights += (q + 2 * kv) + hidden + mlp + hidden + kind.norms * hidden
    return weights


def _ends(checkpoint: Checkpoint) -> int:
    """Return the weights of the last norm and of learned positions."""
    hidden = checkpoint.hidden_size
    if checkpoint.kind.biases:
        return 2 * hidden + checkpoint.max_position_embeddings * hidden
    return hidden
