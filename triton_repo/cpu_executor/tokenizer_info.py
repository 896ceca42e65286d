"""The fields of ``GuidedDecodingConfig`` that are read from a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adapters import tokenizer_config

# Files that may name the EOS token, by precedence.
_FILES = (tokenizer_config.FILE, "special_tokens_map.json")


class FastTokenizer:
    """Replacement for transformers' fast tokenizer, as far as `xgrammar_tokenizer_info` needs it.

    Importing transformers would take most of a second at each start. Raises ``ValueError`` for a
    folder without ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; no other tokenizer is known here")
        self.backend_tokenizer = Tokenizer.from_file(str(path))
        end = _end(folder)
        self.eos_token_id = None if end is None else self.backend_tokenizer.token_to_id(end)

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocab


def _end(folder: Path) -> str | None:
    for name in _FILES:
        if (folder / name).is_file():
            token = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
            if token is not None:
                return str(tokenizer_config.token_text(token))
    return None


def xgrammar_tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """Return the same mapping as TensorRT-LLM v0.19's ``_xgrammar_tokenizer_info``.

    Keys: ``encoded_vocab`` (the tokens in order of their ids), ``tokenizer_str`` (the text of
    ``tokenizer.json``) and ``stop_token_ids`` (the EOS id).

    ``tokenizer`` is a `FastTokenizer` or a fast tokenizer of transformers. Raises ``ValueError``
    for any other tokenizer, and for a tokenizer without EOS.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"Unsupported tokenizer type: {type(tokenizer)}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, so a complete grammar could not end")
    vocab = tokenizer.get_vocab()
    return {
        "encoded_vocab": sorted(vocab, key=vocab.__getitem__),
        "tokenizer_str": backend.to_str(),
        "stop_token_ids": [tokenizer.eos_token_id],
    }
