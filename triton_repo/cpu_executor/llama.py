"""The Llama model: RMSNorm, RoPE, GQA attention and SwiGLU, in float32.

The formulas are those of transformers' ``LlamaForCausalLM``. Two changes are made to the weights on
loading. The query weights are multiplied by the attention scale ``1/sqrt(head_size)``. The rows of
query and key weights are permuted to make the two elements of a rotary pair adjacent. RoPE is then
one complex product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.causal_lm import CausalLM, PackedBatch, take
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.linear import Linear
from triton_repo.cpu_executor.weights import load_float32

Array = NDArray[np.float32]


@dataclass
class LlamaLayer:
    input_norm: Array
    qkv: Linear
    output: Linear
    post_norm: Array
    gate_up: Linear
    down: Linear


class Llama(CausalLM):
    """The Llama model, loaded from a ``LlamaForCausalLM`` checkpoint."""

    def __init__(self, config: CpuEngineConfig, folder: str | Path) -> None:
        super().__init__(config, Path(folder))
        tensors = load_float32(Path(folder))
        self._rotary_order = rotary_order(config)
        self._embedding = take(tensors, "model.embed_tokens.weight")
        self._norm = take(tensors, "model.norm.weight")
        # Use the embedding as lm_head if the checkpoint has no separate lm_head (tied weights).
        self._head = Linear(tensors.pop("lm_head.weight", self._embedding))
        self._layers = [self._layer(tensors, i) for i in range(config.num_hidden_layers)]
        self._rotations = rotations(config)

    def _layer(self, tensors: dict[str, Array], index: int) -> LlamaLayer:
        prefix = f"model.layers.{index}."

        def join(names: Sequence[str], fold: bool = False) -> Linear:
            matrices = [take(tensors, f"{prefix}{name}.weight") for name in names]
            biases = [tensors.pop(f"{prefix}{name}.bias", None) for name in names]
            if fold:
                matrices = self.fold_qkv(matrices)
                biases = self.fold_qkv(biases)
            given = [b for b in biases if b is not None]
            if given and len(given) != len(names):
                raise ValueError(f"{prefix}: found a bias for only some of {list(names)}")
            return Linear(np.concatenate(matrices), np.concatenate(given) if given else None)

        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return LlamaLayer(
            input_norm=take(tensors, prefix + "input_layernorm.weight"),
            qkv=join(attention, fold=True),
            output=join(("self_attn.o_proj",)),
            post_norm=take(tensors, prefix + "post_attention_layernorm.weight"),
            gate_up=join(("mlp.gate_proj", "mlp.up_proj")),
            down=join(("mlp.down_proj",)),
        )

    def fold_qkv(self, parts: Sequence[Any]) -> list[Any]:
        """Return [q, k, v] with a scaled query, and query and key rows in `rotary_order`."""
        query, key, value = super().fold_qkv(parts)
        size = self.config.head_size

        def permute(rows: Any) -> Any:
            heads = rows.reshape(-1, size, *rows.shape[1:])
            return heads[:, self._rotary_order].reshape(rows.shape)

        return [
            None if query is None else permute(query),
            None if key is None else permute(key),
            value,
        ]

    # Ignore overflow in swiglu. For very negative gates exp is inf, and x / inf is 0, which is the
    # correct result.
    @np.errstate(over="ignore")
    def _layers_of(self, batch: PackedBatch) -> Array:
        config = self.config
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
        )
        rows, lora = len(batch.positions), batch.lora
        rotation = self._rotations[batch.positions][:, None, :]
        x = batch.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, config.norm_epsilon)
            qkv = layer.qkv(normed)
            lora.add(index, "qkv", normed, qkv)
            rotary = qkv[:, : (heads + kv_heads) * size].reshape(rows, -1, size)
            rotated = (rotary.view(np.complex64) * rotation).view(np.float32)
            query = rotated[:, :heads].reshape(rows, -1)
            key = rotated[:, heads:]
            value = qkv[:, (heads + kv_heads) * size :].reshape(rows, kv_heads, size)
            mixed = batch.attend(index, query, key, value)
            x += layer.output(mixed)
            lora.add(index, "output", mixed, x)
            normed = rms_norm(x, layer.post_norm, config.norm_epsilon)
            gate_up = layer.gate_up(normed)
            lora.add(index, "gate_up", normed, gate_up)
            inner = swiglu(gate_up)
            x += layer.down(inner)
            lora.add(index, "down", inner, x)
        return x

    def _final_norm(self, x: Array) -> Array:
        return rms_norm(x, self._norm, self.config.norm_epsilon)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` per row."""
    scale = np.einsum("ij,ij->i", x, x)
    scale /= np.float32(x.shape[1])
    scale += np.float32(epsilon)
    np.sqrt(scale, out=scale)
    out: Array = x / scale[:, None]
    out *= weight
    return out


def swiglu(gate_up: Array) -> Array:
    """Return ``silu(gate) * up``; ``gate_up`` is ``[rows, 2 * intermediate]``, gate first."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    out: Array = np.negative(gate)
    np.exp(out, out=out)
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up
    return out


def rotary_order(config: CpuEngineConfig) -> NDArray[np.int64]:
    """Return the row order for one head that makes the rows i and i + head_size / 2 adjacent."""
    half = config.head_size // 2
    return np.arange(config.head_size).reshape(2, half).T.reshape(-1)


def rotations(config: CpuEngineConfig) -> NDArray[np.complex64]:
    """Return the rotations of RoPE as unit complex numbers ``[max_seq_len, head_size / 2]``.

    The frequencies are the same as in transformers. The scaling ``default`` does not change them.
    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides frequencies with long
    wavelengths by ``factor``, and those with medium wavelengths by a smaller number.
    """
    size = config.head_size
    frequency = config.rotary_base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    scaling = config.rotary_scaling
    if scaling is not None and scaling["rope_type"] == "linear":
        frequency = frequency / scaling["factor"]
    elif scaling is not None:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        length = scaling["original_max_position_embeddings"]
        wavelength = 2 * np.pi / frequency
        blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
        frequency = (1 - blend) * frequency / scaling["factor"] + blend * frequency
    angle = np.outer(np.arange(config.max_seq_len, dtype=np.float64), frequency)
    turns: NDArray[np.complex64] = np.exp(1j * angle).astype(np.complex64)
    return turns
