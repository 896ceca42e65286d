"""Stop words, bad words and repeated n-grams, over token ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence


class StopWords:
    """Stop words of a request, each a list of token ids.

    A sequence ends when its generated ids end with the ids of a stop word.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._by_last: dict[int, list[list[int]]] = defaultdict(list)
        for word in words:
            if word:
                self._by_last[word[-1]].append(list(word))

    def match(self, generated: Sequence[int]) -> bool:
        """Return True if the generated ids (at least one) end with a stop word."""
        return any(
            list(generated[-len(word) :]) == word for word in self._by_last.get(generated[-1], ())
        )


class BadWords:
    """Words that a sequence must not generate, each a list of token ids.

    A word is prevented by banning its last id as the next id, whenever the sequence ends with all
    earlier ids of the word.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        given = [list(word) for word in words if word]
        self._always = [word[0] for word in given if len(word) == 1]
        self._longer = [(word[:-1], word[-1]) for word in given if len(word) > 1]

    def list_banned(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that must not come next.

        ``ids`` has the prompt's ids and the ids generated so far.
        """
        return self._always + [
            last for start, last in self._longer if list(ids[-len(start) :]) == start
        ]


def list_repeating(ids: Sequence[int], size: int) -> list[int]:
    """Return the ids that must not come next, because they would repeat an n-gram in ``ids``.

    ``size`` is the number of ids in an n-gram.
    """
    start = list(ids[len(ids) - size + 1 :])
    return [
        ids[end] for end in range(size - 1, len(ids)) if list(ids[end - size + 1 : end]) == start
    ]
