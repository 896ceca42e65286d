"""Estimate of the prompt prefixes that one engine has in its KV cache.

An engine caches keys and values in blocks. A prompt can reuse a block if it has the same tokens up
to the block's end. The engine evicts the least recently used blocks first, and this module stores
hashes of prompt prefixes in the same order. A hash at the end of every block would cost more than
it is worth: from six blocks on, each hashed prefix is a sixth longer than the one before.

An answer reports how many tokens of its prompt were cached. If there are fewer than expected, all
prefixes that were last confirmed as long ago as the missing one count as evicted, too.

The hashes are those of Python for bytes, which depend on a secret key of the process. So a client
cannot construct a prompt that has the hash of another prompt.

See decision 073 in docs/decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gateway.generation.engine_request import Generation

_BLOCK_BYTES = 4 * 32
"""Bytes of the smallest usual block: 32 ids of 4 bytes. A token of English text has about 4 bytes,
too."""
_STEP_DIVISOR = 6
_MAX_BLOCKS = 2**16
# Maximum number of hashes of all tenants together: 2.5 MiB. A prompt of 2,000 tokens has about 24.
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
    """Number of prompt tokens that were expected to be cached when a request was sent.

    `mark` is the number of the answer that last confirmed this prefix as cached; 0 or less if no
    answer has confirmed it yet.
    """

    tokens: float = 0.0
    mark: int = 0


@dataclass(slots=True)
class PromptPrefixes:
    """The hashed prefixes of one prompt, which has `tokens` tokens.

    `tenant` is the only tenant whose estimates they change; "" for estimates shared by all tenants.
    `start` is the first KiB of the hashed bytes: unlike the hashes, it is the same in all
    processes.
    """

    tenant: str
    tokens: int
    hashes: list[int]
    tokens_per_byte: float
    start: bytes


def hash_prefixes(generation: Generation, tenant: str = "") -> PromptPrefixes:
    """Return the hashed prefixes of a generation's prompt.

    Its token ids are hashed, or its text if only text is sent. The hashes also depend on the
    adapter, because keys and values do.
    """
    text = None if None in generation.forms.values() else generation.text
    data = generation.prompt_ids.tobytes() if text is None else text.text.encode()
    tokens = len(generation.prompt_ids)
    lora = generation.params.lora
    found = 0 if lora is None else lora.task_id
    hashes, begin = [], 0
    # Stop before the prompt's last token: the engine always computes it, even if it is cached.
    for end in _HASH_ENDS[: bisect_right(_HASH_ENDS, len(data) - 4)]:
        found = hash((found, data[begin:end]))
        hashes.append(found)
        begin = end
    return PromptPrefixes(tenant, tokens, hashes, tokens / max(len(data), 1), data[:1024])


@dataclass(slots=True)
class _TenantHashes:
    """The hashes of one tenant's prompts.

    `marks` has for each hash the number of the answer that last confirmed it as cached, or
    `_UNCONFIRMED`. The hashes are in the order of their last use. Hashes with a number from 1 up to
    `floor` count as evicted from the engine.
    """

    marks: dict[int, int]
    floor: int = 0


class PrefixCache:
    """The prompt prefixes that one replica has cached, as far as this process knows.

    Estimates are separate for each tenant: a tenant's requests and answers, and the evictions that
    they show, never change another tenant's estimates. Tenants only share the maximum number of
    stored hashes. Use each instance in one event loop only.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._tenants: dict[str, _TenantHashes] = {}
        self._count = 0
        self._answers = 0

    def __len__(self) -> int:
        return self._count

    def forget(self) -> None:
        """Forget all prefixes: the engine has restarted, or may have."""
        self._tenants = {}
        self._count = 0

    def cached_tokens(self, prefixes: PromptPrefixes) -> float:
        """Return how many of a prompt's tokens are likely cached."""
        count = self._count_cached(prefixes)
        return _HASH_ENDS[count - 1] * prefixes.tokens_per_byte if count else 0.0

    def record_sent(self, prefixes: PromptPrefixes) -> ExpectedReuse:
        """Record that the prompt is sent to the engine now.

        Return how many of its tokens were expected to be cached before.
        """
        hashes, count = prefixes.hashes, self._count_cached(prefixes)
        if count == len(hashes) == 0:
            return ExpectedReuse()
        known = self._tenants.get(prefixes.tenant)
        if known is None:
            known = self._tenants[prefixes.tenant] = _TenantHashes({})
        marks, before = known.marks, len(known.marks)
        mark = marks[hashes[count - 1]] if count else _UNCONFIRMED
        # Store the longest prefix first, since the first ones stored are evicted first. A prefix
        # must stay for as long as any longer prefix that begins with it.
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

        `reused` is the number of prompt tokens that the engine found in its cache, or None if it
        did not report the number. A quarter less than expected is tolerated: the engine's blocks
        may have another size, and the tokens of a text are estimated.
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
        """Return how many of a prompt's hashes are cached, from the first on.

        The number is found by binary search: if a prefix is cached, all shorter ones are, too.
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

        These are the hashes of `tenant` if it has more than its share, otherwise those of the
        tenant with the most hashes.
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
