"""Tokenizer of the base model, with the chat templates of the model and of its LoRA adapters.

The module uses the Rust library tokenizers and a sandboxed Jinja environment, which transformers
also uses. It does not import transformers, because this would cost each worker seconds at start-up
and tens of megabytes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer

from adapters import tokenizer_config
from adapters.chat_template import ChatTemplate, FoundTemplate
from adapters.errors import UnsupportedFeature
from adapters.tokenizer_config import default_template, token_text
from gateway.generation.options import Options
from gateway.parsers.reasoning import TAGS, ReasoningParser
from gateway.parsers.tools.forms import Form
from gateway.tokenization import turn_record
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import ControlTokens, GuardedText
from gateway.tokenization.text_encoder import TextEncoder
from gateway.tokenization.threads import TokenizerThreads
from gateway.tokenization.turn_cache import TurnCache
from gateway.tokenization.turn_record import StoredTurns
from gateway.tokenization.vocabulary import Vocabulary
from gateway.tokenization.word_ids import WordIds

# Number of extra tokens that `truncate_text` leaves, because a cut through a text may change the
# tokens next to the cut. The token ids are truncated to the exact limit later.
_EXTRA_TOKENS = 64
# Maximum length of a text that is encoded without `TurnCache`. Finding the turns of such a text
# would take as long as encoding it.
_SHORT_TEXT_CHARS = 512
_MAX_CACHED_FORMATS = 256
_NO_IDS: frozenset[int] = frozenset()

Turn = tuple[str, "array[int]"]
"""A turn of a chat (the text up to a token that ends the turn), and its token ids (int32)."""


class Prompts:
    """Tokenizer of one base model, with its special token ids and the chat templates."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        eos_ids: list[int],
        tool_form: Form | None = None,
        *,
        reasoning_parser: ReasoningParser | None = None,
        control_tokens_in_messages: bool = False,
        excludes_uncallable_tools: bool = False,
        fingerprint: bytes = b"",
    ) -> None:
        """Prepare the tokenizer.

        Args:
            tokenizer: the Rust tokenizer.
            config: the contents of tokenizer_config.json.
            eos_ids: end-of-sequence ids, the tokenizer's own first.
            tool_form: the format of tool calls; None to guess the format from the chat template.
            reasoning_parser: the name of the reasoning tags; None to guess the tags from the chat
                template.
            control_tokens_in_messages: True if clients may write control tokens in messages.
            excludes_uncallable_tools: True to omit the tools from a prompt if the response must not
                call any tool.
            fingerprint: hash of the tokenizer's file, at most 64 bytes.
        """
        self.tokenizer = tokenizer
        self._fingerprint = fingerprint
        self.eos_ids = eos_ids
        self.vocabulary = Vocabulary(tokenizer)
        self._words = WordIds.of(tokenizer, self.vocabulary.form)
        self._turn_cache = TurnCache(tokenizer, eos_ids)
        self._vocab_size = tokenizer.get_vocab_size()
        self._special = {
            name: token_text(token)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := config.get(name)) is not None
        }
        self._source = default_template(config.get("chat_template"))
        self._format = partial(
            ChatFormat,
            tokenizer,
            control_tokens_in_messages=control_tokens_in_messages,
            excludes_uncallable_tools=excludes_uncallable_tools,
        )
        self.chat = self._format(
            self._source,
            self._special,
            tool_form=tool_form,
            reasoning_tags=TAGS[reasoning_parser] if reasoning_parser else None,
        )
        """The format of chats with the base model."""
        # Cache of the formats of LoRA adapters by template. A compiled template takes about 100 KB,
        # and most adapters have the same template as other adapters.
        self._chat_of_adapter = lru_cache(_MAX_CACHED_FORMATS)(self._compile_format)
        self.threads = TokenizerThreads()
        self._encoder = TextEncoder(self._encode_with_library, self._words, self.threads)
        self._library = TextEncoder(self._encode_with_library, None, self.threads)
        self._guarded_encoder = lru_cache(_MAX_CACHED_FORMATS)(self._make_guarded_encoder)

    @classmethod
    def load(
        cls,
        folder: Path,
        tool_form: Form | None = None,
        *,
        reasoning_parser: ReasoningParser | None = None,
        control_tokens_in_messages: bool = False,
        excludes_uncallable_tools: bool = False,
    ) -> Prompts:
        """Load the tokenizer and the chat template from a Hugging Face tokenizer folder.

        If there is only a `tokenizer.model` (sentencepiece) and no `tokenizer.json`, the library
        transformers converts the file. The optional dependency group `sentencepiece` of this
        project installs transformers.

        Raises OSError if a file is missing or cannot be read. Raises ValueError if a file is
        broken; the error's text names the file.
        """
        config = _read_json(folder / tokenizer_config.FILE)
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            with _name_in_errors(template_file):
                config["chat_template"] = template_file.read_text(encoding="utf-8")
        tokenizer = _load_tokenizer(folder)
        eos_ids = _eos_ids(folder, tokenizer, config)
        with _name_in_errors(folder):
            return cls(
                tokenizer,
                config,
                eos_ids,
                tool_form,
                reasoning_parser=reasoning_parser,
                control_tokens_in_messages=control_tokens_in_messages,
                excludes_uncallable_tools=excludes_uncallable_tools,
                fingerprint=_fingerprint(folder),
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return self._vocab_size

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token; None if the tokenizer's configuration names no such token."""
        token = self._special.get("pad_token")
        found: int | None = None if token is None else self.tokenizer.token_to_id(token)
        return found

    @property
    def caches_words(self) -> bool:
        """True if texts are encoded from the cached ids of their words (module `word_ids`)."""
        return self._words is not None

    def chat_of(self, template: ChatTemplate | None) -> ChatFormat:
        """Return the chat format of an adapter's template. None means the model's template."""
        return self.chat if template is None else self._chat_of_adapter(template)

    def matches_template(self, found: FoundTemplate | None) -> bool:
        """Return True if an adapter has no chat template, or the same template as this model."""
        if found is None:
            return True
        source, end = found.template.source, found.template.eos_token
        return source == (self._source or "").rstrip("\n") and (
            end is None or self.tokenizer.token_to_id(end) in self.eos_ids
        )

    def accept(self, found: FoundTemplate | None) -> ChatTemplate | None:
        """Return the chat template for an adapter. Return None if the model's template applies.

        Chats with adapters are encoded with the model's tokenizer. Raises UnsupportedFeature if the
        adapter's template is invalid or needs tokens that this tokenizer does not have.
        """
        if found is None or self.matches_template(found):
            return None
        template = found.template
        for token_id, token in found.added_tokens:
            if token in template.source and self.tokenizer.id_to_token(token_id) != token:
                raise _unsupported_error(f"{token!r} as token {token_id}")
        end = template.eos_token
        if end is not None and self.tokenizer.token_to_id(end) is None:
            raise _unsupported_error(f"the eos_token {end!r}")
        if end is not None and self.tokenizer.token_to_id(end) in self.eos_ids:
            template = replace(template, eos_token=None)
        try:
            self.chat_of(template)
        except TemplateError as error:
            raise UnsupportedFeature("chat_template", "source", error, "a template") from error
        return template

    def _compile_format(self, template: ChatTemplate) -> ChatFormat:
        end = template.eos_token
        if end is None:
            return self._format(template.source, self._special)
        token_id = self.tokenizer.token_to_id(end)
        # Ignore a missing token. `accept` has checked that this token exists, but perhaps in
        # another gateway process with the same model.
        stop_ids = () if token_id is None else (token_id,)
        return self._format(template.source, self._special | {"eos_token": end}, stop_ids=stop_ids)

    async def encode(
        self, text: str | GuardedText, *, add_special_tokens: bool, tenant: str = ""
    ) -> array[int]:
        """Return the token ids (int32) of `text`.

        A long text waits in the tenant's queue for the event loop or a thread. Raises Overloaded if
        too much text is queued already.
        """
        if isinstance(text, GuardedText):
            opening = self.tokenizer.encode("").ids if add_special_tokens else []
            guarded = self._guarded_encoder(text.control)
            [ids] = await guarded.encode([text.aliased], add_special_tokens=False, tenant=tenant)
            return array("i", opening) + ids
        encoder = self._encoder
        if self._words is not None and len(text) <= _SHORT_TEXT_CHARS:
            brief = self._words.encode(text, add_special_tokens=add_special_tokens)
            if brief is not None:
                return brief
            # `WordIds` cannot encode this text, so use only the Rust library for its turns.
            encoder = self._library
        encode = partial(encoder.encode, add_special_tokens=add_special_tokens, tenant=tenant)
        if not add_special_tokens:
            return await self._turn_cache.encode(text, encode)
        [ids] = await encode([text])
        return ids

    def pack_turns(self, text: str | GuardedText, stored: StoredTurns) -> bytes:
        """Return the token ids of a prompt's turns as bytes, to be stored with a conversation.

        Turns are left out if they are not in the turn cache, or already in `stored`. The bytes have
        the format of the module `turn_record`. When the conversation continues, any process can
        read them with `turn_record.unpack`, and add the turns to its cache with `find_turns` and
        `learn`.
        """
        if isinstance(text, GuardedText):
            return b""
        return turn_record.pack(self._turn_cache.cached_turns(text), self._fingerprint, stored)

    def find_turns(self, text: str | GuardedText, stored: StoredTurns) -> list[Turn]:
        """Return the turns of a prompt whose token ids are in `stored`.

        Pass the result to `learn`. Thread-safe.
        """
        if isinstance(text, GuardedText):
            return []
        found = (
            (turn, turn_record.ids_of(turn, self._fingerprint, stored))
            for turn in self._turn_cache.split_turns(text)
        )
        return [(turn, ids) for turn, ids in found if ids is not None]

    def learn(self, turns: Iterable[Turn]) -> None:
        """Add turns to the turn cache. `encode` then tokenizes only the other turns of a prompt.

        Thread-safe.
        """
        self._turn_cache.learn(turns)

    def _encode_with_library(self, text: str, add_special_tokens: bool) -> array[int]:
        # Use `encode_batch_fast`, because it releases the GIL, and takes two thirds of the time of
        # `encode`, since it computes no offsets. Encode one text at a time, because the Rust
        # library would encode a batch in several threads.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encoding.ids)

    def _make_guarded_encoder(self, control: ControlTokens) -> TextEncoder:
        words = self._words and self._words.build_aliased(
            control.tokenizer, control.added, control.ids
        )
        return TextEncoder(lambda text, _: control.encode(text), words, self.threads)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return True if `text` is so long that it must have more than `tokens` tokens."""
        reach = self.vocabulary.reach
        return reach is not None and reach.exceeds(text, tokens)

    def truncate_text(self, text: str, tokens: int, cut: Literal["left", "right"]) -> str:
        """Shorten a text of which only `tokens` tokens are needed. Return the shorter text.

        Text is removed from the side `cut`. The result may still have more than `tokens` tokens. It
        includes some extra characters, because a cut may change the tokens next to it. The text is
        not shortened if tokens of this tokenizer may have any length.
        """
        reach = self.vocabulary.reach
        if reach is None or reach.blanks:
            return text
        chars = reach.chars * (tokens + _EXTRA_TOKENS)
        return text[:chars] if cut == "right" else text[-chars:]

    def opening(self) -> str:
        """Return the text of the special tokens that the tokenizer adds before a text."""
        before: str = self.tokenizer.decode(
            self.tokenizer.encode("").ids, skip_special_tokens=False
        )
        return before

    def end_id(self, options: Options) -> int | None:
        """Return the first end-of-sequence id. Return None if no id ends this request.

        An engine accepts only one end id. `further_end_ids` returns the others.
        """
        return None if options.ignores_ends or not self.eos_ids else self.eos_ids[0]

    def further_end_ids(self, options: Options) -> tuple[int, ...]:
        """Return the request's stop ids, and the end-of-sequence ids other than `end_id`."""
        eos_ids = () if options.ignores_ends else tuple(self.eos_ids[1:])
        return options.stop_token_ids + eos_ids

    def stop_ids(self, options: Options) -> tuple[tuple[int, ...], ...]:
        """Return the id sequences at which the engine stops, in addition to `end_id`.

        Without `min_tokens`, the result has the ids of the strings in `engine_stop`, and the
        `further_end_ids`.

        With `min_tokens`, the result is empty. For the first `min_tokens` tokens, an engine ignores
        `end_id`, but would stop at the ids named above. The gateway itself therefore ends the
        response, at `later_end_ids`. Exception: for a guided response, the result is
        `further_end_ids`.
        """
        ends = tuple((token_id,) for token_id in self.further_end_ids(options))
        if options.params.min_tokens:
            return () if options.params.guide is None else ends
        return self.word_ids(options.params.engine_stop) + ends

    def later_end_ids(self, options: Options) -> frozenset[int]:
        """Return the ids at which the gateway itself ends a response after `min_tokens` tokens.

        With `min_tokens`, the result is `further_end_ids`. Without `min_tokens`, the result is
        empty, because the engine stops at these ids. For a guided response, the result is always
        empty: the engine itself stops, because it cannot continue after the end of such a response.
        """
        if not options.params.min_tokens or options.params.guide is not None:
            return _NO_IDS
        return frozenset(self.further_end_ids(options))

    def word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word, encoded alone and without special tokens."""
        encoded = [self.tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        return tuple(tuple(ids) for ids in encoded if ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    async def decode_offloaded(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, tenant: str = ""
    ) -> str:
        """Return the text of a prompt. A long list of ids waits in the tenant's queue for a thread.

        Raises Overloaded if too much text is queued already.
        """

        def decode() -> str:
            # Use `decode_batch`: unlike `decode`, it releases the GIL.
            [text] = self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return str(text)

        return await self.threads.run(tenant, len(ids), decode)

    def close(self) -> None:
        self.threads.close()


def _unsupported_error(needed: str) -> UnsupportedFeature:
    why = "an adapter's template is written in the tokens of its base model's tokenizer"
    return UnsupportedFeature(tokenizer_config.FILE, "added_tokens", needed, "a known token", why)


@contextmanager
def _name_in_errors(path: Path) -> Iterator[None]:
    """Convert any error except OSError to a ValueError that begins with `path`.

    The tokenizers library raises plain Exception for a broken file.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: {error}") from error


def _fingerprint(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if not file.is_file():
        file = folder / "tokenizer.model"
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def _load_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        with _name_in_errors(folder / "tokenizer.json"):
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not (folder / "tokenizer.model").is_file():
        raise FileNotFoundError(f"no tokenizer.json or tokenizer.model in {folder}")
    with _name_in_errors(folder / "tokenizer.model"):
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, rarely needed
        except ImportError:
            raise ValueError(
                "only transformers can convert this, and it is not installed: save a "
                "tokenizer.json beside it, or install the extra `sentencepiece`"
            ) from None

        tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
        assert isinstance(tokenizer, Tokenizer)
        return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with _name_in_errors(path):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, found {type(data).__name__}")
        return data


def _eos_ids(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> list[int]:
    """Return the end-of-sequence ids of the tokenizer, generation_config.json and config.json."""
    content = token_text(config.get("eos_token"))
    first = tokenizer.token_to_id(content) if content is not None else None
    found: list[int | None] = [first]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return list(dict.fromkeys(i for i in found if i is not None))
