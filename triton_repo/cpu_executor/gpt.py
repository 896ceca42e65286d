"""The GPT-2 model: LayerNorm with bias, learned positions and GELU, in float32.

The formulas are those of transformers' ``GPT2LMHeadModel``, whose linear layers (``Conv1D``) store
their weights as ``[in, out]``. On loading, the query weights are multiplied by the attention scale
``1/sqrt(head_size)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.causal_lm import CausalLM, PackedBatch, take
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.linear import Linear
from triton_repo.cpu_executor.weights import load_float32

Array = NDArray[np.float32]

# Prefix of tensor names in checkpoints of GPT2LMHeadModel. Checkpoints of GPT2Model, such as
# OpenAI's, have no prefix.
_PREFIX = "transformer."


@dataclass
class LayerNorm:
    """LayerNorm: ``(x - mean) / sqrt(variance + epsilon) * weight + bias``, per row."""

    weight: Array
    bias: Array
    epsilon: float

    def __call__(self, x: Array) -> Array:
        centred: Array = x - x.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", centred, centred)
        variance /= np.float32(x.shape[1])
        variance += np.float32(self.epsilon)
        centred /= np.sqrt(variance)[:, None]
        centred *= self.weight
        centred += self.bias
        return centred


@dataclass
class GptLayer:
    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


class Gpt(CausalLM):
    """The GPT-2 model, loaded from a ``GPT2LMHeadModel`` checkpoint."""

    def __init__(self, config: CpuEngineConfig, folder: str | Path) -> None:
        super().__init__(config, Path(folder))
        if config.lora_target_modules:
            raise ValueError("lora_target_modules: the CPU executor runs no adapters with GPT-2")
        tensors = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in load_float32(Path(folder)).items()
        }
        self._embedding = take(tensors, "wte.weight")
        self._positions = take(tensors, "wpe.weight")
        self._norm = self._layer_norm(tensors, "ln_f")
        # Use the embedding as lm_head if the checkpoint has no separate lm_head (tied weights).
        self._head = Linear(tensors.pop("lm_head.weight", self._embedding))
        self._layers = [
            GptLayer(
                attention_norm=self._layer_norm(tensors, f"h.{index}.ln_1"),
                qkv=self._qkv(tensors, f"h.{index}.attn.c_attn"),
                output=_conv1d(tensors, f"h.{index}.attn.c_proj"),
                mlp_norm=self._layer_norm(tensors, f"h.{index}.ln_2"),
                up=_conv1d(tensors, f"h.{index}.mlp.c_fc"),
                down=_conv1d(tensors, f"h.{index}.mlp.c_proj"),
            )
            for index in range(config.num_hidden_layers)
        ]

    def _layer_norm(self, tensors: dict[str, Array], name: str) -> LayerNorm:
        weight, bias = take(tensors, f"{name}.weight"), take(tensors, f"{name}.bias")
        return LayerNorm(weight, bias, self.config.norm_epsilon)

    def _qkv(self, tensors: dict[str, Array], name: str) -> Linear:
        matrices = np.split(take(tensors, f"{name}.weight").T, 3)
        biases = np.split(take(tensors, f"{name}.bias"), 3)
        return Linear(
            np.concatenate(self.fold_qkv(matrices)), np.concatenate(self.fold_qkv(biases))
        )

    def _layers_of(self, batch: PackedBatch) -> Array:
        heads, size = self.config.num_attention_heads, self.config.head_size
        rows = len(batch.positions)
        x = batch.embed(self._embedding)
        x += self._positions[batch.positions]
        for index, layer in enumerate(self._layers):
            query, key, value = np.split(layer.qkv(layer.attention_norm(x)), 3, axis=1)
            key, value = (each.reshape(rows, heads, size) for each in (key, value))
            x += layer.output(batch.attend(index, query, key, value))
            x += layer.down(gelu_new(layer.up(layer.mlp_norm(x))))
        return x

    def _final_norm(self, x: Array) -> Array:
        return self._norm(x)


def gelu_new(x: Array) -> Array:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016), which GPT-2 uses."""
    inner = x * x
    inner *= x
    inner *= np.float32(0.044715)
    inner += x
    inner *= np.float32(math.sqrt(2 / math.pi))
    out: Array = np.tanh(inner, out=inner)
    out += np.float32(1)
    out *= x
    out *= np.float32(0.5)
    return out


def _conv1d(tensors: dict[str, Array], name: str) -> Linear:
    return Linear(take(tensors, f"{name}.weight").T, take(tensors, f"{name}.bias"))
