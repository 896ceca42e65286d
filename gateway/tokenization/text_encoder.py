"""Encoding of texts on the event loop (from cached words) or in a thread (by the Rust tokenizer).

See decision 039 in docs/decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from gateway.tokenization.threads import INLINE_CHARS, TokenizerThreads
from gateway.tokenization.word_ids import WordIds

# Fixed CPU cost of encoding a block, as a number of characters whose encoding costs the same.
_CHARS_PER_TEXT = 128


class TextEncoder:
    """Encoder of texts, which uses the cached ids of words if `words` is not None.

    `encode_with_library` returns the ids of one text from the Rust library tokenizers. Its second
    argument is True to add special tokens. This function may run in a thread.
    """

    def __init__(
        self,
        encode_with_library: Callable[[str, bool], array[int]],
        words: WordIds | None,
        threads: TokenizerThreads,
    ) -> None:
        self._encode_with_library = encode_with_library
        self._words = words
        self._threads = threads

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool, tenant: str
    ) -> list[array[int]]:
        """Return the token ids (int32) of each text.

        A long text is encoded in blocks, one block per iteration of the event loop. The ids of a
        block are joined from the cached ids of its words. Joining takes a tenth of the CPU time of
        the Rust library tokenizers. A thread would not help, because joining holds the GIL.

        If a block has too many words that are not cached, the Rust library encodes the block in a
        thread without the GIL. The block waits for the thread in the tenant's queue. Raises
        Overloaded if too much text is queued already.
        """
        words = self._words
        if words is None:
            return await self._ask_library(texts, add_special_tokens, tenant)
        found: list[list[array[int]]] = []
        # Gaps in the result: sequences of adjacent blocks that the Rust library must encode. Each
        # entry has the array for the gap's ids, and the blocks.
        rest: list[tuple[array[int], list[str]]] = []
        chars_left = INLINE_CHARS
        for text in texts:
            parts = [words.opening[:]] if add_special_tokens else []
            has_gap = False
            for block in words.cut_blocks(text):
                chars_left -= len(block) + _CHARS_PER_TEXT
                if chars_left < 0:
                    await self._threads.steps.wait_step(tenant)
                    chars_left = max(0, INLINE_CHARS - len(block))
                ids = words.encode(block, add_special_tokens=False)
                if ids is not None:
                    parts.append(ids)
                elif has_gap:
                    rest[-1][1].append(block)
                else:
                    parts.append(array("i"))
                    rest.append((parts[-1], [block]))
                has_gap = ids is None
            found.append(parts)
        if rest:
            left = ["".join(blocks) for _, blocks in rest]
            encoded = await self._ask_library(left, False, tenant)
            for (gap, _), ids in zip(rest, encoded, strict=True):
                gap.extend(ids)
        return [_join(parts) for parts in found]

    async def _ask_library(
        self, texts: list[str], add_special_tokens: bool, tenant: str
    ) -> list[array[int]]:
        def work() -> list[array[int]]:
            return [self._encode_with_library(text, add_special_tokens) for text in texts]

        return await self._threads.run(tenant, sum(map(len, texts)), work)


def _join(parts: list[array[int]]) -> array[int]:
    return parts[0] if len(parts) == 1 else array("i", b"".join(parts))
