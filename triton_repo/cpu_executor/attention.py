"""Grouped-query attention over KV caches that are divided into blocks of tokens.

A sequence's result does not depend on the other sequences in the batch. For this purpose, every
matrix product covers one sequence and one block of keys, and sums over blocks are computed in the
order of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.kv_cache import SequenceCache

Array = NDArray[np.float32]

# Number of query tokens in a tile. One matrix product computes the attention of a tile. Each tile
# starts at a multiple of this number in the prompt. The shapes of the products are therefore the
# same, no matter how the prompt is divided into chunks.
QUERY_TILE = 64


@dataclass(kw_only=True)
class _Span:
    """Views of the KV cache and of the result arrays for one sequence in a decode step.

    The cache views cover all layers, so they are created once per iteration, not once per layer.
    """

    key_column: Array  # [layers, kv_heads, head_size]
    value_row: Array  # [layers, kv_heads, head_size]
    keys: Array  # [layers, blocks, kv_heads, head_size, tokens_per_block]
    values: Array  # [layers, blocks, kv_heads, tokens_per_block, head_size]
    scores: Array  # [blocks, kv_heads, group, tokens_per_block]
    products: Array  # [blocks, kv_heads, group, head_size]


class DecodeAttention:
    """Attention of a decode step, in which each of several sequences has one new token."""

    def __init__(self, caches: Sequence[SequenceCache], heads: int) -> None:
        cache = caches[0]
        _, _, kv_heads, head_size, block = cache.keys.shape
        group = heads // kv_heads
        counts = [c.length // block + 1 for c in caches]
        most = max(counts)
        self.rows = len(caches)
        self._shape = (self.rows, 1, kv_heads, group, head_size)
        self._scores: Array = np.zeros((self.rows, most, kv_heads, group, block), np.float32)
        self._products: Array = np.zeros((self.rows, most, kv_heads, group, head_size), np.float32)
        slots = np.arange(most * block).reshape(1, most, block)
        lengths = np.array([c.length for c in caches]).reshape(-1, 1, 1)
        self._mask = np.where(slots > lengths, np.float32(-np.inf), np.float32(0))
        self._mask = self._mask[:, :, None, None, :]
        self._spans = []
        for row, (c, count) in enumerate(zip(caches, counts, strict=True)):
            offset = c.length % block
            self._spans.append(
                _Span(
                    key_column=c.keys[count - 1, ..., offset],
                    value_row=c.values[count - 1, :, :, offset],
                    keys=c.keys[:count].swapaxes(0, 1),
                    values=c.values[:count].swapaxes(0, 1),
                    scores=self._scores[row, :count],
                    products=self._products[row, :count],
                )
            )

    def __call__(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """Write the new tokens' keys and values into the caches. Return the attention's result.

        ``key`` and ``value`` are ``[rows, kv_heads, head_size]``. ``query`` and the result are
        ``[rows, heads * head_size]``.
        """
        scores = self._scores
        for span, q, k, v in zip(self._spans, query.reshape(self._shape), key, value, strict=True):
            span.key_column[layer] = k
            span.value_row[layer] = v
            np.matmul(q, span.keys[layer], out=span.scores)
        scores += self._mask
        top = np.maximum.reduce(np.maximum.reduce(scores, axis=4), axis=1)
        scores -= top[:, None, :, :, None]
        np.exp(scores, out=scores)
        total = np.add.reduce(np.add.reduce(scores, axis=4), axis=1)
        for span in self._spans:
            np.matmul(span.scores, span.values[layer], out=span.products)
        out: Array = np.add.reduce(self._products, axis=1)
        out /= total[..., None]
        return out.reshape(self.rows, -1)


@dataclass
class _Tile:
    """Consecutive queries of a prompt chunk, with the mask of the keys that each query may use."""

    rows: slice
    blocks: int
    first_masked: int
    mask: Array  # [blocks - first_masked, 1, 1, rows, tokens_per_block]


class PrefillAttention:
    """Causal attention of consecutive prompt tokens of one sequence, over all earlier tokens."""

    def __init__(self, cache: SequenceCache, count: int, heads: int) -> None:
        _, _, kv_heads, head_size, block = cache.keys.shape
        start, end = cache.length, cache.length + count
        self.rows = count
        self._cache = cache
        self._shape = (kv_heads, heads // kv_heads, head_size)
        # One entry for each block to which the chunk is written: the block's index, the token slots
        # in the block, and the rows of the chunk that are written to these slots.
        self._writes: list[tuple[int, slice, slice]] = []
        for index in range(start // block, -(-end // block)):
            low, high = max(start, index * block), min(end, (index + 1) * block)
            slots = slice(low - index * block, high - index * block)
            self._writes.append((index, slots, slice(low - start, high - start)))
        self._tiles = []
        for first in range(start - start % QUERY_TILE, end, QUERY_TILE):
            low, high = max(start, first), min(end, first + QUERY_TILE)
            rows = slice(low - start, high - start)
            self._tiles.append(_tile(rows, low, high, block))

    def __call__(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """Write the new tokens' keys and values into the cache. Return the attention's result.

        ``key`` and ``value`` are ``[rows, kv_heads, head_size]``. ``query`` and the result are
        ``[rows, heads * head_size]``.
        """
        cache = self._cache
        for index, slots, rows in self._writes:
            cache.keys[index, layer, :, :, slots] = key[rows].transpose(1, 2, 0)
            cache.values[index, layer, :, slots] = value[rows].swapaxes(0, 1)
        if len(self._tiles) == 1:
            return self._attend(self._tiles[0], layer, query)
        return np.concatenate([self._attend(tile, layer, query[tile.rows]) for tile in self._tiles])

    def _attend(self, tile: _Tile, layer: int, query: Array) -> Array:
        kv_heads, group, head_size = self._shape
        count = len(query)
        # Stack the queries that share a key/value head: [kv_heads, group * rows, head_size].
        stacked = query.reshape(count, kv_heads, group, head_size).transpose(1, 2, 0, 3)
        stacked = stacked.reshape(1, kv_heads, group * count, head_size)
        scores = np.matmul(stacked, self._cache.keys[: tile.blocks, layer])
        by_row: Any = scores.reshape(tile.blocks, kv_heads, group, count, -1)
        by_row[tile.first_masked :] += tile.mask
        scores -= np.maximum.reduce(np.maximum.reduce(scores, axis=3), axis=0)[:, :, None]
        np.exp(scores, out=scores)
        total = np.add.reduce(np.add.reduce(scores, axis=3), axis=0)
        products = np.matmul(scores, self._cache.values[: tile.blocks, layer])
        out: Array = np.add.reduce(products, axis=0)
        out /= total[..., None]
        split: Array = out.reshape(kv_heads, group, count, head_size).transpose(2, 0, 1, 3)
        return split.reshape(count, -1)


def _tile(rows: slice, start: int, end: int, block: int) -> _Tile:
    # Mask only the blocks from the first query's block on. All queries may use the keys of earlier
    # blocks.
    first, blocks = start // block, -(-end // block)
    slots = np.arange(first * block, blocks * block).reshape(-1, 1, 1, 1, block)
    positions = np.arange(start, end).reshape(1, 1, 1, -1, 1)
    mask = np.where(slots > positions, np.float32(-np.inf), np.float32(0))
    return _Tile(rows, blocks, first, mask)
