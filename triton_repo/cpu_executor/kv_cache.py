"""The KV cache of the CPU executor.

`SequenceCache` has the blocks of one sequence. `BlockPool` limits the blocks of all sequences, and
stores blocks that later prompts with the same beginning can reuse.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.request_config import KvCacheRetentionConfig
from triton_repo.cpu_executor.result import KvCacheMetrics
from triton_repo.cpu_executor.stats import KvCacheStats

Array = NDArray[np.float32]
DEFAULT_PRIORITY = 35


def block_bytes(config: CpuEngineConfig) -> int:
    """Return the size of one block in bytes.

    A block has the float32 keys and values of all layers.
    """
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_size
    return 2 * 4 * config.tokens_per_block * per_token


def default_max_tokens(config: CpuEngineConfig, memory_fraction: float | None) -> int:
    """Return the default capacity of the cache in tokens.

    The default suffices for ``max_batch_size`` sequences of ``max_seq_len`` tokens. It is smaller
    if such a cache would exceed the fraction ``memory_fraction`` of the machine's memory; None
    selects 0.9.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fraction = 0.9 if memory_fraction is None else memory_fraction
    fitting = int(memory * fraction) // block_bytes(config) * config.tokens_per_block
    return min(config.max_batch_size * config.max_seq_len, fitting)


