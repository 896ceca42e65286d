"""Estimate of which prompt prefixes one engine has in its KV cache.

An engine caches keys and values in blocks of tokens. A prompt can reuse a cached block if all its
tokens up to the end of this block are the same. The engine evicts the least recently used blocks
first. This module stores hashes of prompt prefixes, and drops the least recently used hashes first,
too. To save time, only some prefixes of a prompt are hashed: all prefixes of up to 12 blocks, and
then prefixes that are each about one sixth longer than the previous prefix.

The engine reports how many tokens of each prompt were cached. If this number is smaller than
expected, the engine has evicted the prefix that was expected to be cached. Then all prefixes that
were last confirmed as cached before this prefix count as evicted, too.

Python's hash function for bytes is used, which depends on a secret key of the process. A client can
therefore not construct a prompt that has the hash of another prompt.

See decision 073 in docs/decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gateway.generation.engine_request import Generation

_BLOCK_BYTES = 4 * 32
"""Assumed block size in bytes: 32 token ids of 4 bytes each.

This size also fits prompts that are hashed as text, because an English token has about 4 bytes."""
_STEP_DIVISOR = 6
_MAX_BLOCKS = 2**16
# Maximum number of hashes of all tenants together; they take 2.5 MiB. A prompt of 2,000 tokens has
# about 24 hashes.
_MAX_HASHES = 16_384
_UNCONFIRMED = -1


def _build_hash_ends() -> list[int]:
    ends, blocks = [], 1
    while blocks <= _MAX_BLOCKS:
        ends.append(blocks * _BLOCK_BYTES)
        blocks += max(1, blocks // _STEP_DIVISOR)
    return ends


_HASH_ENDS = _build_hash_ends()


class ExpectedReuse(NamedTuple):
    """Expected reuse of cached tokens by one request, at the time when the request was sent.

    Attributes:
        tokens: number of prompt tokens that were expected to be cached.
        mark: sequence number of the last answer that confirmed these tokens as cached; 0 or less if
            no answer has confirmed them.
    """

    tokens: float = 0.0
    mark: int = 0


@dataclass(slots=True)
class PromptPrefixes:
    """Hashed prefixes of one prompt.

    Attributes:
        tenant: tenant for whom `PrefixCache` has separate estimates; "" for the estimates that
            several tenants share.
        tokens: number of tokens of the prompt.
        hashes: hashes of the prefixes, the shortest prefix first.
        tokens_per_byte: average number of tokens per hashed byte.
        start: first KiB of the hashed bytes. Unlike the hashes, it is the same in all processes.
    """

    tenant: str
    tokens: int
    hashes: list[int]
    tokens_per_byte: float
    start: bytes


def hash_prefixes(generation: Generation, tenant: str = "") -> PromptPrefixes:
    """Return the hashed prefixes of a generation's prompt.

    The prompt's token ids are hashed, or its text if only text is sent. The hashes also depend on
    the LoRA adapter, because the engine can reuse cached blocks only with the same adapter.
    """
    text = None if None in generation.forms.values() else generation.text
    data = generation.prompt_ids.tobytes() if text is None else text.text.encode()
    tokens = len(generation.prompt_ids)
    lora = generation.params.lora
    found = 0 if lora is None else lora.task_id
    hashes, begin = [], 0
    # Leave out the prompt's last token, because the engine always computes it.
    for end in _HASH_ENDS[: bisect_right(_HASH_ENDS, len(data) - 4)]:
        found = hash((found, data[begin:end]))
        hashes.append(found)
        begin = end
    return PromptPrefixes(tenant, tokens, hashes, tokens / max(len(data), 1), data[:1024])


@dataclass(slots=True)
class _TenantHashes:
    """Hashes of one tenant's prompt prefixes.

    Attributes:
        marks: for each hash, the sequence number of the last answer that confirmed the prefix as
            cached, or `_UNCONFIRMED`. The least recently used hash is first.
        floor: sequence number of an answer. Prefixes that were last confirmed by this answer or by
            an earlier answer count as evicted from the engine. Unconfirmed prefixes do not count as
            evicted.
    """

    marks: dict[int, int]
    floor: int = 0


class PrefixCache:
    """Estimate of the prompt prefixes that one replica has cached.

    Each tenant (see `PromptPrefixes.tenant`) has separate estimates: requests and answers of a
    tenant never change another tenant's estimates. Tenants share only the maximum number of stored
    hashes. Not thread-safe: use an instance in one event loop only.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._tenants: dict[str, _TenantHashes] = {}
        self._count = 0
        self._answers = 0

    def __len__(self) -> int:
        return self._count

    def forget(self) -> None:
        """Forget all prefixes, because the engine has or may have restarted."""
        self._tenants = {}
        self._count = 0

    def cached_tokens(self, prefixes: PromptPrefixes) -> float:
        """Return the estimated number of the prompt's tokens that are cached."""
        count = self._count_cached(prefixes)
        return _HASH_ENDS[count - 1] * prefixes.tokens_per_byte if count else 0.0

    def record_sent(self, prefixes: PromptPrefixes) -> ExpectedReuse:
        """Record that the prompt is sent to the engine now.

        Return the expected reuse of cached tokens. Pass this result to `record_answer` later.
        """
        hashes, count = prefixes.hashes, self._count_cached(prefixes)
        if count == len(hashes) == 0:
            return ExpectedReuse()
        known = self._tenants.get(prefixes.tenant)
        if known is None:
            known = self._tenants[prefixes.tenant] = _TenantHashes({})
        marks, before = known.marks, len(known.marks)
        mark = marks[hashes[count - 1]] if count else _UNCONFIRMED
        # Store the longest prefix first, because the hashes that were stored first are evicted
        # first. Without its shorter prefixes, a longer prefix is useless, so the shorter prefixes
        # must be evicted later.
        for key in reversed(hashes[count:]):
            marks.pop(key, None)
            marks[key] = _UNCONFIRMED
        self._count += len(marks) - before
        while self._count > self._max_hashes:
            self._evict(prefixes.tenant)
        tokens = _HASH_ENDS[count - 1] * prefixes.tokens_per_byte if count else 0.0
        return ExpectedReuse(tokens, mark)

    def record_answer(
        self, prefixes: PromptPrefixes, expected: ExpectedReuse, reused: int | None
    ) -> None:
        """Record that the engine has processed the complete prompt.

        Args:
            prefixes: the prompt's prefixes.
            expected: the result of `record_sent`.
            reused: number of prompt tokens that the engine found in its cache; None if it was not
                reported. The expected prefix counts as evicted if this is less than three quarters
                of the expected number. Smaller differences are ignored, because the engine's block
                size may differ, and the number of tokens of a text is estimated.
        """
        known = self._tenants.get(prefixes.tenant)
        if known is None:
            return
        if reused is not None and reused < 0.75 * expected.tokens:
            known.floor = max(known.floor, expected.mark)
        self._answers += 1
        marks, number = known.marks, self._answers
        for key in reversed(prefixes.hashes):
            if marks.pop(key, 0):
                marks[key] = number

    def _count_cached(self, prefixes: PromptPrefixes) -> int:
        """Return the number of the prompt's hashes that are cached.

        This is a binary search: if a prefix is cached, all shorter prefixes are cached, too.
        """
        known, hashes = self._tenants.get(prefixes.tenant), prefixes.hashes
        if known is None or not hashes or hashes[0] not in known.marks:
            return 0
        get, floor = known.marks.get, known.floor
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            mark = get(hashes[middle], 0)
            if mark > floor or mark == _UNCONFIRMED:
                low = middle + 1
            else:
                high = middle
        return low

    def _evict(self, tenant: str) -> None:
        """Evict the oldest eighth of one tenant's hashes.

        Evict hashes of `tenant` if it has more than an equal share of the maximum number of hashes.
        Otherwise, evict hashes of the tenant with the most hashes.
        """
        known = self._tenants.get(tenant)
        if known is None or len(known.marks) <= max(self._max_hashes // len(self._tenants), 1):
            tenant = max(self._tenants, key=lambda name: len(self._tenants[name].marks))
        marks = self._tenants[tenant].marks
        oldest = list(islice(marks, max(len(marks) // 8, 1)))
        for key in oldest:
            del marks[key]
        self._count -= len(oldest)
        if not marks:
            del self._tenants[tenant]
