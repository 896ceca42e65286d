"""What a TensorRT-LLM engine folder says about itself in its config.json.

Two forms exist. v0.8 and later have `pretrained_config` (the model) and `build_config` (the
limits). v0.5 to v0.7 have `builder_config` (both, under other names) and `plugin_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.adapter import DTYPES, MODULE_IDS, Dtype
from adapters.base_model import BaseModel

FILE = "config.json"
_OFF = (None, False, "", "disable", "false")


class EngineConfigError(ValueError):
    """The folder holds no readable engine configuration; the message names file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Facts of an engine, named as in TensorRT-LLM's build configuration; None is "not said".

    Lengths are in tokens, sizes are of the whole model before any tensor parallel split.
    `max_seq_len` is prompt plus output; before v0.11 it is the sum of the two limits.
    `lora_plugin` is a dtype or `auto`, and None for an engine without LoRA.
    `quant_algo` and `kv_cache_quant_algo` are names such as FP8 or INT8.
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

    @property
    def lora_dtype(self) -> str | None:
        """The dtype that `lora_weights` must have; None without LoRA or where nothing says it."""
        return self.dtype if self.lora_plugin == "auto" else self.lora_plugin

    @property
    def can_reuse_kv_cache(self) -> bool | None:
        """Whether KV cache reuse and chunked context work: both read the cache in blocks."""
        if self.paged_kv_cache is False or self.use_paged_context_fmha is False:
            return False
        return self.use_paged_context_fmha

    def lora_base(self) -> BaseModel | None:
        """The engine as the LoRA cache arithmetic takes it; None where facts are missing."""
        shapes = (self.num_hidden_layers, self.hidden_size, self.num_attention_heads)
        known = tuple(name for name in self.lora_target_modules if name in MODULE_IDS)
        if self.lora_plugin is None or not known or not all(shapes):
            return None
        layers, hidden, heads = (value or 0 for value in shapes)
        dtype: Dtype = next((name for name in DTYPES if name == self.lora_dtype), "float16")
        return BaseModel(
            names=(),
            architecture=self.architecture or "",
            dtype=dtype,
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or heads,
            head_size=self.head_size or hidden // heads,
            intermediate_size=self.intermediate_size or 4 * hidden,
            num_experts=self.num_experts or 0,
            lora_target_modules=known,
            max_lora_rank=self.max_lora_rank or 64,
            tp_size=self.tp_size or 1,
            pp_size=self.pp_size or 1,
        )


def read_engine_config(folder: Path) -> EngineConfig:
    """Read ``folder/config.json``, of any release.

    Raises EngineConfigError when the file cannot be read, is not an engine's, or holds a value
    of the wrong type.
    """
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise EngineConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineConfigError(f"{path}: found {type(data).__name__}; allowed: a JSON object")
    top = _Section(path, data)
    if "pretrained_config" in data:
        return _read_unified(top)
    if "builder_config" in data:
        return _read_builder(top)
    if "architectures" in data or "model_type" in data:
        raise EngineConfigError(
            f"{path}: this is a Hugging Face model, not an engine; build one with trtllm-build"
        )
    raise EngineConfigError(
        f"{path}: found the keys {', '.join(sorted(data)) or 'none'}; "
        "allowed: those of an engine, pretrained_config and build_config"
    )


def _read_unified(top: _Section) -> EngineConfig:
    """v0.8 and later."""
    model, build = top.section("pretrained_config"), top.section("build_config")
    plugins, lora = build.section("plugin_config"), build.section("lora_config")
    mapping, quantization = model.section("mapping"), model.section("quantization")
    moe = model.section("moe")
    every = build.flag("gather_all_token_logits")
    return EngineConfig(
        version=top.text("version"),
        architecture=model.text("architecture"),
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
        paged_kv_cache=_first(_paged(build), plugins.flag("paged_kv_cache")),
        dora_plugin=plugins.flag("dora_plugin"),
        lora_target_modules=lora.names("lora_target_modules"),
        max_lora_rank=lora.count("max_lora_rank"),
        **_limits(build),
        **_plugins(plugins),
    )


def _read_builder(top: _Section) -> EngineConfig:
    """v0.5 to v0.7."""
    build, plugins = top.section("builder_config"), top.section("plugin_config")
    tensor = build.count("tensor_parallel")
    pipeline = build.count("pipeline_parallel")
    every = build.flag("gather_all_token_logits")
    return EngineConfig(
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


def _limits(build: _Section) -> dict[str, Any]:
    """What has the same name in both forms."""
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


def _plugins(plugins: _Section) -> dict[str, Any]:
    return {
        "tokens_per_block": plugins.count("tokens_per_block"),
        "use_paged_context_fmha": plugins.flag("use_paged_context_fmha"),
        "lora_plugin": plugins.plugin("lora_plugin"),
    }


def _paged(build: _Section) -> bool | None:
    kind = build.text("kv_cache_type")
    # Some releases write the enum's name in front: KVCacheType.PAGED.
    return None if kind is None else kind.upper().rpartition(".")[2] == "PAGED"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, slots=True)
class _Section:
    """A JSON object that names its fields in errors. A field that is null counts as absent."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def section(self, name: str) -> _Section:
        value = self._typed(name, dict, "an object")
        return _Section(self.path, value or {}, f"{self.prefix}{name}.")

    def count(self, name: str) -> int | None:
        value: int | None = self._typed(name, int, "a whole number of at least 0")
        if isinstance(value, bool) or (value is not None and value < 0):
            raise self._refused(name, "a whole number of at least 0")
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a string")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self._typed(name, list, "a list of names") or []
        if not all(isinstance(item, str) for item in value):
            raise self._refused(name, "a list of names")
        return tuple(value)

    def flag(self, name: str) -> bool | None:
        """A boolean, or trtllm-build's `enable` and `disable`."""
        value = self.values.get(name)
        if value in ("enable", "disable"):
            return bool(value == "enable")
        found: bool | None = self._typed(name, bool, "true or false")
        return found

    def plugin(self, name: str) -> str | None:
        """The dtype of a plugin, or None for one that is off."""
        value = self.values.get(name)
        if value in _OFF:
            return None
        return "auto" if value is True else self.text(name)

    def _typed(self, name: str, kind: type, allowed: str) -> Any:
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._refused(name, allowed)
        return value

    def _refused(self, name: str, allowed: str) -> EngineConfigError:
        found = json.dumps(self.values.get(name))[:80]
        return EngineConfigError(
            f"{self.path}: {self.prefix}{name}: found {found}; allowed: {allowed}"
        )
