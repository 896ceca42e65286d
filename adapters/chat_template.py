"""Reader of the chat template that transformers' `save_pretrained` writes into an adapter's folder.

An adapter needs its own template if it was trained with another chat format than its base model.
The template is part of an adapter version: the same weights with another template are another
version.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters import tokenizer_config
from adapters.errors import CorruptFile, MissingFile, TooLarge
from adapters.file_kinds import HEAD_BYTES
from adapters.peft import refuse_other_kind, resolve_file
from adapters.tokenizer_config import default_template, token_text

_CONFIG = tokenizer_config.FILE
FILE = "chat_template.jinja"
# Maximum length of a template. The limit keeps the size of a `Record` small, because a record has
# the templates of all versions of an adapter. Templates of current models have up to 20 KB.
MAX_CHARACTERS = 64 * 1024
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template. `source` is its Jinja text.

    `eos_token` is the text of the EOS token, which the template can write at the end of a message.
    It is None if the adapter's folder does not state an EOS token.
    """

    source: str
    eos_token: str | None = None

    def digest(self, weights: str) -> str:
        """Return the sha256 hex digest that identifies an adapter version with this template.

        `weights` is the digest of the version's tensors (`content_digest`).
        """
        text = json.dumps([weights, self.source, self.eos_token])
        return hashlib.sha256(f"chat template {text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class FoundTemplate:
    """A chat template that was read from an adapter's folder.

    `added_tokens` has (id, text) of each token in the folder's `added_tokens_decoder`: the tokens
    that were added to the vocabulary of the tokenizer model.
    """

    template: ChatTemplate
    added_tokens: tuple[tuple[int, str], ...] = ()


def read(folder: Path, *, within: Path | None = None) -> FoundTemplate | None:
    """Return the template in a folder. Return None if the folder has no template.

    If `within` is set, every file must lie inside this folder after resolving symbolic links. Raise
    a subclass of `AdapterError` if a file cannot be used.
    """
    config: dict[str, Any] = {}
    if (folder / _CONFIG).exists():
        try:
            config = json.loads(_text(folder, _CONFIG, within, _MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            raise CorruptFile(_CONFIG, "content", error, "a JSON object") from error
        if not isinstance(config, dict):
            raise CorruptFile(_CONFIG, "content", type(config).__name__, "a JSON object")
    if (folder / FILE).exists():
        source: Any = _text(folder, FILE, within, 4 * MAX_CHARACTERS)
    else:
        source = default_template(config.get("chat_template"))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CorruptFile(_CONFIG, "chat_template", source, "a text, or a list with a default")
    if len(source) > MAX_CHARACTERS:
        found = f"{len(source)} characters"
        raise TooLarge(FILE, "chat_template", found, f"{MAX_CHARACTERS} characters")
    added = config.get("added_tokens_decoder") or {}
    try:
        tokens = tuple((int(number[:20]), token["content"]) for number, token in added.items())
        eos_token = token_text(config.get("eos_token"))
        if not all(isinstance(text, str) for text in (*dict(tokens).values(), eos_token or "")):
            raise TypeError("a token that is no text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            _CONFIG, "added_tokens_decoder", error, "ids with their tokens"
        ) from error
    return FoundTemplate(ChatTemplate(source.rstrip("\n"), eos_token), tokens)


def _text(folder: Path, name: str, within: Path | None, most: int) -> str:
    path = resolve_file(folder, name, within)
    try:
        size = path.stat().st_size
        if size > most:
            raise TooLarge(name, "size", f"{size} bytes", f"{most} bytes")
        raw = path.read_bytes()
        refuse_other_kind(name, raw[:HEAD_BYTES])
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptFile(name, "content", error, "UTF-8") from error
    except OSError as error:
        raise MissingFile(name, "file", error.strerror, "a readable file") from error
