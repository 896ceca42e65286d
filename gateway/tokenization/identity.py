"""Facts that differ between tokenizers, for a comparison with an engine's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from gateway.tokenization.prompts import Prompts

_MAX_CACHED_ANSWERS = 16
# Files of the same tokenizer may differ in special tokens. A larger share means another vocabulary.
_MAX_UNSHARED_TOKENS, _MAX_UNSHARED_SHARE = 1024, 0.025


class TokenizerIdentity:
    """Identity of the tokenizer in `folder`, as the gateway reads it."""

    def __init__(self, folder: Path, prompts: Prompts) -> None:
        self.folder = folder
        self.end_ids = prompts.eos_ids
        self.pad_id = prompts.pad_id
        self._tokenizer = prompts.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self.special_tokens = {token.content: key for key, token in added.items() if token.special}
        self.vocab_size = 1 + max(_tokens(self._tokenizer), default=-1)
        # Replicas usually name the same folder, and each of them is compared.
        self._difference = lru_cache(_MAX_CACHED_ANSWERS)(self._compare)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, with what the tokenizer adds to each if `special`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def are_added(self, first: int) -> bool:
        """Return True if all tokens from the id `first` on are added ones, not the model's own."""
        return all(each in self._added for each in _tokens(self._tokenizer) if each >= first)

    def difference_from(self, folder: Path, text: str) -> str | None:
        """Return how another folder's tokens, or its ids of a text, differ from these.

        None if they are equal. Slow. Raises OSError, also without a tokenizer.json, and ValueError
        for a broken one.
        """
        path = folder / "tokenizer.json"
        return self._difference(path, path.stat().st_mtime_ns, text)

    def _compare(self, path: Path, changed: int, text: str) -> str | None:
        definition = path.read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        own, others = _tokens(self._tokenizer), _tokens(tokenizer)
        for token_id in sorted(own.keys() & others.keys()):
            if own[token_id] != others[token_id]:
                has, here = others[token_id], own[token_id]
                return f"has {has!r} as token {token_id}; here: {here!r}."
        unshared = len(own.keys() ^ others.keys())
        if unshared > max(_MAX_UNSHARED_TOKENS, int(_MAX_UNSHARED_SHARE * len(others))):
            return f"has {len(others)} tokens; here: {len(own)}."
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
        own_ids = self.encode(text)
        if ids != own_ids:
            return (
                f"makes {len(ids)} ids of a text in several scripts; here: {len(own_ids)}, others."
            )
        return None


def _tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    """Return the tokens by id, added ones included."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
