"""Cache of the token ids of chat turns: system prompts, tools and earlier messages.

A turn is the part of a chat up to a token such as `<|im_end|>`, which ends the turn. A tokenizer
splits a text at such tokens and encodes each part separately. The ids of a chat are therefore the
joined ids of its turns. If a turn occurs in several chats, its cached ids can be used in all of
them.

See decision 042 in docs/decisions.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice

from tokenizers import Tokenizer

# Memory budget of the cache. An entry is estimated to take `_ENTRY_BYTES`, and one byte for each
# character of its turn: a token has four characters on average, and its id takes four bytes.
_BUDGET_BYTES = 4 * 2**20
_ENTRY_BYTES = 256
# Maximum number of turns into which a chat is split. A chat with more turns is tokenized as one
# text. Without this limit, splitting a text of many end tokens would block the event loop.
_MAX_TURNS = 1024

Encode = Callable[[list[str]], Awaitable[list["array[int]"]]]
"""Function that returns the token ids of each text in a list, without special tokens around it."""


class TurnCache:
    """Encoder with a cache of the ids of the most recently used turns."""

    def __init__(
        self, tokenizer: Tokenizer, ends: Iterable[int], budget_bytes: int = _BUDGET_BYTES
    ) -> None:
        """Create a cache that takes about `budget_bytes` of memory.

        `ends` are the ids of tokens that end a turn.
        """
        self._ends = _plain_tokens(tokenizer, ends)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._free_bytes = budget_bytes
        self._ids_by_turn: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    async def encode(self, text: str, encode: Encode) -> array[int]:
        """Return the ids of a text. Turns that are not cached are encoded by `encode`."""
        turns = self.split_turns(text)
        if not turns:
            [whole] = await encode([text])
            return whole
        found = {turn: self._ids_by_turn.get(turn) for turn in turns}
        new = [turn for turn, ids in found.items() if ids is None]
        ids_of = {turn: ids for turn, ids in found.items() if ids is not None}
        ids_of |= zip(new, await encode(new), strict=True)
        if any(ids_of[turn][-1] not in self._ends.values() for turn in turns[:-1]):
            # The tokenizer did not encode the text of an end token as this token, because another
            # added token overlaps with it. The joined ids of the turns would be wrong, so encode
            # the complete text.
            [whole] = await encode([text])
            return whole
        first, *others = turns
        joined = ids_of[first][:]  # copy the array, because the cached array must not change
        for turn in others:
            joined += ids_of[turn][1:]
        with self._lock:
            for turn, of_it in ids_of.items():
                self._store(turn, of_it)
        return joined

    def cached_turns(self, text: str) -> Iterator[tuple[str, array[int]]]:
        """Yield the cached turns of a text, and their ids."""
        for turn in self.split_turns(text):
            if (ids := self._ids_by_turn.get(turn)) is not None:
                yield turn, ids

    def learn(self, turns: Iterable[tuple[str, array[int]]]) -> None:
        """Add turns with their ids, from another cache of the same tokenizer.

        Thread-safe. A concurrent `encode` waits only while one turn is added.
        """
        for turn, ids in turns:
            with self._lock:
                self._store(turn, ids)

    def split_turns(self, text: str) -> list[str]:
        """Return the turns of a text, or an empty list if it has only one turn or too many."""
        turns = self._split_all(text)
        return turns if 1 < len(turns) <= _MAX_TURNS else []

    def _split_all(self, text: str) -> list[str]:
        """Return all turns of a text, each with the end token of the previous turn before it.

        Some tokenizers encode the beginning of a text differently. Without the end token before it,
        a turn would therefore get other ids than within the chat. `encode` removes the id of this
        end token.
        """
        turns = []
        start = 0
        if self._ends:
            for end in islice(self._end.finditer(text), _MAX_TURNS):
                turns.append(text[start : end.end()])
                start = end.start()
        return [*turns, text[start:]]

    def _store(self, turn: str, ids: array[int]) -> None:
        if turn in self._ids_by_turn:
            self._ids_by_turn.move_to_end(turn)
            return
        self._ids_by_turn[turn] = ids
        self._free_bytes -= len(turn) + _ENTRY_BYTES
        while self._free_bytes < 0:
            oldest, _ = self._ids_by_turn.popitem(last=False)
            self._free_bytes += len(oldest) + _ENTRY_BYTES


def _plain_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[str, int]:
    """Return the ids of end tokens that the tokenizer recognizes at each occurrence of their text.

    The result maps the text of a token to its id. A token is left out if the tokenizer searches for
    it in normalized text or only as a complete word, or if another added token contains its text.
    The tokenizer may then not recognize the token.
    """
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
