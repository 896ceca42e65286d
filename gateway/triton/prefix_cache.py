"""What one engine likely has of a prompt in its KV cache: the beginnings of what it was given.

An engine keeps blocks of keys and values under all tokens up to their end, and drops those first
that were used longest ago. Kept here are hashes of the beginnings of prompts, in that order. At
every block's end they would cost more than they tell: from six blocks on the next one is a sixth
further. An answer says how much of its prompt was there; where that is less than was
expected, what is older is gone too.

The hashes are Python's own of bytes, which have a secret key for each process: nobody can make a
prompt that has another's.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gateway.generation import Generation

_BLOCK_BYTES = 4 * 32
"""Of the smallest usual block, 32 ids of 4 bytes; of a text, about as many tokens of English."""
_STEP_DIVISOR = 6
_MAX_BLOCKS = 2**16
# Hashes, of all tenants: 2.5 MiB at the most. A conversation of 2,000 tokens has some 24.
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
    """What was known when a request was sent: so many tokens of its prompt were there.

    `mark` is that of the last of them; 0 or less while no answer has shown that.
    """

    tokens: float = 0.0
    mark: int = 0


@dataclass(slots=True)
class PromptPrefixes:
    """The beginnings of one prompt, of `tokens` tokens.

    `tenant` is who alone may know of them; "" where all may. `start` is the first KiB of what was
    hashed, the same in all processes.
    """

    tenant: str
    tokens: int
    hashes: list[int]
    tokens_per_byte: float
    start: bytes


def hash_prefixes(generation: Generation, tenant: str = "") -> PromptPrefixes:
    """Of its ids, or of its text where only text is sent. Keys and values are an adapter's own."""
    text = None if None in generation.forms.values() else generation.text
    data = generation.prompt_ids.tobytes() if text is None else text.text.encode()
    tokens = len(generation.prompt_ids)
    lora = generation.params.lora
    found = 0 if lora is None else lora.task_id
    hashes, begin = [], 0
    # The last token is computed in any case.
    for end in _HASH_ENDS[: bisect_right(_HASH_ENDS, len(data) - 4)]:
        found = hash((found, data[begin:end]))
        hashes.append(found)
        begin = end
    return PromptPrefixes(tenant, tokens, hashes, tokens / max(len(data), 1), data[:1024])


@dataclass(slots=True)
class _TenantHashes:
    """One tenant's. `marks` has hashes, the one that was sent longest ago first; each with the
    number of the answer that showed it last. What that shows to be not after `floor` is gone."""

    marks: dict[int, int]
    floor: int = 0


class PrefixCache:
    """Of one replica, as seen from this process. Belongs to one event loop.

    Each tenant's are apart, also what is learned of their end: nothing that one sends or is
    answered changes what is known of another's, but that it takes its share of the room.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._tenants: dict[str, _TenantHashes] = {}
        self._count = 0
        self._answers = 0

    def __len__(self) -> int:
        return self._count

    def forget(self) -> None:
        """The engine is a new one, or may be."""
        self._tenants = {}
        self._count = 0

    def cached_tokens(self, prefixes: PromptPrefixes) -> float:
        """How many of a prompt's tokens are likely there."""
        count = self._count_cached(prefixes)
        return _HASH_ENDS[count - 1] * prefixes.tokens_per_byte if count else 0.0

    def record_sent(self, prefixes: PromptPrefixes) -> ExpectedReuse:
        """The engine is given it now; what was known of it."""
        hashes, count = prefixes.hashes, self._count_cached(prefixes)
        if count == len(hashes) == 0:
            return ExpectedReuse()
        known = self._tenants.get(prefixes.tenant)
        if known is None:
            known = self._tenants[prefixes.tenant] = _TenantHashes({})
        marks, before = known.marks, len(known.marks)
        mark = marks[hashes[count - 1]] if count else _UNCONFIRMED
        # A beginning goes after what it is the beginning of.
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
        """The engine had it whole. `reused` are the tokens that were there before, None where it
        did not tell.

        Blocks of another size, and texts, account for a quarter less than was expected.
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
        """How many of its hashes are known: where one is, those before it are."""
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
        """Takes an eighth of those of the tenant that has most, or of this one where it has more
        than its share."""
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
