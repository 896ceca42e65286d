"""What an engine accepts: shapes, data type, LoRA modules and the rank limit.

Read from ``config.json`` of a TensorRT-LLM engine folder (v0.8 and later: `pretrained_config`
and `build_config`), or from a Hugging Face ``config.json``, which knows the shapes only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from adapters.adapter import DTYPES, MODULE_IDS, Dtype
from adapters.errors import MissingFile, UnsupportedEngine

_FILE = "config.json"
_HUB_CACHE = re.compile(r".*models--(?:.+--)?([^/]+)/snapshots/[^/]+$")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One served base model, as far as adapters are concerned.

    `names` are all names it is known by; an adapter's `base_model_name_or_path` must be one of
    them. Field names are those of TensorRT-LLM's configuration. Sizes are of the whole model,
    before any tensor parallel split.
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
        """Whether a name or a path ends in one of this model's names."""
        wanted = short_name(name_or_path)
        return any(short_name(name) == wanted for name in self.names)


def short_name(name_or_path: str) -> str:
    """The part that names the model: the last path component, case folded.

    A snapshot in the Hub's cache ends in a commit hash, so there it is the repository's name.
    """
    path = name_or_path.strip().replace("\\", "/").rstrip("/")
    cached = _HUB_CACHE.match(path)
    return (cached.group(1) if cached else path.rsplit("/", 1)[-1]).casefold()


def read_base_model(
    folder: Path,
    names: tuple[str, ...],
    *,
    dtype: Dtype | None = None,
    lora_target_modules: tuple[str, ...] | None = None,
    max_lora_rank: int | None = None,
) -> BaseModel:
    """Read ``folder/config.json``; `names` gain the folder's own name and `_name_or_path`.

    The keyword arguments override the file: `dtype` where Triton declares another type for
    `lora_weights`, the other two for a Hugging Face configuration, which has no build limits
    (then: float16, every module of the architecture, rank 64).
    Raises `MissingFile` and `UnsupportedEngine`.
    """
    path = folder / _FILE
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise MissingFile(str(path), _FILE, error.strerror, "a readable file") from error
    except ValueError as error:
        raise UnsupportedEngine(str(path), _FILE, error, "a JSON object") from error
    if not isinstance(config, dict):
        raise UnsupportedEngine(str(path), _FILE, type(config).__name__, "a JSON object")
    fields = _Fields(str(path), config)
    known = (*names, folder.resolve().name)
    if "pretrained_config" in config:
        model = _from_engine(fields, known)
    elif "architectures" in config:
        model = _from_hugging_face(fields, known)
    else:
        raise UnsupportedEngine(
            str(path), "top-level keys", sorted(config), "pretrained_config or architectures"
        )
    changes: dict[str, Any] = {}
    if dtype is not None:
        changes["dtype"] = dtype
    if lora_target_modules is not None:
        changes["lora_target_modules"] = _checked_modules(fields, lora_target_modules)
    if max_lora_rank is not None:
        changes["max_lora_rank"] = max_lora_rank
    return _replace(model, changes)


def _from_engine(fields: _Fields, names: tuple[str, ...]) -> BaseModel:
    shapes = fields.section("pretrained_config")
    build = fields.section("build_config")
    plugins = build.section("plugin_config")
    if not plugins.get("lora_plugin"):
        raise plugins.refuse("lora_plugin", "auto or a dtype: build the engine with --lora_plugin")
    lora = build.section("lora_config")
    modules = lora.get("lora_target_modules")
    if not isinstance(modules, list) or not modules:
        raise lora.refuse("lora_target_modules", "a list of LoRA module names")
    heads = shapes.count("num_attention_heads")
    hidden = shapes.count("hidden_size")
    mapping = shapes.section("mapping")
    moe = shapes.section("moe")
    architecture = shapes.text("architecture")
    if architecture == "QWenForCausalLM":
        # One class of TensorRT-LLM serves all Qwen generations; their projections differ.
        architecture = f"{architecture}:{shapes.text('qwen_type')}"
    return BaseModel(
        names=names,
        architecture=architecture,
        dtype=shapes.dtype("dtype"),
        num_hidden_layers=shapes.count("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=shapes.count("num_key_value_heads", heads),
        head_size=shapes.count("head_size", hidden // heads),
        intermediate_size=shapes.count("intermediate_size", 4 * hidden),
        num_experts=moe.count("num_experts", shapes.count("moe_num_experts", 0)),
        lora_target_modules=_checked_modules(lora, modules),
        max_lora_rank=lora.count("max_lora_rank", 64),
        tp_size=mapping.count("tp_size", 1),
        pp_size=mapping.count("pp_size", 1),
    )


def _from_hugging_face(fields: _Fields, names: tuple[str, ...]) -> BaseModel:
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise fields.refuse("architectures", "a list of one class name")
    heads = fields.count("num_attention_heads", fields.count("n_head", 0))
    hidden = fields.count("hidden_size", fields.count("n_embd", 0))
    if not heads or not hidden:
        raise fields.refuse("num_attention_heads, hidden_size", "positive numbers")
    own_name = fields.get("_name_or_path")
    return BaseModel(
        names=(*names, own_name) if isinstance(own_name, str) and own_name else names,
        architecture=str(architectures[0]),
        dtype="float16",
        num_hidden_layers=fields.count("num_hidden_layers", fields.count("n_layer", 0)),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=fields.count("num_key_value_heads", heads),
        head_size=fields.count("head_dim", hidden // heads),
        intermediate_size=fields.count("intermediate_size", fields.count("n_inner", 4 * hidden)),
        num_experts=fields.count("num_local_experts", 0),
        lora_target_modules=tuple(MODULE_IDS),
        max_lora_rank=64,
    )


def _checked_modules(fields: _Fields, modules: list[Any] | tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in modules if name not in MODULE_IDS]
    if unknown:
        raise UnsupportedEngine(
            fields.file, fields.path("lora_target_modules"), unknown, ", ".join(MODULE_IDS)
        )
    return tuple(modules)


def _replace(model: BaseModel, changes: dict[str, Any]) -> BaseModel:
    values = {name: getattr(model, name) for name in BaseModel.__dataclass_fields__}
    return BaseModel(**{**values, **changes})


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object that names its fields in errors. A field that is null counts as absent."""

    file: str
    values: Mapping[str, Any]
    prefix: str = ""

    def path(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, allowed: object) -> UnsupportedEngine:
        return UnsupportedEngine(self.file, self.path(name), self.get(name), allowed)

    def section(self, name: str) -> _Fields:
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return _Fields(self.file, value, f"{self.path(name)}.")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            if value == 0 and default == 0:
                return 0
            raise self.refuse(name, "a positive whole number")
        return value

    def dtype(self, name: str) -> Dtype:
        value = self.get(name)
        if value not in DTYPES:
            raise self.refuse(name, " or ".join(DTYPES))
        return cast(Dtype, value)
