"""Facts about a tokenizer for ``GuidedDecodingConfig``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adapters import tokenizer_config

# Files that may name the EOS; the first that does takes precedence.
_FILES = (tokenizer_config.FILE, "special_tokens_map.json")


class FastTokenizer:
    """The part of transformers' fast tokenizer that `xgrammar_tokenizer_info` uses.

    Avoids transformers, whose import is most of a second of each start. Raises ``ValueError`` for a
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
    """Return the result of TensorRT-LLM v0.19's ``_xgrammar_tokenizer_info``.

    Takes a fast tokenizer of transformers. Returns ``encoded_vocab`` (the tokens in order of id),
    ``tokenizer_str`` (its ``tokenizer.json``) and ``stop_token_ids`` (its EOS). Raises
    ``ValueError`` for any other tokenizer and for one without EOS.
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
