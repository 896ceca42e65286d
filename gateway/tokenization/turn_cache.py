"""Token ids of what chats have in common: system prompts, tools and the turns before the last.

A tokenizer cuts a text at its added tokens and treats each piece by itself. So the ids of a chat
are those of its segments, each up to a token that ends a turn, and can be kept for the next one.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from tokenizers import Tokenizer

# Characters, whose ids take about as many bytes, and what a segment takes besides.
_ROOM = 4 * 2**20
_EACH = 256
# Turns of one chat; a text of end tokens alone would keep everybody waiting.
_MOST = 1024

Encode = Callable[[list[str]], Awaitable[list[list[int]]]]
"""Token ids of texts, without adding special tokens."""


class Segments:
    """Encodes texts and keeps the ids of the segments that were used last."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], room: int = _ROOM) -> None:
        """`ends` are ids of tokens that end a turn; `room` is about bytes."""
        self._ends = _plain_tokens(tokenizer, ends)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._room = room
        self._kept: OrderedDict[str, array[int]] = OrderedDict()

    async def encode(self, text: str, encode: Encode) -> list[int]:
        """As `encode` does, which is asked for the segments that are not kept."""
        segments = self._cut(text)
        if not 1 < len(segments) <= _MOST:
            [whole] = await encode([text])
            return whole
        found = {segment: self._kept.get(segment) for segment in segments}
        new = [segment for segment, ids in found.items() if ids is None]
        ids_of = {segment: ids for segment, ids in found.items() if ids is not None}
        for segment, ids in zip(new, await encode(new), strict=True):
            ids_of[segment] = array("I", ids)
        if any(ids_of[segment][-1] not in self._ends.values() for segment in segments[:-1]):
            # Another added token overlaps with what seemed to end the turn.
            [whole] = await encode([text])
            return whole
        first, *others = segments
        joined = ids_of[first].tolist()
        for segment in others:
            joined += ids_of[segment][1:]
        for segment, of_it in ids_of.items():
            self._keep(segment, of_it)
        return joined

    def _cut(self, text: str) -> list[str]:
        """The segments; each but the first has the token before it once more.

        So it is not the beginning of a text, which some tokenizers treat in their own way.
        """
        segments = []
        start = 0
        if self._ends:
            for end in islice(self._end.finditer(text), _MOST):
                segments.append(text[start : end.end()])
                start = end.start()
        return [*segments, text[start:]]

    def _keep(self, segment: str, ids: array[int]) -> None:
        if segment in self._kept:
            self._kept.move_to_end(segment)
            return
        self._kept[segment] = ids
        self._room -= len(segment) + _EACH
        while self._room < 0:
            oldest, _ = self._kept.popitem(last=False)
            self._room += len(oldest) + _EACH


def _plain_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[str, int]:
    """Those added tokens of `ids` that are found wherever their text is, as far as they tell."""
    if tokenizer.truncation or tokenizer.padding:
        return {}
    added = tokenizer.get_added_tokens_decoder()
    others = [token.content for token in added.values()]
    return {
        token.content: token_id
        for token_id in ids
        if (token := added.get(token_id)) is not None
        and not token.normalized
        and not token.single_word
        and sum(token.content in other for other in others) == 1
    }