class SequenceCache:
    """Keys and values of one sequence for all layers, float32.

    Attributes:
        keys: ``[blocks, layers, kv_heads, head_size, tokens_per_block]``. Tokens are the last axis,
            because attention multiplies queries by the keys.
        values: ``[blocks, layers, kv_heads, tokens_per_block, head_size]``.
        length: number of stored tokens. The slots after them contain zeros.
    """

    def __init__(self, config: CpuEngineConfig, tokens: int) -> None:
        """Allocate space for ``tokens`` tokens. ``reserve`` can extend it."""
        size = config.tokens_per_block
        shape = (-(-tokens // size), config.num_hidden_layers, config.num_key_value_heads)
        self.tokens_per_block = size
        self.length = 0
        self.keys: Array = np.zeros((*shape, config.head_size, size), np.float32)
        self.values: Array = np.zeros((*shape, size, config.head_size), np.float32)

    def reserve(self, tokens: int) -> None:
        """Extend the space to at least ``tokens`` tokens, including the stored tokens."""
        blocks = len(self.keys)
        if tokens > blocks * self.tokens_per_block:
            more = max(-(-tokens // self.tokens_per_block), 2 * blocks)
            self.keys = _grown(self.keys, more)
            self.values = _grown(self.values, more)

    def fork(self) -> SequenceCache:
        """Return an independent copy."""
        twin = object.__new__(SequenceCache)
        twin.tokens_per_block = self.tokens_per_block
        twin.length = self.length
        twin.keys = self.keys.copy()
        twin.values = self.values.copy()
        return twin


def _grown(blocks: Array, count: int) -> Array:
    grown: Array = np.zeros((count, *blocks.shape[1:]), np.float32)
    grown[: len(blocks)] = blocks
    return grown


@dataclass(slots=True)
class _Stored:
    slot: int
    """Index of the block in the pool's arrays."""
    priority: int
    expires: float | None


class BlockPool:
    """Store of KV cache blocks that later prompts may reuse.

    The pool also limits the number of blocks that running requests use.

    Stored blocks only use the capacity that running requests do not need. Blocks of the lowest
    priority are evicted first. Among blocks of equal priority, the least recently used block is
    evicted first.

    The keys and values in a block depend on the adapter, on the prompt table, and on all tokens up
    to the block's end. A block's name is therefore a digest of ``ActiveRequest.reuse_key`` and of
    these tokens.

    Stored blocks are in two arrays with space for ``max_blocks`` blocks. The arrays are never
    freed. Allocating each block separately would fragment the process' memory.
    """

    def __init__(self, max_blocks: int, tokens_per_block: int, reuse: bool) -> None:
        self.max_blocks = max_blocks
        self.tokens_per_block = tokens_per_block
        self.reuse = reuse
        self.used = 0
        self._totals = KvCacheMetrics()
        self._stored: dict[bytes, _Stored] = {}
        # Arrays ``[max_blocks, ...]``, allocated when the first block is stored. The kernel assigns
        # memory only to blocks that have been written.
        self._keys: Array | None = None
        self._values: Array | None = None
        # Indices of free blocks in the arrays. The last index is taken first. A freed index is
        # therefore used again before an index that was never used.
        self._free = list(range(max_blocks - 1, -1, -1))
        self._by_priority: dict[int, OrderedDict[bytes, None]] = {}
        self._expiries: list[tuple[float, bytes]] = []

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    @property
    def stored_count(self) -> int:
        return len(self._stored)

    def use(self, blocks: int) -> None:
        """Set the number of blocks that running requests use.

        Evict stored blocks that no longer fit.
        """
        self.used = blocks
        self._evict_to(max(0, self.max_blocks - blocks))

    def load(self, cache: SequenceCache, tokens: Sequence[int], key: object) -> int:
        """Copy a prompt's stored blocks into an empty cache. Return the number of copied blocks.

        The block with the last prompt token is never copied: that token must be processed, because
        its logits are needed.
        """
        reused = 0
        if self._keys is not None and self._values is not None:
            usable = (len(tokens) - 1) // self.tokens_per_block
            names = self.names(tokens[: usable * self.tokens_per_block], key)
            while reused < len(names) and names[reused] in self._stored:
                slot = self._stored[names[reused]].slot
                cache.keys[reused] = self._keys[slot]
                cache.values[reused] = self._values[slot]
                reused += 1
            for name in reversed(names[:reused]):
                self._touch(name)
            cache.length = reused * self.tokens_per_block
        return reused

    def count(self, prompt_tokens: int, reused: int, metrics: KvCacheMetrics) -> None:
        """Add a prompt's new and reused blocks to the totals of the pool and to ``metrics``."""
        total = self.blocks(prompt_tokens)
        for target in (self._totals, metrics):
            target.num_total_allocated_blocks += total
            target.num_new_allocated_blocks += total - reused
            target.num_reused_blocks += reused
            target.num_missed_blocks += total - reused
            looked_up = target.num_reused_blocks + target.num_missed_blocks
            target.kv_cache_hit_rate = target.num_reused_blocks / looked_up

    def store(
        self,
        cache: SequenceCache,
        tokens: Sequence[int],
        key: object,
        prompt_tokens: int,
        retention: KvCacheRetentionConfig | None,
    ) -> None:
        """Store the full blocks of a sequence, so that later prompts can reuse them.

        Blocks that exceed the capacity left by running requests are not stored.
        """
        if not self.reuse:
            return
        full = min(len(tokens), cache.length) // self.tokens_per_block
        names = self.names(tokens[: full * self.tokens_per_block], key)
        # Mark the blocks as used in reverse order: the sequence's last blocks are then evicted
        # first.
        for name in reversed(names):
            if name in self._stored:
                self._touch(name)
        fresh = [i for i, name in enumerate(names) if name not in self._stored]
        fresh = fresh[: self.max_blocks - self.used]
        self._evict_to(self.max_blocks - self.used - len(fresh))
        if self._keys is None or self._values is None:
            self._keys = np.empty((self.max_blocks, *cache.keys.shape[1:]), np.float32)
            self._values = np.empty((self.max_blocks, *cache.values.shape[1:]), np.float32)
        for i in reversed(fresh):
            first = i * self.tokens_per_block
            priority, lasting = _retention(retention, first, first >= prompt_tokens)
            expires = None if lasting is None else time.monotonic() + lasting
            slot = self._free.pop()
            self._keys[slot] = cache.keys[i]
            self._values[slot] = cache.values[i]
            self._stored[names[i]] = _Stored(slot, priority, expires)
            if expires is not None:
                heapq.heappush(self._expiries, (expires, names[i]))
            self._touch(names[i])

    def names(self, tokens: Sequence[int], key: object) -> list[bytes]:
        """Return the names of the blocks of ``tokens``; ``key`` is ``ActiveRequest.reuse_key``."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16)
        names = []
        for start in range(0, len(tokens), self.tokens_per_block):
            digest.update(array("q", tokens[start : start + self.tokens_per_block]).tobytes())
            names.append(digest.digest())
        return names

    def stats(self) -> KvCacheStats:
        totals = self._totals
        return KvCacheStats(
            max_num_blocks=self.max_blocks,
            free_num_blocks=self.max_blocks - self.used,
            used_num_blocks=self.used,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=totals.num_total_allocated_blocks,
            alloc_new_blocks=totals.num_new_allocated_blocks,
            reused_blocks=totals.num_reused_blocks,
            missed_blocks=totals.num_missed_blocks,
            cache_hit_rate=totals.kv_cache_hit_rate,
        )

    def _touch(self, name: bytes) -> None:
        bucket = self._by_priority.setdefault(self._stored[name].priority, OrderedDict())
        bucket[name] = None
        bucket.move_to_end(name)

    def _evict_to(self, count: int) -> None:
        if len(self._stored) <= count:
            return
        while self._expiries and self._expiries[0][0] <= time.monotonic():
            self._expire(*heapq.heappop(self._expiries))
        while len(self._stored) > count:
            lowest = min(p for p, bucket in self._by_priority.items() if bucket)
            name, _ = self._by_priority[lowest].popitem(last=False)
            self._free.append(self._stored.pop(name).slot)

    def _expire(self, when: float, name: bytes) -> None:
        block = self._stored.get(name)
        # Ignore the expiry if it belongs to an earlier block of this name. That block was evicted,
        # and the block was stored again with another expiry.
        if block is not None and block.expires == when:
            del self._by_priority[block.priority][name]
            block.priority = DEFAULT_PRIORITY
            self._touch(name)
            self._by_priority[DEFAULT_PRIORITY].move_to_end(name, last=False)


def _retention(
    config: KvCacheRetentionConfig | None, first_token: int, generated: bool
) -> tuple[int, float | None]:
    """Return the retention priority of a block, and the seconds for which the priority is valid.

    The seconds are None if the priority does not expire.
    """
    if config is None:
        return DEFAULT_PRIORITY, None
    if generated:
        lasting = config.decode_duration_ms
        priority = config.decode_retention_priority
        return priority, None if lasting is None else lasting.total_seconds()
    for part in config.token_range_retention_configs:
        end = part.token_end
        if part.token_start <= first_token and (end is None or first_token < end):
            lasting = part.duration_ms
            return part.priority, None if lasting is None else lasting.total_seconds()
    return DEFAULT_PRIORITY, None
