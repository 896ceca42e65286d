"""The properties of a Hugging Face model that its engine depends on.

Only ``config.json`` is read, so an engine can be planned before the weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapters.config_json import ConfigError, Section, read_config
from adapters.engine_config import is_trtllm_checkpoint
from ops.deployment.architectures import ARCHITECTURES, Architecture

# File with ModelOpt's quantization settings. Other quantization tools use config.json.
_MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The properties of a Hugging Face model that an engine plan needs.

    Fields have the names that TensorRT-LLM uses. Sizes are those of the complete model, before
    tensor or pipeline parallelism splits it.

    Attributes:
        dtype: data type of the weights in the folder; None if config.json does not state it.
        num_experts: number of experts in each layer; 0 for a model without a mixture of experts.
        quantization: quantization method, such as gptq; None for a model that is not quantized.
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
    """Read ``folder/config.json``. Raises ConfigError if no engine can be planned for the model."""
    fields = read_config(folder)
    if fields.is_engine or is_trtllm_checkpoint(fields):
        found = "an engine" if fields.is_engine else "a TensorRT-LLM checkpoint"
        says = f"is that of {found}; name the Hugging Face folder that it was made from"
        raise ConfigError(fields.path, found, "a Hugging Face model", says=says)
    architecture = _architecture(fields)
    kind = ARCHITECTURES[architecture]
    bias, tied = fields.flag("attention_bias"), fields.flag("tie_word_embeddings")
    dtype = fields.text("torch_dtype", "dtype")
    heads = fields.require_count("num_attention_heads", "n_head")
    hidden = fields.require_count("hidden_size", "n_embd")
    return Checkpoint(
        folder=folder,
        architecture=architecture,
        dtype=dtype and dtype.removeprefix("torch."),
        num_hidden_layers=fields.require_count("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=fields.count("num_key_value_heads", least=1) or heads,
        head_size=fields.count("head_dim", least=1) or hidden // heads,
        intermediate_size=fields.count("intermediate_size", "n_inner", least=1) or 4 * hidden,
        num_experts=fields.count("num_local_experts") or 0,
        vocab_size=fields.require_count("vocab_size"),
        max_position_embeddings=fields.require_count("max_position_embeddings", "n_positions"),
        attention_bias=kind.qkv_bias if bias is None else bias,
        tied_embeddings=kind.tied_embeddings if tied is None else tied,
        quantization=_quantization(fields),
    )


def _architecture(fields: Section) -> str:
    found = fields.values.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        raise fields.build_error("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return str(found[0])


def _quantization(fields: Section) -> str | None:
    found = fields.values.get("quantization_config")
    if isinstance(found, Mapping):
        return str(found.get("quant_method", "unknown"))
    return "modelopt" if (fields.path.parent / _MODELOPT).exists() else None
