"""Tokenizer of a model folder for the LLM API: encoding, decoding, and the end ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from triton_repo.cpu_executor.tokenizer_info import FastTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer:
    """Tokenizer that is read from a folder's ``tokenizer.json``.

    The class does not use transformers, whose import takes seconds. BOS is added only if the
    tokenizer's post-processor adds it. Raises ``ValueError`` for a folder without
    ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        fast = FastTokenizer(folder)
        self._tokenizer = fast.backend_tokenizer
        self.end_id = fast.eos_token_id
        self.end_ids = _generation_ends(folder)
        """EOS ids in ``generation_config.json``. The file may list more ids than `end_id`."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text


class Detokenizer:
    """Incremental decoder from token ids to text, for a sequence that grows.

    ``text`` has the decoded text so far. If the last token has only the first bytes of a character,
    its text is held back until the character is complete or the text is flushed. Each token is
    decoded about twice, so the time per token does not grow with the length of the sequence.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special: bool) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # The ids that the previous call of `add` decoded. They are decoded again together with the
        # new ids, because a token's text can depend on the tokens before it.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, ids: Sequence[int], *, flush: bool) -> None:
        """Append the text of new ids to ``text``.

        If the text ends within a character, wait for the next ids, unless `flush` is True.
        """
        self._pending += ids
        before, text = (
            self._tokenizer.decode(ids, skip_special=self._skip_special)
            for ids in (self._context, self._context + self._pending)
        )
        if not flush and text.endswith(REPLACEMENT):
            return
        self.text += text[len(before) :]
        self._context, self._pending = self._pending or self._context, []


def _generation_ends(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
