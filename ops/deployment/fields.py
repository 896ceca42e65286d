"""Help texts of the fields of `DeploymentDescription`, for `gateway repo render` and the docs."""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "release": "of TensorRT-LLM, or the tag of Triton's container, such as 25.08: whose tensors "
    "and parameters are written; by default that of the engine",
    "engine_dir": "folder of config.json and rankN.engine, as Triton sees it",
    "local_engine_dir": "the same folder on this machine, where Triton sees another path",
    "tokenizer_dir": "the Hugging Face tokenizer's folder, as Triton sees it",
    "local_tokenizer_dir": "the same folder on this machine, where Triton sees another path",
    "triton_backend": "tensorrtllm (C++, the default) or python (which the CPU executor needs)",
    "decoupled": "true (the default) to stream",
    "batching_strategy": "inflight (the default), or V1: one static batch at a time",
    "triton_max_batch_size": "requests in a batch; by default the engine's limit",
    "max_beam_width": "widest beam search (default: 1); with more, decoding_mode becomes "
    "beam_search unless it is set",
    "max_queue_size": "requests that may wait; 0 (the default) is no limit",
    "max_queue_delay_microseconds": "how long Triton waits for a fuller batch (default: 0)",
    "batch_scheduler_policy": "guaranteed_no_evict (the server's default) or max_utilization, "
    "which may pause requests",
    "enable_chunked_context": "true to run long prompts in parts (the server's default: false)",
    "enable_kv_cache_reuse": "prompts share equal beginnings; by default where the engine can",
    "kv_cache_free_gpu_mem_fraction": "of the memory that is free after loading (default: 0.9)",
    "max_tokens_in_paged_kv_cache": "bound of the KV cache; the smaller of the two counts",
    "kv_cache_host_memory_bytes": "host memory for KV blocks that leave the GPU (default: 0)",
    "lora_cache_optimal_adapter_size": "rank that pages are made for (default: 8)",
    "lora_cache_max_adapter_size": "largest rank (default: 64)",
    "lora_cache_gpu_memory_fraction": "of the memory after engine and KV cache (default: 0.05)",
    "lora_cache_host_memory_bytes": "host memory for adapters (default: 1 GiB)",
    "guided_decoding_backend": "xgrammar or llguidance, to enforce JSON schemas and grammars",
    "xgrammar_tokenizer_info_path": "what guided decoding needs with tensorrtllm: the file that "
    "generate_xgrammar_tokenizer_info.py makes",
    "preprocessing_instance_count": "processes (default: 2)",
    "postprocessing_instance_count": "processes (default: 1, which keeps streamed text in order)",
    "bls_instance_count": "processes; each serves one request at a time (default: 4)",
}
