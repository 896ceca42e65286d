"""A gateway's start without the comparison of word ids, where this process has made it before.

Each start compares the ids of 1,200 texts, at 0.1 s of CPU time: half of what most tests take that
start a gateway. The result depends on the tokenizer alone, and tests/gateway/tokenization has its
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any

from tokenizers import Tokenizer

from gateway.tokenization import prompts, word_ids
from gateway.tokenization.word_ids import WordIds
from ops.commands.up import DEMO_MODEL

_equal: set[bytes] = set()
"""Digests of tokenizers whose words had the ids of their texts."""


class _ComparedOnce:
    """Stand-in for `WordIds` in `Prompts`."""

    @staticmethod
    def of(tokenizer: Tokenizer, definition: dict[str, Any]) -> WordIds | None:
        key = sha256(tokenizer.to_str().encode()).digest()
        make_samples = word_ids.make_samples
        if key in _equal:
            word_ids.make_samples = lambda *_: iter(())
        try:
            found = WordIds.of(tokenizer, definition)
        finally:
            word_ids.make_samples = make_samples
        if found is not None:
            _equal.add(key)
        return found


@cache
def compared() -> frozenset[bytes]:
    """Return the digest of the demo's tokenizer, once its words were compared in this process."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    _ComparedOnce.of(tokenizer, json.loads(tokenizer.to_str()))
    return frozenset(_equal)


@contextmanager
def words_compared_once(known: frozenset[bytes] = frozenset()) -> Iterator[None]:
    """Load tokenizers within the `with` in this way; `known` were compared by another process."""
    _equal.update(known)
    before = prompts.WordIds
    prompts.WordIds = _ComparedOnce  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        prompts.WordIds = before  # type: ignore[misc]
