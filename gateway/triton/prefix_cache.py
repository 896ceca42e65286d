"""Estimate of the prompt prefixes that one engine has in its KV cache.

An engine caches blocks of keys and values for all tokens up to their end, and drops the least
recently used ones first. This module stores hashes of prompt prefixes in the same order. A hash at
the end of every block would cost more than it is worth: from six blocks on, each next one is a
sixth longer. An answer reports how much of its prompt was cached. If that is less than expected,
older prefixes are gone, too.

The hashes are Python's own of bytes, which have a secret key for each process: a client cannot
construct a prompt with another's hash.

See decision 073 in docs/decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gateway.generation.engine_request import Generation

_BLOCK_BYTES = 4 * 32
"""Bytes of the smallest usual block: 32 ids of 4 bytes. English text has about as many tokens per
byte."""
_STEP_DIVISOR = 6
_MAX_BLOCKS = 2**16
# Hashes of all tenants: at most 2.5 MiB. A conversation of 2,000 tokens has about 24.
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
    """Number of tokens that were expected to be cached when a request was sent.

    `mark` is that of the last of them; 0 or less if no answer has confirmed it yet.
    """

    tokens: float = 0.0
    mark: int = 0


@dataclass(slots=True)
class PromptPrefixes:
    """The prefixes of one prompt of `tokens` tokens.

    `tenant` is the only one that may know of them; "" for all. `start` is the first KiB of the
    hashed bytes, the same in all processes.
    """

    tenant: str
    tokens: int
    hashes: list[int]
    tokens_per_byte: float
    start: bytes


def hash_prefixes(generation: Generation, tenant: str = "") -> PromptPrefixes:
    """Return the prefixes of a generation's ids, or of its text if only text is sent.

    Keys and values depend on the adapter, so the hashes do, too.
    """
    text = None if None in generation.forms.values() else generation.text
    data = generation.prompt_ids.tobytes() if text is None else text.text.encode()
    tokens = len(generation.prompt_ids)
    lora = generation.params.lora
    found = 0 if lora is None else lora.task_id
    hashes, begin = [], 0
    # The last token is always computed.
    for end in _HASH_ENDS[: bisect_right(_HASH_ENDS, len(data) - 4)]:
        found = hash((found, data[begin:end]))
        hashes.append(found)
        begin = end
    return PromptPrefixes(tenant, tokens, hashes, tokens / max(len(data), 1), data[:1024])


@dataclass(slots=True)
class _TenantHashes:
    """The hashes of one tenant. `marks` holds them in the order in which they were last sent.

    Each has the number of the answer that last confirmed it. Those with a number of at most `floor`
    are gone from the engine.
    """

    marks: dict[int, int]
    floor: int = 0


class PrefixCache:
    """Prefixes cached on one replica, as seen from this process. Belongs to one event loop.

    Tenants are separate, also in what is learned of evictions: one tenant's requests and answers
    never change the estimates of another's, except that it takes its share of the stored hashes.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._tenants: dict[str, _TenantHashes] = {}
        self._count = 0
        self._answers = 0

    def __len__(self) -> int:
        return self._count

    def forget(self) -> None:
        """Forget everything: the engine is a new one, or may be."""
        self._tenants = {}
        self._count = 0

    def cached_tokens(self, prefixes: PromptPrefixes) -> float:
        """Return how many of a prompt's tokens are likely cached."""
        count = self._count_cached(prefixes)
        return _HASH_ENDS[count - 1] * prefixes.tokens_per_byte if count else 0.0

    def record_sent(self, prefixes: PromptPrefixes) -> ExpectedReuse:
        """Record that the engine is given the prompt now; return what was expected to be cached."""
        hashes, count = prefixes.hashes, self._count_cached(prefixes)
        if count == len(hashes) == 0:
            return ExpectedReuse()
        known = self._tenants.get(prefixes.tenant)
        if known is None:
            known = self._tenants[prefixes.tenant] = _TenantHashes({})
        marks, before = known.marks, len(known.marks)
        mark = marks[hashes[count - 1]] if count else _UNCONFIRMED
        # A prefix is evicted after the longer ones that it begins.
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

        `reused` are the tokens that were cached before, None if the engine did not report it. A
        quarter less than expected is tolerated: blocks may have another size, and texts are
        estimated.
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
        """Return how many of the hashes are cached; if one is, those before it are, too."""
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
        """Evict the oldest 1/8 of this tenant's hashes if it exceeds its share, else of the largest
        tenant's."""
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
