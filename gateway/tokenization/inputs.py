"""The tokenizer of an embedding or ranking model: texts, and pairs of texts, to token ids."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from adapters.file_kinds import kind_of_file
from gateway.tokenization.token_reach import token_reach


class InputIds(NamedTuple):
    """An input. `types` are 0, and 1 in the second text of a pair; empty if all are 0."""

    ids: array[int]
    types: bytes = b""


class InputTokenizer:
    """A tokenizer that adds the special tokens around inputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Both may be set in the file. Here long inputs are refused, and batches are padded later.
        tokenizer.no_truncation()
        padding = tokenizer.padding
        tokenizer.no_padding()
        self.pad_id: int = padding["pad_id"] if padding else _pad_id(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._reach = token_reach(tokenizer, json.loads(tokenizer.to_str()))

    @classmethod
    def load(cls, folder: Path) -> InputTokenizer:
        """Load a folder's tokenizer. Raises ValueError naming a file that is missing or broken."""
        file = folder / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises plain Exception
            kind = kind_of_file(file)
            raise ValueError(f"{file} {kind.words}" if kind else f"{file}: {error}") from error

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return True if `text` must have more than `tokens` tokens, by its length alone."""
        return self._reach is not None and self._reach.exceeds(text, tokens)

    def encode(self, inputs: Sequence[tuple[str, ...]]) -> list[InputIds]:
        """Return the ids of texts, or of pairs of texts."""
        found = []
        for texts in inputs:
            # One by one: several would each use a thread of the tokenizers library.
            given = texts[0] if len(texts) == 1 else texts
            [encoding] = self._tokenizer.encode_batch_fast([given], add_special_tokens=True)
            types = bytes(encoding.type_ids) if len(texts) > 1 else b""
            found.append(InputIds(array("i", encoding.ids), types))
        return found


def _pad_id(tokenizer: Tokenizer) -> int:
    """Return the padding id; any id will do without a known one, since attention masks hide it."""
    known = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>", "<|endoftext|>"))
    return next((token_id for token_id in known if token_id is not None), 0)
