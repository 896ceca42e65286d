"""Reader of a TensorRT-LLM engine folder's config.json.

Two formats exist. TensorRT-LLM v0.8 and later write `pretrained_config` (the model) and
`build_config` (the limits). v0.5 to v0.7 write `builder_config` (model and limits, with other field
names) and `plugin_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.config_json import ConfigError, Section, read_config

_OFF = (None, False, "", "disable", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine, with TensorRT-LLM's field names.

    A field that the file does not state is None. Lengths are in tokens. Sizes describe the complete
    model, before any tensor parallel split.

    Attributes:
        max_seq_len: limit of prompt plus output. Engines before v0.11 state separate limits for
            the prompt and for the output. For such an engine, this field is the sum of the two.
        lora_plugin: a dtype or `auto`; None for an engine without LoRA.
        quant_algo, kv_cache_quant_algo: names such as FP8 or INT8.
        qwen_type: generation of a Qwen model. All generations have the same architecture name.
        raw_config: the JSON object in the file.
    """

    version: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    logits_dtype: str | None = None
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int | None = None
    num_experts: int | None = None
    max_position_embeddings: int | None = None
    world_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int | None = None
    max_prompt_embedding_table_size: int | None = None
    max_draft_len: int | None = None
    gather_context_logits: bool | None = None
    gather_generation_logits: bool | None = None
    paged_kv_cache: bool | None = None
    tokens_per_block: int | None = None
    use_paged_context_fmha: bool | None = None
    lora_plugin: str | None = None
    dora_plugin: bool | None = None
    lora_target_modules: tuple[str, ...] = ()
    max_lora_rank: int | None = None
    qwen_type: str | None = None
    raw_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def lora_dtype(self) -> str | None:
        """Data type that `lora_weights` must have.

        None for an engine without LoRA, or if the file does not state the type.
        """
        return self.dtype if self.lora_plugin == "auto" else self.lora_plugin

    @property
    def lora_tp_size(self) -> int | None:
        """Tensor parallel size for which the rows of `lora_weights` must be laid out.

        None for an engine without LoRA, or if the file does not state the type of `lora_weights`.
        """
        return None if self.lora_dtype is None else self.tp_size or 1

    @property
    def can_reuse_kv_cache(self) -> bool | None:
        """True if the engine can reuse cached prompt prefixes and process prompts in chunks.

        None if unknown. Both features need a paged KV cache, and attention kernels that can read
        it.
        """
        if self.paged_kv_cache is False or self.use_paged_context_fmha is False:
            return False
        return self.use_paged_context_fmha


def read_engine_config(folder: Path) -> EngineConfig:
    """Read the engine's ``folder/config.json``, in the format of TensorRT-LLM v0.5 or later.

    Raise ConfigError if the file cannot be read or does not describe an engine.
    """
    return engine_config(read_config(folder))


def engine_config(top: Section) -> EngineConfig:
    """Return the engine configuration in a parsed file.

    Raise ConfigError if the file does not describe an engine.
    """
    if top.is_engine:
        return _read_builder(top) if "builder_config" in top.values else _read_unified(top)
    if is_trtllm_checkpoint(top):
        found = "a TensorRT-LLM checkpoint, which is what an engine is built from"
        fix = f"run trtllm-build --checkpoint_dir {top.path.parent} and name what it writes"
        raise ConfigError(top.path, found, "an engine", says=f"is that of {found}; {fix}")
    found = f"the keys {', '.join(sorted(top.values)) or 'none'}"
    if "architectures" in top.values or "model_type" in top.values:
        found = "a Hugging Face model, not an engine"
        says = f"is that of {found}; build one (`gateway import` says how) and name its folder"
        raise ConfigError(top.path, found, "an engine", says=says)
    allowed = "what trtllm-build writes: pretrained_config and build_config"
    raise ConfigError(top.path, found, allowed)


def is_trtllm_checkpoint(top: Section) -> bool:
    """Return True if the file is from a checkpoint, the output of convert_checkpoint.py.

    An engine is built from a checkpoint; a checkpoint itself cannot be served.
    """
    return (
        not top.is_engine
        and isinstance(top.values.get("architecture"), str)
        and not top.values.keys().isdisjoint(("mapping", "producer", "quantization"))
    )


