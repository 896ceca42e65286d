"""What a Hugging Face model folder says about its model, as far as engines depend on it.

Only ``config.json`` is needed, so an engine can be planned before the weights are downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.deployment.architectures import ARCHITECTURES, Architecture

_CONFIG = "config.json"
# ModelOpt writes this one beside config.json; the other tools write into config.json.
_MODELOPT = "hf_quant_config.json"


class CheckpointError(ValueError):
    """The folder holds no model that an engine can be planned for; names file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Sizes are of the whole model; names are TensorRT-LLM's.

    `dtype` is that of the weights in the folder, or None when it is not said. `num_experts` is 0
    without a mixture of experts. `quantization` is the method, such as gptq, or None.
    """

    folder: Path
    architecture: str
    dtype: str | None
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    num_experts: int
    vocab_size: int
    max_position_embeddings: int
    attention_bias: bool
    tied_embeddings: bool
    quantization: str | None

    @property
    def kind(self) -> Architecture:
        return ARCHITECTURES[self.architecture]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read ``folder/config.json``. Raises CheckpointError."""
    path = folder / _CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: found {type(data).__name__}; allowed: a JSON object")
    if "pretrained_config" in data:
        raise CheckpointError(f"{path}: this is an engine already, not a Hugging Face model")
    fields = _Fields(path, data)
    architecture = _architecture(fields)
    kind = ARCHITECTURES[architecture]
    heads = fields.count("num_attention_heads", "n_head")
    hidden = fields.count("hidden_size", "n_embd")
    return Checkpoint(
        folder=folder,
        architecture=architecture,
        dtype=fields.text("torch_dtype", "dtype"),
        num_hidden_layers=fields.count("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=fields.count("num_key_value_heads", default=heads),
        head_size=fields.count("head_dim", default=hidden // heads),
        intermediate_size=fields.count("intermediate_size", "n_inner", default=4 * hidden),
        num_experts=fields.count("num_local_experts", default=0),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=fields.count("max_position_embeddings", "n_positions"),
        attention_bias=fields.flag("attention_bias", default=kind.qkv_bias),
        tied_embeddings=fields.flag("tie_word_embeddings", default=kind.tied_embeddings),
        quantization=_quantization(fields),
    )


def _architecture(fields: _Fields) -> str:
    found = fields.values.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        raise fields.refused("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return str(found[0])


def _quantization(fields: _Fields) -> str | None:
    found = fields.values.get("quantization_config")
    if isinstance(found, Mapping):
        return str(found.get("quant_method", "unknown"))
    return "modelopt" if (fields.path.parent / _MODELOPT).exists() else None


@dataclass(frozen=True, slots=True)
class _Fields:
    """The configuration. A field that is null counts as absent."""

    path: Path
    values: Mapping[str, Any]

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            # 0 experts are none; nothing else can be 0.
            if not isinstance(value, int) or isinstance(value, bool) or value < (default != 0):
                raise self.refused(name, "a positive whole number")
            return value
        if default is None:
            raise self.refused(names[0], "a positive whole number")
        return default

    def text(self, *names: str) -> str | None:
        for name in names:
            value = self.values.get(name)
            if value is not None and not isinstance(value, str):
                raise self.refused(name, "a string")
            if value is not None:
                return value.removeprefix("torch.")
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return default if value is None else value

    def refused(self, name: str, allowed: str) -> CheckpointError:
        found = json.dumps(self.values.get(name))[:200]
        return CheckpointError(f"{self.path}: {name}: found {found}; allowed: {allowed}")
