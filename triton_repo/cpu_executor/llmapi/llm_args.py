"""The arguments of ``LLM`` that the CPU executor uses, and the engine folder built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from adapters.config_json import read_config
from triton_repo.cpu_executor import engine
from triton_repo.cpu_executor.executor_config import ExecutorConfig, KvCacheConfig

# Default KV cache block size, in tokens, of TensorRT-LLM's PyTorch backend.
TOKENS_PER_BLOCK = 32
# Arguments that are ignored: they affect only the GPUs and the execution, not the generated text.
_OF_GPUS = frozenset(
    {
        *("backend", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
        *("moe_expert_parallel_size", "moe_tensor_parallel_size", "gpus_per_node", "dtype"),
        *("attn_backend", "cuda_graph_config", "trust_remote_code", "disable_overlap_scheduler"),
    }
)
_KV_CACHE = {"enable_block_reuse", "max_tokens", "tokens_per_block", "free_gpu_memory_fraction"}
_LORA = {"lora_target_modules", "max_lora_rank", "max_loras", "max_cpu_loras"}


@dataclass(frozen=True, kw_only=True)
class LlmArgs:
    """Arguments of ``LLM``, with the names and defaults of the LLM API. Lengths are in tokens.

    Attributes:
        max_seq_len: limit of prompt plus output; None for the model's context length.
        kv_cache_config: the mapping may have the keys ``enable_block_reuse``, ``max_tokens`` and
            ``tokens_per_block``.
        lora_config: the mapping may have the keys ``lora_target_modules``, ``max_lora_rank`` and
            ``max_cpu_loras``; None for an engine without adapters.
    """

    model: str
    tokenizer: str | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    kv_cache_config: Mapping[str, Any] = field(default_factory=dict)
    lora_config: Mapping[str, Any] | None = None

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer or self.model)

    def executor_config(self) -> ExecutorConfig:
        cache = self.kv_cache_config
        return ExecutorConfig(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            enable_chunked_context=self.enable_chunked_prefill,
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=cache.get("enable_block_reuse", True),
                max_tokens=cache.get("max_tokens"),
            ),
        )

    def engine_folder(self, workspace: Path) -> Path:
        """Return the folder of the engine to load.

        If `model` is a Hugging Face folder, an engine is built in the folder `workspace`. If
        `model` is an engine folder, it is returned. Its limits are fixed, so ``ValueError`` is
        raised if the arguments set `max_seq_len` or `lora_config`.
        """
        model = Path(self.model)
        if "pretrained_config" in read_config(model).values:
            for name in ("max_seq_len", "lora_config"):
                if getattr(self, name):
                    raise ValueError(f"{name}: {model} is an engine folder, which says it itself")
            return model
        lora = self.lora_config
        limits = {"max_batch_size": self.max_batch_size, "max_num_tokens": self.max_num_tokens}
        rank = {} if lora is None else {"max_lora_rank": lora.get("max_lora_rank")}
        modules = () if lora is None else lora.get("lora_target_modules")
        return engine.build(
            model,
            workspace / "engine",
            max_seq_len=self.max_seq_len,
            tokens_per_block=self.kv_cache_config.get("tokens_per_block") or TOKENS_PER_BLOCK,
            lora_target_modules=engine.lora_modules(model) if modules is None else modules,
            **{name: value for name, value in (limits | rank).items() if value is not None},
        )


def read_args(given: Mapping[str, Any]) -> LlmArgs:
    """Return the parsed keyword arguments of ``LLM``. A value of None means unset.

    Raises ``ValueError`` with the names of unknown keywords.
    """
    kept = {name: value for name, value in given.items() if value is not None}
    known = {entry.name for entry in fields(LlmArgs)}
    _refuse_unknown("", kept.keys() - _OF_GPUS, known)
    _refuse_unknown("kv_cache_config.", kept.get("kv_cache_config", {}), _KV_CACHE)
    _refuse_unknown("lora_config.", kept.get("lora_config", {}), _LORA)
    return LlmArgs(**{name: value for name, value in kept.items() if name in known})


def update_llm_args_with_extra_dict(
    llm_args: Mapping[str, Any], llm_args_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``llm_args`` updated with ``llm_args_dict``, the values of a YAML file.

    Values of the file take precedence.
    """
    return {**llm_args, **llm_args_dict}


def _refuse_unknown(prefix: str, names: Any, allowed: set[str]) -> None:
    if unknown := sorted(set(names) - allowed):
        raise ValueError(
            f"{', '.join(prefix + name for name in unknown)}: not supported by the CPU executor; "
            f"allowed: {', '.join(sorted(allowed))}"
        )
