"""Properties of an engine that an adapter must fit: shapes, data type, LoRA modules, largest rank.

The properties are read from the ``config.json`` of a TensorRT-LLM engine folder or of a Hugging
Face model folder. The file of a Hugging Face model states neither LoRA modules nor a largest rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapters.adapter import DTYPES, MODULE_IDS, Dtype
from adapters.base_names import is_same_model
from adapters.config_json import FILE, ConfigError, ConfigMissing, Section, read_config
from adapters.engine_config import EngineConfig, engine_config, is_trtllm_checkpoint
from adapters.errors import MissingFile, UnsupportedEngine


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A served base model, with the properties that an adapter must fit.

    `names` lists the names under which the model is known. The `base_model_name_or_path` of an
    adapter must match one of these names. All other fields are named as in TensorRT-LLM's
    configuration. Sizes describe the complete model, before any tensor parallel split.
    `lora_target_modules` may contain modules of newer TensorRT-LLM releases, which are missing in
    `MODULE_IDS`.
    """

    names: tuple[str, ...]
    architecture: str
    dtype: Dtype
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    num_experts: int
    lora_target_modules: tuple[str, ...]
    max_lora_rank: int
    tp_size: int = 1
    pp_size: int = 1

    def is_called(self, name_or_path: str) -> bool:
        """Return True if `name_or_path` means this model or a quantized copy of this model."""
        return any(is_same_model(name_or_path, name) for name in self.names)


def read_base_model(
    folder: Path,
    names: tuple[str, ...],
    *,
    dtype: Dtype | None = None,
    lora_target_modules: tuple[str, ...] | None = None,
    max_lora_rank: int | None = None,
) -> BaseModel:
    """Read the base model from ``folder/config.json``.

    The name of the folder is added to `names`, and so is the file's `_name_or_path` if it exists.

    The keyword arguments override the values of the file.

    Args:
        dtype: data type of `lora_weights`. Pass this argument if Triton's model configuration
            declares another type than the file. In the file of a Hugging Face model, every type
            other than bfloat16 is read as float16.
        lora_target_modules: modules that adapters may change. The default for a Hugging Face model
            is all modules.
        max_lora_rank: largest rank of an adapter. The default for a Hugging Face model is 64.

    Raise `MissingFile` if the file cannot be read. Raise `UnsupportedEngine` if its content is
    invalid, or if the engine cannot run adapters.
    """
    known = (*names, folder.resolve().name)
    try:
        top = read_config(folder)
        if top.is_engine or is_trtllm_checkpoint(top):
            model = engine_base_model(engine_config(top), known, str(top.path))
        else:
            model = _from_hugging_face(top, known)
    except ConfigMissing as error:
        raise MissingFile(
            str(error.path), FILE, error.found, error.allowed, says=error.says
        ) from error
    except ConfigError as error:
        raise UnsupportedEngine(
            str(error.path), error.field or FILE, error.found, error.allowed, says=error.says
        ) from error
    changes: dict[str, Any] = {"names": tuple(dict.fromkeys(model.names))}
    if dtype is not None:
        changes["dtype"] = dtype
    if lora_target_modules is not None:
        changes["lora_target_modules"] = lora_target_modules
    if max_lora_rank is not None:
        changes["max_lora_rank"] = max_lora_rank
    return replace(model, **changes)


def engine_base_model(engine: EngineConfig, names: tuple[str, ...], file: str) -> BaseModel:
    """Return the base model of an engine.

    Raise `UnsupportedEngine` if the engine cannot run adapters.

    `file` is the path of the configuration, for the error message.
    """

    def refuse(field: str, found: object, allowed: str) -> UnsupportedEngine:
        return UnsupportedEngine(file, field, found, allowed)

    def require_count(name: str) -> int:
        value: int | None = getattr(engine, name)
        if not value:
            raise refuse(f"pretrained_config.{name}", value, "a positive integer")
        return value

    if engine.lora_plugin is None:
        allowed = "auto or a dtype: build the engine with --lora_plugin"
        raise refuse("build_config.plugin_config.lora_plugin", None, allowed)
    modules = engine.lora_target_modules
    # Accept unknown modules, because newer TensorRT-LLM releases have more modules. At least one
    # module must be known. An adapter that changes an unknown module is refused when it is
    # converted.
    if MODULE_IDS.keys().isdisjoint(modules):
        field = "build_config.lora_config.lora_target_modules"
        raise refuse(field, list(modules), f"a list of LoRA modules: {', '.join(MODULE_IDS)}")
    if engine.max_lora_rank == 0:
        raise refuse("build_config.lora_config.max_lora_rank", 0, "a positive integer")
    dtype = next((known for known in DTYPES if known == engine.lora_dtype), None)
    if dtype is None:
        raise refuse("pretrained_config.dtype", engine.lora_dtype, " or ".join(DTYPES))
    architecture = engine.architecture
    if architecture is None:
        raise refuse("pretrained_config.architecture", None, "a string")
    if architecture == "QWenForCausalLM":
        # Append the generation: TensorRT-LLM has one class for all generations of Qwen, but their
        # projections differ.
        architecture = f"{architecture}:{engine.qwen_type}"
    heads, hidden = require_count("num_attention_heads"), require_count("hidden_size")
    return BaseModel(
        names=names,
        architecture=architecture,
        dtype=dtype,
        num_hidden_layers=require_count("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=engine.num_key_value_heads or heads,
        head_size=engine.head_size or hidden // heads,
        intermediate_size=engine.intermediate_size or 4 * hidden,
        num_experts=engine.num_experts or 0,
        lora_target_modules=modules,
        max_lora_rank=engine.max_lora_rank or 64,
        tp_size=engine.tp_size or 1,
        pp_size=engine.pp_size or 1,
    )


def _from_hugging_face(config: Section, names: tuple[str, ...]) -> BaseModel:
    architectures = config.names("architectures")
    if len(architectures) != 1:
        raise config.build_error("architectures", "a list of one class name")
    heads = config.require_count("num_attention_heads", "n_head")
    hidden = config.require_count("hidden_size", "n_embd")
    own_name = config.values.get("_name_or_path")
    written = (config.values.get("dtype"), config.values.get("torch_dtype"))
    return BaseModel(
        names=(*names, own_name) if isinstance(own_name, str) and own_name else names,
        architecture=architectures[0],
        dtype="bfloat16" if "bfloat16" in written else "float16",
        num_hidden_layers=config.require_count("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=config.count("num_key_value_heads", least=1) or heads,
        head_size=config.count("head_dim", least=1) or hidden // heads,
        intermediate_size=config.count("intermediate_size", "n_inner", least=1) or 4 * hidden,
        num_experts=config.count("num_local_experts") or 0,
        lora_target_modules=tuple(MODULE_IDS),
        max_lora_rank=64,
    )