def _read_unified(top: Section) -> EngineConfig:
    """Read the format of TensorRT-LLM v0.8 and later."""
    model, build = top.section("pretrained_config"), top.section("build_config")
    plugins, lora = build.section("plugin_config"), build.section("lora_config")
    mapping, quantization = model.section("mapping"), model.section("quantization")
    moe = model.section("moe")
    every = build.flag("gather_all_token_logits")
    return EngineConfig(
        raw_config=top.values,
        version=top.text("version"),
        architecture=model.text("architecture"),
        qwen_type=model.text("qwen_type"),
        dtype=model.text("dtype"),
        logits_dtype=model.text("logits_dtype"),
        quant_algo=quantization.text("quant_algo"),
        kv_cache_quant_algo=quantization.text("kv_cache_quant_algo"),
        vocab_size=model.count("vocab_size"),
        num_hidden_layers=model.count("num_hidden_layers"),
        hidden_size=model.count("hidden_size"),
        num_attention_heads=model.count("num_attention_heads"),
        num_key_value_heads=model.count("num_key_value_heads"),
        head_size=model.count("head_size"),
        intermediate_size=model.count("intermediate_size"),
        num_experts=_first(moe.count("num_experts"), model.count("moe_num_experts")),
        max_position_embeddings=model.count("max_position_embeddings"),
        world_size=mapping.count("world_size"),
        tp_size=mapping.count("tp_size"),
        pp_size=mapping.count("pp_size"),
        gather_context_logits=_first(build.flag("gather_context_logits"), every),
        gather_generation_logits=_first(build.flag("gather_generation_logits"), every),
        paged_kv_cache=_first(_is_paged(build), plugins.flag("paged_kv_cache")),
        dora_plugin=plugins.flag("dora_plugin"),
        lora_target_modules=lora.names("lora_target_modules"),
        max_lora_rank=lora.count("max_lora_rank"),
        **_limits(build),
        **_plugins(plugins),
    )


def _read_builder(top: Section) -> EngineConfig:
    """Read the format of TensorRT-LLM v0.5 to v0.7."""
    build, plugins = top.section("builder_config"), top.section("plugin_config")
    tensor = build.count("tensor_parallel")
    pipeline = build.count("pipeline_parallel")
    every = build.flag("gather_all_token_logits")
    return EngineConfig(
        raw_config=top.values,
        architecture=build.text("name"),
        dtype=build.text("precision"),
        vocab_size=build.count("vocab_size"),
        num_hidden_layers=build.count("num_layers"),
        hidden_size=build.count("hidden_size"),
        num_attention_heads=build.count("num_heads"),
        num_key_value_heads=build.count("num_kv_heads"),
        max_position_embeddings=build.count("max_position_embeddings"),
        world_size=None if tensor is None else tensor * (pipeline or 1),
        tp_size=tensor,
        pp_size=pipeline,
        gather_context_logits=every,
        gather_generation_logits=every,
        paged_kv_cache=plugins.flag("paged_kv_cache"),
        lora_target_modules=build.names("lora_target_modules"),
        max_lora_rank=build.count("max_lora_rank"),
        **_limits(build),
        **_plugins(plugins),
    )


def _limits(build: Section) -> dict[str, Any]:
    """Return the engine's limits, whose names are the same in `build_config` and `builder_config`.

    `build` is one of these two sections. The keys of the result are fields of `EngineConfig`.
    """
    prompt, output = build.count("max_input_len"), build.count("max_output_len")
    both = None if prompt is None or output is None else prompt + output
    return {
        "max_batch_size": build.count("max_batch_size"),
        "max_input_len": prompt,
        "max_seq_len": _first(build.count("max_seq_len"), both),
        "max_num_tokens": build.count("max_num_tokens"),
        "max_beam_width": build.count("max_beam_width"),
        "max_prompt_embedding_table_size": build.count("max_prompt_embedding_table_size"),
        "max_draft_len": build.count("max_draft_len"),
    }


def _plugins(plugins: Section) -> dict[str, Any]:
    return {
        "tokens_per_block": plugins.count("tokens_per_block"),
        "use_paged_context_fmha": plugins.flag("use_paged_context_fmha"),
        "lora_plugin": _plugin(plugins, "lora_plugin"),
    }


def _plugin(plugins: Section, name: str) -> str | None:
    """Return the dtype of a TensorRT-LLM plugin, or "auto". Return None if the plugin is off."""
    value = plugins.values.get(name)
    if value in _OFF:
        return None
    return "auto" if value is True else plugins.text(name)


def _is_paged(build: Section) -> bool | None:
    kind = build.text("kv_cache_type")
    # Ignore a class name before the value: some releases write KVCacheType.PAGED instead of PAGED.
    return None if kind is None else kind.upper().rpartition(".")[2] == "PAGED"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
