"""The tokenizer of an embedding or ranking model, for texts and pairs of texts."""

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
    """The token ids of an input for an embedding or ranking model.

    `types` has the token type id of each token: 1 in the second text of a pair, otherwise 0.
    `types` is empty if all token type ids are 0.
    """

    ids: array[int]
    types: bytes = b""


class InputTokenizer:
    """Tokenizer of one model. It adds the model's special tokens to each input."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Turn off truncation and padding, which tokenizer.json may have turned on. The gateway
        # refuses long inputs, and pads batches later.
        tokenizer.no_truncation()
        padding = tokenizer.padding
        tokenizer.no_padding()
        self.pad_id: int = padding["pad_id"] if padding else _pad_id(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._reach = token_reach(tokenizer, json.loads(tokenizer.to_str()))

    @classmethod
    def load(cls, folder: Path) -> InputTokenizer:
        """Load tokenizer.json from a folder.

        Raises ValueError if the file is missing or broken. The error's text names the file.
        """
        file = folder / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises plain Exception
            kind = kind_of_file(file)
            raise ValueError(f"{file} {kind.words}" if kind else f"{file}: {error}") from error

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return True if `text` is so long that it must have more than `tokens` tokens."""
        return self._reach is not None and self._reach.exceeds(text, tokens)

    def encode(self, inputs: Sequence[tuple[str, ...]]) -> list[InputIds]:
        """Return the ids of each input, which is one text or a pair of texts."""
        found = []
        for texts in inputs:
            # Encode one input at a time. The Rust library tokenizers would encode a batch in
            # several threads.
            given = texts[0] if len(texts) == 1 else texts
            [encoding] = self._tokenizer.encode_batch_fast([given], add_special_tokens=True)
            types = bytes(encoding.type_ids) if len(texts) > 1 else b""
            found.append(InputIds(array("i", encoding.ids), types))
        return found


def _pad_id(tokenizer: Tokenizer) -> int:
    """Return the padding id, or 0 if it is unknown. Attention masks hide padding, so 0 is safe."""
    known = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>", "<|endoftext|>"))
    return next((token_id for token_id in known if token_id is not None), 0)
