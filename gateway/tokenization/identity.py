"""Comparison of the gateway's tokenizer with the tokenizer of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from gateway.tokenization.prompts import Prompts

_MAX_CACHED_ANSWERS = 16
# Two files of the same tokenizer may differ in special tokens. They count as the same tokenizer if
# at most this number of token ids occur in only one file. The limit is the first number, or the
# second number multiplied by the size of the vocabulary, whichever is greater.
_MAX_UNSHARED_TOKENS, _MAX_UNSHARED_SHARE = 1024, 0.025


class TokenizerIdentity:
    """The gateway's tokenizer, loaded from `folder`, for comparison with other tokenizers."""

    def __init__(self, folder: Path, prompts: Prompts) -> None:
        self.folder = folder
        self.end_ids = prompts.eos_ids
        self.pad_id = prompts.pad_id
        self._tokenizer = prompts.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self.special_tokens = {token.content: key for key, token in added.items() if token.special}
        self.vocab_size = 1 + max(_tokens(self._tokenizer), default=-1)
        # Cache results: the tokenizer of each replica is compared, and most replicas use the same
        # folder.
        self._difference = lru_cache(_MAX_CACHED_ANSWERS)(self._compare)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, with special tokens around it if `special` is True."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def are_added(self, first: int) -> bool:
        """Return True if all tokens with ids of at least `first` are added tokens."""
        return all(each in self._added for each in _tokens(self._tokenizer) if each >= first)

    def difference_from(self, folder: Path, text: str) -> str | None:
        """Describe how the tokenizer in another folder differs. Return None if it does not differ.

        The tokens and the ids of `text` are compared. The description has no subject, so that the
        caller can write one before it: "has 32000 tokens; here: 32001.". This method is slow,
        because it loads the other tokenizer.

        Raises OSError if the folder's tokenizer.json is missing or cannot be read, and ValueError
        if the file is broken.
        """
        path = folder / "tokenizer.json"
        return self._difference(path, path.stat().st_mtime_ns, text)

    def _compare(self, path: Path, changed: int, text: str) -> str | None:
        definition = path.read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception
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
    """Return all tokens by id, added tokens included."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
