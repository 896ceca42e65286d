"""Translation of an engine plan to parameters of the llmapi repository, and to gateway settings."""

from __future__ import annotations

from ops.deployment.check_llm_arguments import TOKENS_PER_BLOCK
from ops.deployment.engine_plan import EnginePlan
from ops.deployment.intent import Intent
from triton_repo.parameters import Value

LLMAPI = "llmapi"
"""Value of the gateway setting triton_mode for the llmapi repository."""


def llmapi_parameters(plan: EnginePlan) -> dict[str, Value]:
    """Return the template parameters of the llmapi repository that follow from an engine plan.

    The parameter `model`, which names the Hugging Face folder, is not included.
    """
    intent, kv = plan.intent, plan.memory.kv_cache
    found: dict[str, Value] = {
        "dtype": intent.dtype,
        "tensor_parallel_size": intent.tp,
        "pipeline_parallel_size": intent.pp,
        "max_batch_size": intent.max_batch_size,
        "max_num_tokens": intent.max_num_tokens,
        "max_seq_len": intent.max_seq_len,
    }
    if intent.max_num_tokens < intent.max_seq_len:
        # Enable chunked prefill: without it, prompts above max_num_tokens would be refused.
        found["enable_chunked_prefill"] = True
    if kv is not None:
        found["free_gpu_memory_fraction"] = kv.fraction
    if intent.lora_modules:
        found |= {
            "lora_target_modules": ",".join(intent.lora_modules),
            "max_lora_rank": intent.max_lora_rank,
            "max_loras": intent.lora_adapters,
            "max_cpu_loras": intent.lora_adapters,
        }
    return found


def llmapi_settings(intent: Intent) -> dict[str, str]:
    """Return the gateway settings for a Triton with the llmapi repository, by names in `Settings`.

    The value is "" for a setting that the operator must fill in.
    """
    found = {
        "triton_mode": LLMAPI,
        "tokens_per_block": str(TOKENS_PER_BLOCK),
        # Send 25 % more requests to Triton than the engine's batch holds, to keep the engine busy.
        # Further requests wait in the gateway, which schedules tenants fairly.
        "replica_in_flight": str(intent.max_batch_size * 5 // 4),
    }
    return found | ({"peft_dir": ""} if intent.lora_modules else {})
