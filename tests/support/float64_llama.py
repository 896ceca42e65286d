"""A Llama in float64, written from its definition: the reference for adapters and engines.

The code is independent of the product's. Adapters are merged into the weights, like in PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Floats = npt.NDArray[np.float64]


class Float64Llama:
    """The model in a Hugging Face folder, whose weights must have dtypes that numpy supports."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._weights = {
            name: value.astype(np.float64)
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self.layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._head: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        self._theta: float = config["rope_theta"]
        self._tied: bool = config["tie_word_embeddings"]

    def size(self, module: str) -> tuple[int, int]:
        """Return the (in, out) features of the linear layer at this path."""
        outputs, inputs = self._weights[f"{module}.weight"].shape
        return inputs, outputs

    def logprobs(self, ids: list[int], deltas: Mapping[str, Floats]) -> Floats:
        """Return the log probability of each token except the first, given the tokens before it.

        `deltas` [out, in] are added to the weights of the linear layers at these paths.
        """
        logits = self._logits(ids, deltas)[:-1]
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return np.asarray(logits[np.arange(len(ids) - 1), ids[1:]])

    def _logits(self, ids: list[int], deltas: Mapping[str, Floats]) -> Floats:
        def linear(module: str, values: Floats) -> Floats:
            weight = self._weights[f"{module}.weight"]
            if module in deltas:
                weight = weight + deltas[module]
            return values @ weight.T

        hidden = self._weights["model.embed_tokens.weight"][ids]
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            normed = self._norm(f"{layer}.input_layernorm", hidden)
            q, k, v = (linear(f"{layer}.self_attn.{name}_proj", normed) for name in "qkv")
            attended = self._attention(q, k, v)
            hidden = hidden + linear(f"{layer}.self_attn.o_proj", attended)
            normed = self._norm(f"{layer}.post_attention_layernorm", hidden)
            gate = linear(f"{layer}.mlp.gate_proj", normed)
            up = linear(f"{layer}.mlp.up_proj", normed)
            hidden = hidden + linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        head = "model.embed_tokens" if self._tied else "lm_head"
        return np.asarray(self._norm("model.norm", hidden) @ self._weights[f"{head}.weight"].T)

    def _norm(self, name: str, values: Floats) -> Floats:
        mean = (values**2).mean(axis=-1, keepdims=True)
        return values / np.sqrt(mean + self._eps) * self._weights[f"{name}.weight"]

    def _attention(self, q: Floats, k: Floats, v: Floats) -> Floats:
        length = len(q)
        q = self._rotated(q.reshape(length, self._heads, self._head))
        k = self._rotated(k.reshape(length, self._kv_heads, self._head))
        share = self._heads // self._kv_heads
        k = np.repeat(k, share, axis=1)
        v = np.repeat(v.reshape(length, self._kv_heads, self._head), share, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self._head)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", scores, v).reshape(length, -1)

    def _rotated(self, values: Floats) -> Floats:
        half = self._head // 2
        angles = np.outer(np.arange(len(values)), self._theta ** (-np.arange(half) / half))
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = values[..., :half], values[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
