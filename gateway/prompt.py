"""Chat template and tokenizing: messages to text to token ids.

Uses the Rust tokenizer and a sandboxed Jinja environment directly: importing transformers would
cost each worker seconds of start-up and tens of megabytes for the same two files.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest

# `encode` holds the GIL at about 1 us per token; `encode_batch_fast` releases it, at the price of
# a thread hop of some 0.3 ms. Text longer than this goes to the thread.
_INLINE_CHARS = 4096


class Prompts:
    """The tokenizer of one base model: renders chats, encodes text, knows the special ids."""

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any], eos_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._vocab_size = tokenizer.get_vocab_size()
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := config.get(name)) is not None
        }
        self._template = _compile(config.get("chat_template"))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path) -> Prompts:
        """Reads a Hugging Face tokenizer folder. Raises FileNotFoundError naming what is missing.

        A folder without `tokenizer.json` (sentencepiece only) is converted with transformers.
        """
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        tokenizer = _load_tokenizer(folder)
        return cls(tokenizer, config, _eos_ids(folder, tokenizer, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._vocab_size

    @property
    def eos_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Applies the chat template, ready for the assistant's turn.

        Raises InvalidRequest when the template refuses the messages or there is no template.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        try:
            return self._template.render(
                messages=messages, tools=None, add_generation_prompt=True, **self._special
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; long text is encoded in a thread without holding the GIL."""
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        loop = asyncio.get_running_loop()
        [encoding] = await loop.run_in_executor(
            self._pool,
            lambda: self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens),
        )
        return encoding.ids

    def stop_ids(self, stop: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Id sequences at which the engine may stop by itself.

        The stop strings as they tokenize alone, and all end-of-sequence ids but the first, since
        the engine takes only one `end_id`.
        """
        words = [tuple(self.tokenizer.encode(s, add_special_tokens=False).ids) for s in stop]
        words += [(token_id,) for token_id in self.eos_ids[1:]]
        return tuple(word for word in words if word)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _load_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not (folder / "tokenizer.model").is_file():
        raise FileNotFoundError(f"no tokenizer.json or tokenizer.model in {folder}")
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import and rarely needed

    tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _eos_ids(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> list[int]:
    """End-of-sequence ids: the tokenizer's own first, then those of the generation config."""
    token = config.get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    first = tokenizer.token_to_id(content) if content is not None else None
    found: list[int | None] = [first]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return list(dict.fromkeys(i for i in found if i is not None))


def _compile(source: str | list[dict[str, str]] | None) -> Template | None:
    """Compiles a chat template in the environment that Hugging Face templates are written for.

    (transformers `apply_chat_template`: trimmed blocks, loop controls, `tojson` without HTML
    escapes, `raise_exception`, `strftime_now`.) A list holds several templates by name.
    """
    if isinstance(source, list):
        source = next((t["template"] for t in source if t["name"] == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment.from_string(source)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
