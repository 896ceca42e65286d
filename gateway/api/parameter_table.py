"""What becomes of parameters that requests for a generation have no field for.

The fields of `generation_request` and `schemas` are served. The names here are what OpenAI's
platform, vLLM, TensorRT-LLM's own server, SGLang, llama.cpp, Ollama, text-generation-webui and
OpenRouter call things, as their documentation had them in November 2026; any other name is refused.
docs/parameters.md is made from this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from gateway.errors import InvalidRequest, UnsupportedParameter

HARMLESS = frozenset(
    {
        # Bookkeeping, routing and caching hints of OpenAI's platform.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
        # They say more of what is off: `NOT_SERVED` has what would turn it on.
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "dynatemp_high", "dynatemp_low", "smoothing_curve"),
        *("mirostat_eta", "mirostat_tau", "xtc_threshold"),
    }
)
"""Without effect on the answer, and nobody would miss one."""

HINTS = frozenset(
    {
        # How a local runner is to load and run the model.
        *("cache_prompt", "f16_kv", "id_slot", "keep_alive", "low_vram", "main_gpu"),
        *("max_context_length", "n_keep", "num_batch", "num_ctx", "num_gpu", "num_keep"),
        *("num_thread", "numa", "penalty_last_n", "repeat_last_n", "repetition_penalty_range"),
        *("sampler_order", "sampler_priority", "samplers", "slot_id", "temperature_last"),
        *("timings_per_token", "truncation_length", "use_mlock", "use_mmap", "vocab_only"),
        # Which provider OpenRouter should take, and what it should tell.
        *("models", "provider", "route", "session_id", "transforms", "usage"),
        "verbosity",
    }
)
"""Wishes that this server has nothing to do with. They are named in x-ignored-parameters, and
refused where GATEWAY_STRICT_PARAMETERS says so."""

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "add_bos_token": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "best_of": (1,),
    "custom_token_bans": ("", []),
    "detokenize": (True,),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),  # without functions both mean no call
    "functions": ([],),
    "grammar_string": ("",),
    "guidance_scale": (1,),
    "include_reasoning": (True,),
    "logits_processors": ([],),
    "min_keep": (0, 1),
    "min_p": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "nsigma": (0,),
    "parallel_tool_calls": (True, False),
    "penalty_alpha": (0,),
    "plugins": ([],),
    "priority": (0,),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tfs": (1,),
    "tfs_z": (1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "typical": (1,),
    "typical_p": (1,),
    "watermark": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""What would change the answer, with the values that ask for nothing (0 stands for 0.0, too). Some
are fields of one of the endpoints, and served there."""

NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (False,)}
"""More such values, where a template writes the prompt."""
NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (True,)}
"""And where the client does."""

UNSET: Mapping[str, tuple[Any, ...]] = {
    "max_completion_tokens": (-1,),
    "max_tokens": (-1,),
    "prompt_logprobs": (False,),
}
"""Values of fields that mean what null does."""

Fields = dict[str, Any]


class Renamed(NamedTuple):
    """What others call a field of ours: where that is, and what a value becomes."""

    place: str
    read: Callable[[Any], Fields]

    def fits(self, model: type[BaseModel]) -> bool:
        return self.place.partition(".")[0] in model.model_fields


def _field(name: str) -> Renamed:
    return Renamed(name, lambda value: {name: value})


def _guided(kind: str) -> Renamed:
    """An empty guide is none."""

    def read(value: Any) -> Fields:
        return {} if value in ("", {}) else {"structured_outputs": {kind: value}}

    return Renamed(f"structured_outputs.{kind}", read)


def _enable_thinking(value: Any, name: str = "enable_thinking") -> Fields:
    # Templates compare it with false, or ask whether it is empty: "false" would be neither.
    if not isinstance(value, bool):
        raise InvalidRequest(
            f"{name}: Input should be a valid boolean.", param=name.partition(".")[0]
        )
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _thinking(value: Any) -> Fields:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in ("enabled", "disabled"):
        raise UnsupportedParameter(
            'thinking: allowed: {"type": "enabled"} and {"type": "disabled"}.', param="thinking"
        )
    return _enable_thinking(kind == "enabled")


def _reasoning(value: Any) -> Fields:
    if not isinstance(value, dict) or value.keys() - {"effort", "enabled"}:
        raise UnsupportedParameter("reasoning: allowed: effort and enabled.", param="reasoning")
    effort, enabled = value.get("effort"), value.get("enabled")
    fields = {} if effort is None else {"reasoning_effort": effort}
    return fields if enabled is None else fields | _enable_thinking(enabled, "reasoning.enabled")


def _format(value: Any) -> Fields:
    if value in ("", {}):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


RENAMED: Mapping[str, Renamed] = {
    "ebnf": _guided("grammar"),
    "enable_thinking": Renamed("chat_template_kwargs.enable_thinking", _enable_thinking),
    "format": Renamed("response_format", _format),
    "grammar": _guided("grammar"),
    "guided_choice": _guided("choice"),
    "guided_grammar": _guided("grammar"),
    "guided_json": _guided("json"),
    "guided_regex": _guided("regex"),
    "json_schema": _guided("json"),
    "max_new_tokens": _field("max_tokens"),
    "n_predict": _field("max_tokens"),
    "num_predict": _field("max_tokens"),
    "reasoning": Renamed("reasoning_effort", _reasoning),
    "regex": _guided("regex"),
    "rep_pen": _field("repetition_penalty"),
    "repeat_penalty": _field("repetition_penalty"),
    "sampler_seed": Renamed("seed", lambda value: {} if value == -1 else {"seed": value}),
    "stopping_strings": _field("stop"),
    "thinking": Renamed("chat_template_kwargs.enable_thinking", _thinking),
}
