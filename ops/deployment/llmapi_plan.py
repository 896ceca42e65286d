"""What a plan means for the llmapi repository: its template's parameters, gateway settings."""

from __future__ import annotations

from ops.deployment.check_llm_arguments import TOKENS_PER_BLOCK
from ops.deployment.engine_plan import EnginePlan
from ops.deployment.intent import Intent
from triton_repo.parameters import Value

LLMAPI = "llmapi"
"""The gateway's mode of that name."""


def llmapi_parameters(plan: EnginePlan) -> dict[str, Value]:
    """Those of `triton_repo.llmapi_repository`, but for `model`."""
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
        # Otherwise a longer prompt would be refused.
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
    """The gateway's, by names of `Settings`; "" where only the operator can know."""
    found = {
        "triton_mode": LLMAPI,
        "tokens_per_block": str(TOKENS_PER_BLOCK),
        # Tenants take turns in the gateway; a quarter more waits in the engine, which never idles.
        "replica_in_flight": str(intent.max_batch_size * 5 // 4),
    }
    return found | ({"peft_dir": ""} if intent.lora_modules else {})
