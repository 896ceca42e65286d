"""GPU memory that an engine needs, and the memory that remains for KV cache and LoRA adapters.

All sizes are bytes on one GPU. If the GPUs hold different parts of the model, the sizes are those
of the GPU with the least free memory.
Weights and KV cache are exact up to alignment. The workspace is an estimate, because TensorRT
determines its size during the build.
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
# Rough estimates of memory sizes. The first is for the CUDA context, cuBLAS and TensorRT. The
# second is for the buffers of NCCL and all-reduce, which only engines on several GPUs have.
RUNTIME_BYTES = 1024**3
COMMUNICATION_BYTES = 512 * 1024**2
# TensorRT-LLM's defaults of kv_cache_free_gpu_mem_fraction and lora_cache_gpu_memory_fraction.
KV_FRACTION = 0.9
LORA_FRACTION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCachePlan:
    """LoRA cache parameters of the `tensorrt_llm` model.

    Attributes:
        adapters: number of adapters of the largest rank that fit in the caches.
        bytes: size of the host cache, and also of the GPU cache.
        optimal_adapter_size: lora_cache_optimal_adapter_size, a rank.
        max_adapter_size: lora_cache_max_adapter_size, a rank.
    """

    adapters: int
    bytes: int
    optimal_adapter_size: int
    max_adapter_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCachePlan:
    """Size of the KV cache pool, and two parameters of TensorRT-LLM that divide the free memory.

    Attributes:
        bytes: size of the pool.
        tokens: capacity of the pool in tokens.
        fraction: kv_cache_free_gpu_mem_fraction, the pool's fraction of the free memory.
        lora_fraction: lora_cache_gpu_memory_fraction, the LoRA cache's fraction of the memory that
            the pool leaves free; None without LoRA.
    """

    bytes: int
    tokens: int
    fraction: float
    lora_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Use of one GPU's memory, in bytes.

    `kv_cache` is None if the GPU is unknown, or no memory is left for a KV cache.
    """

    gpu: Gpu | None
    weights: int
    workspace: int
    kv_bytes_per_token: int
    lora: LoraCachePlan | None
    kv_cache: KvCachePlan | None

    def fits(self, intent: Intent) -> bool | None:
        """Return True if a request of the largest size can run; None if the GPU is unknown."""
        if self.gpu is None:
            return None
        return self.kv_cache is not None and self.kv_cache.tokens >= largest_request(intent)


def largest_request(intent: Intent) -> int:
    """Return the maximum size of one request in the KV cache, in tokens.

    The prompt's tokens count once, because all beams share them. Generated tokens count per beam.
    """
    outputs = intent.max_seq_len - intent.max_input_len
    return intent.max_input_len + intent.max_beam_width * outputs


def parameter_count(checkpoint: Checkpoint) -> int:
    """Return the number of weights of the complete model, as model cards state it.

    A tied embedding counts once.
    """
    hidden, vocab = checkpoint.hidden_size, checkpoint.vocab_size
    tables = vocab * hidden * (1 if checkpoint.tied_embeddings else 2)
    layers = checkpoint.num_hidden_layers * _layer(checkpoint, tp=1)
    return tables + layers + _ends(checkpoint)


def weight_bytes(checkpoint: Checkpoint, intent: Intent) -> int:
    """Return the bytes of the weights on the rank with the largest part of the weights.

    Tensor parallelism splits a layer's matrices and lm_head, but not norms, router and embedding.
    If there are fewer KV heads than ranks, several ranks have copies of the same head. Pipeline
    stages consist of complete layers. The largest stage is the first: its embedding is larger than
    the last stage's part of lm_head. A tied embedding counts twice, because only some builds share
    it.
    """
    table = checkpoint.vocab_size * checkpoint.hidden_size
    head = math.ceil(table / intent.tp)
    tables = table + head if intent.pp == 1 else table
    layers = math.ceil(checkpoint.num_hidden_layers / intent.pp) * _layer(checkpoint, intent.tp)
    return (tables + layers + _ends(checkpoint)) * ITEM_BYTES


def kv_bytes_per_token(checkpoint: Checkpoint, intent: Intent, item_bytes: int = ITEM_BYTES) -> int:
    """Return the KV cache bytes of one token on one rank, for all layers of the rank."""
    layers = math.ceil(checkpoint.num_hidden_layers / intent.pp)
    return 2 * layers * _kv_size(checkpoint, intent.tp) * item_bytes


def workspace_bytes(checkpoint: Checkpoint, intent: Intent) -> int:
    """Return an estimate of the bytes of activations, logits and the runtime's own memory.

    Activations: every token of a step needs the residual and its norm. It also needs the buffers of
    the attention (queries, keys, values and output) or of the MLP (one for each weight matrix),
    whichever are larger.

    Logits: every beam needs three rows, one for its last token and two for sampling. If context
    logits are gathered, every token of a step needs another row.
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
    """Return the LoRA cache parameters; None for an engine without LoRA.

    The caches hold `intent.lora_adapters` adapters that change all modules with the largest rank.
    """
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
    """Return the memory plan of one rank on `gpu`. If the GPU is None, the plan has no KV cache."""
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
    """Divide `free` bytes between KV cache and LoRA cache.

    The LoRA cache gets the memory that it needs. The KV cache gets the rest, but at most the
    fraction `KV_FRACTION` of `free`. Return None if no memory is left for the KV cache.
    """
    if free <= 0:
        return None
    if lora is None:
        fraction, lora_fraction = KV_FRACTION, None
    else:
        # Leave a tenth of the memory outside the KV pool unused. Otherwise the LoRA cache's
        # fraction could be 1, and no memory would be left for the runtime.
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
    """Return the number of values in the keys of one token, in one layer on one rank."""
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
        # Add the bias of the output projection, except for Qwen 2. In Llama and Qwen 3, all four
        # projections have a bias; in Qwen 2 only those of queries, keys and values.
        weights += 0 if kind.qkv_bias else hidden
    if kind.biases:
        weights += (q + 2 * kv) + hidden + mlp + hidden + kind.norms * hidden
    return weights


def _ends(checkpoint: Checkpoint) -> int:
    """Return the number of weights of the final norm and of learned position embeddings.

    Of the known models, only GPT-2 has learned position embeddings.
    """
    hidden = checkpoint.hidden_size
    if checkpoint.kind.biases:
        return 2 * hidden + checkpoint.max_position_embeddings * hidden
    return hidden
