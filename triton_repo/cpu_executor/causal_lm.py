"""Base class of the decoder-only transformers, which compute float32 logits.

``llama`` and ``gpt`` define the layers of their models. This module packs the tokens of all
sequences into one batch, runs attention over the KV caches, and selects the tokens for which the
logits are computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.attention import DecodeAttention, PrefillAttention
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.kv_cache import SequenceCache
from triton_repo.cpu_executor.linear import Linear
from triton_repo.cpu_executor.lora import LoraBatch, PreparedAdapter
from triton_repo.cpu_executor.weights import files

Array = NDArray[np.float32]


@dataclass
class Chunk:
    """Tokens of one sequence to process in one iteration.

    A decode step has a single token. A part of a prompt can have several tokens.
    """

    cache: SequenceCache
    tokens: Sequence[int]
    logits: int = 1
    """Number of tokens, counted from the chunk's end, whose logits are needed."""
    adapter: PreparedAdapter | None = None
    prompt_table: Array | None = None
    """Table ``[n, hidden]`` for p-tuning; row i is the embedding of token id ``vocab_size + i``."""


class PackedBatch:
    """The tokens of all chunks of one iteration, one row per token.

    ``positions``, int64 ``[rows]``, is the index of each token in its sequence.
    """

    def __init__(self, config: CpuEngineConfig, chunks: Sequence[Chunk]) -> None:
        """Pack the chunks. Chunks with one token must come before all others."""
        heads = config.num_attention_heads
        decoding = [c.cache for c in chunks if len(c.tokens) == 1]
        self._attentions: list[DecodeAttention | PrefillAttention] = []
        if decoding:
            self._attentions.append(DecodeAttention(decoding, heads))
        self._attentions += [
            PrefillAttention(c.cache, len(c.tokens), heads) for c in chunks[len(decoding) :]
        ]
        self._chunks = chunks
        self._counts = [len(c.tokens) for c in chunks]
        self._tokens = np.array([t for c in chunks for t in c.tokens], np.int64)
        self.positions = np.concatenate(
            [np.arange(c.cache.length, c.cache.length + len(c.tokens)) for c in chunks]
        )
        self.lora = _lora_batch(chunks, self._counts)
        self._mixed: Array = np.empty((len(self._tokens), heads * config.head_size), np.float32)

    def embed(self, table: Array) -> Array:
        """Return the tokens' embeddings ``[rows, hidden]``.

        Ids below the vocabulary's size are looked up in ``table``, all other ids in the chunk's
        prompt table if the chunk has one.
        """
        # Clip the ids to the range of the table. Like TensorRT-LLM, the executor accepts ids
        # outside the vocabulary. Without clipping, such an id could raise an IndexError.
        x = table[np.clip(self._tokens, 0, len(table) - 1)]
        start = 0
        for chunk, count in zip(self._chunks, self._counts, strict=True):
            if chunk.prompt_table is not None:
                virtual = self._tokens[start : start + count] - len(table)
                rows = np.flatnonzero(virtual >= 0)
                picked = np.minimum(virtual[rows], len(chunk.prompt_table) - 1)
                x[start + rows] = chunk.prompt_table[picked]
            start += count
        return x

    def attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """Append keys and values to the caches, and return attention ``[rows, heads * head_size]``.

        ``query`` is ``[rows, heads * head_size]``, already scaled. ``key`` and ``value`` are
        ``[rows, kv_heads, head_size]``. The next layer's call overwrites the returned array.
        """
        start = 0
        for attend in self._attentions:
            end = start + attend.rows
            rows = slice(start, end)
            self._mixed[rows] = attend(layer, query[rows], key[rows], value[rows])
            start = end
        return self._mixed

    def finish(self) -> None:
        """Increase the length of each cache by the number of its new tokens.

        Call this after the last layer.
        """
        for chunk, count in zip(self._chunks, self._counts, strict=True):
            chunk.cache.length += count

    def select_logit_rows(self, x: Array) -> Array:
        """Return the rows of ``x`` whose logits the chunks need, in the order of the chunks."""
        wanted: list[int] = []
        end = 0
        for chunk, count in zip(self._chunks, self._counts, strict=True):
            end += count
            wanted.extend(range(end - chunk.logits, end))
        selected: Array = x[wanted]
        return selected


class CausalLM(ABC):
    """A decoder-only transformer with loaded weights.

    Two threads must not call ``forward`` with the same KV cache.
    """

    _head: Linear

    def __init__(self, config: CpuEngineConfig, folder: Path) -> None:
        self.config = config
        self.parameter_bytes = sum(path.stat().st_size for path in files(folder))
        # Scale of attention scores. Subclasses load the query weights through `fold_qkv`, which
        # multiplies them by this scale.
        self._query_scale = np.float32(1 / math.sqrt(config.head_size))

    def forward(self, chunks: Sequence[Chunk]) -> Array:
        """Process all chunks as one batch, and append their keys and values to the caches.

        Returns float32 logits ``[n, vocab]``, in the order of the chunks: for each chunk, the rows
        of its last ``Chunk.logits`` tokens. Chunks with one token must come before all others.
        """
        batch = PackedBatch(self.config, chunks)
        x = self._layers_of(batch)
        batch.finish()
        return self._head(self._final_norm(batch.select_logit_rows(x)))

    def fold_qkv(self, parts: Sequence[Any]) -> list[Any]:
        """Convert the q, k and v tensors of a layer to the form in which the model stores them.

        The base class multiplies q by the attention scale. ``parts`` has three weight matrices,
        three biases or three LoRA B matrices. A missing bias is None, and is returned as None.
        """
        query, key, value = parts
        return [None if query is None else query * self._query_scale, key, value]

    @abstractmethod
    def _layers_of(self, batch: PackedBatch) -> Array:
        """Embed the batch and run all layers; return the residual stream ``[rows, hidden]``."""

    @abstractmethod
    def _final_norm(self, x: Array) -> Array: ...


def take(tensors: dict[str, Array], name: str) -> Array:
    """Remove a tensor from ``tensors`` and return it. Raises ValueError if it is missing."""
    if name not in tensors:
        raise ValueError(f"model.safetensors: tensor {name} is missing")
    return tensors.pop(name)


def _lora_batch(chunks: Sequence[Chunk], counts: Sequence[int]) -> LoraBatch:
    groups: dict[int, tuple[PreparedAdapter, list[int]]] = {}
    start = 0
    for chunk, count in zip(chunks, counts, strict=True):
        if chunk.adapter is not None:
            rows = groups.setdefault(id(chunk.adapter), (chunk.adapter, []))[1]
            rows.extend(range(start, start + count))
        start += count
    return LoraBatch([(adapter, np.array(rows)) for adapter, rows in groups.values()])
