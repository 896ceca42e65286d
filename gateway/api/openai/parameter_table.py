"""Parameters of generation requests that are not served, and how each is handled.

The served parameters are the fields of the models in `generation_request` and `schemas`. The names
here come from the documentation of OpenAI's platform, vLLM, TensorRT-LLM's own server, SGLang,
NVIDIA Dynamo, llama.cpp, Ollama, LM Studio, text-generation-webui, OpenRouter, Groq, Mistral, Qwen,
GLM and others in November 2026. The setting GATEWAY_UNKNOWN_PARAMETERS may let all other names
pass. So this file must list each name that would change an answer. docs/parameters.md is generated
from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARMLESS = frozenset(
    {
        # Metadata, routing and caching hints of OpenAI's platform.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
        # Ids and labels of a request at other servers, and caching hints.
        *("betas", "billing_policy", "client_metadata", "fallback_credit_token"),
        *("user_profile_id", "workspace_id"),
        *("cache_control", "litellm_metadata", "request_id", "rid", "tags", "user_id"),
        # Details of sampling features that are off here. The parameters that would enable these
        # features are in `NOT_SERVED`.
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "dynatemp_high", "dynatemp_low", "smoothing_curve"),
        *("mirostat_eta", "mirostat_tau", "xtc_threshold"),
    }
)
"""Parameters that cannot affect the answer. They are accepted silently."""

HINTS = frozenset(
    {
        # Options for loading and running the model in local servers.
        *("cache_prompt", "f16_kv", "id_slot", "keep_alive", "low_vram", "main_gpu"),
        *("max_context_length", "n_keep", "num_batch", "num_ctx", "num_gpu", "num_keep"),
        *("num_thread", "numa", "penalty_last_n", "repeat_last_n", "repetition_penalty_range"),
        *("sampler_order", "sampler_priority", "samplers", "slot_id", "temperature_last"),
        *("timings_per_token", "truncation_length", "use_mlock", "use_mmap", "vocab_only"),
        *("backend_sampling", "draft_model", "n_discard", "n_indent", "return_progress"),
        *("sse_ping_interval", "ttl"),
        # Parameters of OpenRouter: the choice of a provider, and debugging and usage data in the
        # response.
        *("debug", "models", "provider", "route", "session_id", "trace", "transforms", "usage"),
        # Parameters of other server products (such as NVIDIA Dynamo and SGLang) about routing,
        # caching, and the size of streamed chunks.
        *("agent_hierarchy", "agent_hints", "annotations", "backend_instance_id"),
        *("cache_salt", "conversation_params", "data_parallel_rank", "decode_worker_id"),
        *("extra_fields", "extra_key", "guided_decoding_backend", "prefill_worker_id"),
        *("incremental_output", "stream_interval", "tool_stream"),
        # Parameters of other servers for additional checks of the input, and for performance data
        # and token counts in the response.
        *("disable_tool_validation", "perf_metrics_in_response", "return_cached_tokens_details"),
        *("return_spec_tokens_details", "sensitive_word_check"),
        # Options of other protocols of OpenAI and Anthropic.
        *("access_programs", "context_management", "diagnostics", "fallbacks", "image"),
        *("personality", "speed", "verbosity"),
    }
)
"""Parameters that do not apply to this server. They are accepted without effect, and named in the
response header x-ignored-parameters. If GATEWAY_STRICT_PARAMETERS is set, they are refused."""

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,),
    "add_bos_token": (True,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "background_options": (),
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "compaction": (),
    "container": (),
    "continue_final_message": (False,),
    "conversation": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "custom_token_bans": ("", []),
    "detokenize": (True,),
    "disaggregated_params": (),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "enable_code_interpreter": (False,),
    "enable_search": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exclude_domains": ([],),
    "function_call": ("none", "auto"),  # neutral: without functions, both mean no call
    "functions": ([],),
    "grammar_lazy": (False,),
    "grammar_string": ("",),
    "guidance_scale": (1,),
    "guided_whitespace_pattern": ("",),
    "image_data": ([],),
    "images": ([],),
    "inference_geo": (),
    "include": ([],),
    "include_domains": ([],),
    "include_reasoning": (True,),
    "input": (),
    "input_ids": (),
    "instructions": ("",),
    "kv_transfer_params": ({},),
    "logits_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ([],),
    "lora_path": ("",),
    "lora_request": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "media_io_kwargs": ({},),
    "messages": (),
    "min_keep": (0, 1),
    "min_p": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n_cmpl": (1,),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "nsigma": (0,),
    "output_config": ({},),
    "output_format": ({},),
    "parallel_tool_calls": (True, False),
    "penalty_alpha": (0,),
    "plugins": ([],),
    "post_sampling_probs": (False,),
    "previous_response_id": (),
    "priority": (0,),
    "prompt": (),
    "prompt_embeds": (),
    "prompt_ignore_length": (0,),
    "prompt_mode": (),
    "prompt_token_ids": (),
    "raw": (False,),
    "raw_output": (False,),
    "reasoning_effort": (),
    "reasoning_format": ("parsed", "auto", "deepseek"),
    "reasoning_split": (True,),
    "repetition_detection": (),
    "return_context_logits": (False,),
    "return_full_text": (False,),
    "return_generation_logits": (False,),
    "return_hidden_states": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_mm_kwargs": (True, False),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_token_offsets": (False,),
    "return_tokens": (False,),
    "routed_experts_prompt_start": (0,),
    "safe_prompt": (False,),
    "safety_model": ("",),
    "search_options": ({},),
    "search_parameters": ({},),
    "search_settings": ({},),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "shift": (False,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "speculation": (),
    "stop_regex": ("", []),
    "stop_sequences": ([],),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "system": ("", []),
    "template": ("",),
    "text": ({},),
    "tfs": (1,),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "token_data": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "top_n_sigma": (-1, 0),
    "top_p_min": (0,),
    "truncate": (False,),
    "truncation": ("disabled",),
    "typical": (1,),
    "typical_p": (1,),
    "use_audio_in_video": (False,),
    "use_raw_prompt": (False,),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Parameters that would change the answer, each with its neutral values (0 also stands for 0.0).

A neutral value has the same effect as leaving the parameter out, so it is accepted. Any other value
is refused. If a request model has a field of the same name, its endpoints serve the parameter, and
only the other endpoints refuse it. The table also has parameters of other protocols.
"""

NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (False,)}
"""Further neutral values in chat requests, where the chat template adds the special tokens."""
NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (True,)}
"""Further neutral values in completion requests, where the gateway adds the special tokens."""

UNSET: Mapping[str, tuple[Any, ...]] = {
    "max_completion_tokens": (-1,),
    "max_tokens": (-1,),
    "prompt_logprobs": (False,),
}
"""Values that count as null, for each parameter that accepts such values."""
