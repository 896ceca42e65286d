"""Chat template and tokenizing: messages to text to token ids.

Uses the Rust tokenizer and a sandboxed Jinja environment directly: importing transformers would
cost each worker seconds of start-up and tens of megabytes for the same two files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.nodes import Call, Const, Filter, Getattr
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest
from gateway.generation import Options
from gateway.parsers.reasoning import guess as guess_tags
from gateway.parsers.tools.forms import Form
from gateway.parsers.tools.forms import guess as guess_form
from gateway.tokenization.control_tokens import ControlTokens, GuardedText
from gateway.tokenization.turn_cache import TurnCache
from gateway.tokenization.turns import Turns
from gateway.tokenization.vocabulary import Vocabulary

_OF_EVERY_DICT = frozenset(dir(dict))
# Tokens.
_RUN_UP = 64
# Private-use characters, which no message should hold.
_MARK = "\uf8ff\uf8fe\uf8ff"
# What a request may not set through `chat_template_kwargs`: it has parameters of their own for
# these, or they are those of transformers' `apply_chat_template` and no variables.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)


class Prompts:
    """The tokenizer of one base model: renders chats, encodes text, knows the special ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        eos_ids: list[int],
        tool_form: Form | None = None,
        *,
        control_tokens_in_messages: bool = False,
    ) -> None:
        """`tool_form` None is guessed from the chat template, and may still be None then.

        `control_tokens_in_messages` says that what clients write may hold them.
        """
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocabulary = Vocabulary(tokenizer)
        self._turn_cache = TurnCache(tokenizer, eos_ids)
        self._vocab_size = tokenizer.get_vocab_size()
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := config.get(name)) is not None
        }
        source = _template_source(config.get("chat_template"))
        self._template = compile_template(source) if source is not None else None
        self._reserved = _RESERVED | self._special.keys()
        if self._template is not None:
            self._reserved |= self._template.globals.keys()
        self.tool_form = tool_form or guess_form(source or "")
        self.reasoning_tags = guess_tags(source or "")
        self._control = None
        if not control_tokens_in_messages:
            # Templates look for the tags of thoughts in what clients send back, to cut those.
            self._control = ControlTokens(
                tokenizer, source or "", self.reasoning_tags or (), replaced_words(source or "")
            )
        self.turns = Turns()

    @classmethod
    def load(
        cls,
        folder: Path,
        tool_form: Form | None = None,
        *,
        control_tokens_in_messages: bool = False,
    ) -> Prompts:
        """Reads a Hugging Face tokenizer folder.

        Raises OSError where a file is missing or cannot be read, ValueError naming what is broken.
        A folder without `tokenizer.json` (sentencepiece only) is converted with transformers.
        """
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            with _naming(template_file):
                config["chat_template"] = template_file.read_text(encoding="utf-8")
        tokenizer = _load_tokenizer(folder)
        eos_ids = _eos_ids(folder, tokenizer, config)
        with _naming(folder):
            return cls(
                tokenizer,
                config,
                eos_ids,
                tool_form,
                control_tokens_in_messages=control_tokens_in_messages,
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._vocab_size

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
        *,
        open_turn: bool = True,
        go_on: bool = False,
    ) -> str | GuardedText:
        """Applies the chat template; `extra` are variables of its own.

        What `messages`, `tools` and `extra` hold is data to the template and never compiled; where
        there are control tokens in it, the result is a GuardedText.

        `open_turn` begins the assistant's turn; `go_on` leaves the last message open instead, to
        be continued.

        Raises InvalidRequest when the template refuses the messages or there is no template.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        for name in self._reserved.intersection(extra or ()):
            raise InvalidRequest(
                f"chat_template_kwargs: {name} is not for a request to set.",
                param=f"chat_template_kwargs.{name}",
            )
        control = self._control
        if control is not None and control.written_in((messages, tools, extra)):
            messages, tools, extra = map(control.hidden, (messages, tools, extra))
        else:
            control = None
        try:
            variables = {**(extra or {}), **self._special}
            if go_on:
                messages = _marked(messages)
            variables |= {"messages": messages, "tools": tools}
            variables["add_generation_prompt"] = open_turn and not go_on
            text = self._template.render(variables)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            why = f"The model's chat template refused the messages: {error}"
            if control is not None:
                why = control.shown(why)
            raise InvalidRequest(why, param="messages") from error
        if go_on:
            text = _up_to_mark(text)
        return text if control is None else control.guarded(text)

    async def encode(
        self, text: str | GuardedText, *, add_special_tokens: bool, tenant: str = ""
    ) -> list[int]:
        """Token ids of `text`; longer text waits for its tenant's turn, off the event loop.

        Raises Overloaded when too much text waits already.
        """
        if isinstance(text, GuardedText):
            opening = self.tokenizer.encode("").ids if add_special_tokens else []
            assert self._control is not None
            work = partial(self._control.encode, text)
            return [*opening, *await self.turns.run(tenant, len(text.text), work)]

        async def encode(texts: list[str]) -> list[list[int]]:
            work = partial(self._encode, texts, add_special_tokens=add_special_tokens)
            return await self.turns.run(tenant, sum(map(len, texts)), work)

        if not add_special_tokens:
            return await self._turn_cache.encode(text, encode)
        [ids] = await encode([text])
        return ids

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # `encode_batch_fast` takes two thirds of the time of `encode` (no offsets) and releases the
        # GIL. One by one: of several, each would go to a thread of the tokenizer's own.
        found = []
        for text in texts:
            [encoding] = self.tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            found.append(encoding.ids)
        return found

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` is more than so many tokens for sure, by its length alone."""
        reach = self.vocabulary.reach
        return reach is not None and reach.exceeds(text, tokens)

    def end_of(self, text: str, tokens: int) -> str:
        """What of `text` its last `tokens` tokens can be of.

        With some more before it: a tokenizer that begins elsewhere finds other tokens at first.
        """
        reach = self.vocabulary.reach
        if reach is None or reach.blanks:
            return text
        return text[-reach.chars * (tokens + _RUN_UP) :]

    def opening(self) -> str:
        """The special tokens that the tokenizer puts before a text, as text."""
        before: str = self.tokenizer.decode(
            self.tokenizer.encode("").ids, skip_special_tokens=False
        )
        return before

    def end_id(self, *, ignore_eos: bool) -> int | None:
        """The id that ends a sequence; further ones are stop words, as the engine takes but one."""
        return None if ignore_eos or not self.eos_ids else self.eos_ids[0]

    def stop_ids(self, options: Options) -> tuple[tuple[int, ...], ...]:
        """Id sequences at which the engine may stop by itself.

        The stop strings as they tokenize alone, the stop ids, and all end-of-sequence ids but the
        first.
        """
        words: tuple[tuple[int, ...], ...] = ()
        if not options.params.sampling.min_tokens:
            # The engine holds only its end id back until then; the text decides on these.
            words = self.word_ids(options.params.stop)
        words += tuple((token_id,) for token_id in options.stop_token_ids)
        if not options.ignore_eos:
            words += tuple((token_id,) for token_id in self.eos_ids[1:])
        return words

    def word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word on its own, without special tokens."""
        encoded = [self.tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        return tuple(tuple(ids) for ids in encoded if ids)

    def decode(self, ids: list[int]) -> str:
        """The text of a prompt, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def close(self) -> None:
        self.turns.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes of whatever a broken file raises (the tokenizers library: plain Exception) a ValueError
    with its name.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: {error}") from error


def _load_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        with _naming(folder / "tokenizer.json"):
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not (folder / "tokenizer.model").is_file():
        raise FileNotFoundError(f"no tokenizer.json or tokenizer.model in {folder}")
    with _naming(folder / "tokenizer.model"):
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import and rarely needed

        tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
        assert isinstance(tokenizer, Tokenizer)
        return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with _naming(path):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, found {type(data).__name__}")
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


def _template_source(source: str | list[dict[str, str]] | None) -> str | None:
    """A chat template; a list holds several by name."""
    if isinstance(source, list):
        return next((t["template"] for t in source if t["name"] == "default"), None)
    return source


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja asks for the attribute first: an exception for every key of every message."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_EVERY_DICT:
            return obj[attribute]
        return super().getattr(obj, attribute)


def compile_template(source: str) -> Template:
    """Compiles a chat template in the environment that Hugging Face templates are written for.

    (transformers `apply_chat_template`: trimmed blocks, loop controls, `tojson` without HTML
    escapes, `raise_exception`, `strftime_now`.)
    """
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    template = environment.from_string(source)
    # Jinja chains mappings here, which it copies at each rendering. With a dict a short chat takes
    # 7 us in place of 17 (python -m bench.packing).
    template.globals = dict(template.globals)
    return template


def replaced_words(source: str) -> set[str]:
    """The words that a chat template replaces, by `str.replace` or Jinja's filter."""
    tree = _environment().parse(source)
    calls: list[Call | Filter] = [
        call
        for call in tree.find_all(Call)
        if isinstance(call.node, Getattr) and call.node.attr == "replace"
    ]
    calls += [call for call in tree.find_all(Filter) if call.name == "replace"]
    found = [call.args[0] for call in calls if call.args]
    words = {word.value for word in found if isinstance(word, Const)}
    return {word for word in words if word and isinstance(word, str)}


def _environment() -> _Environment:
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark behind the last one's content, which is to be continued."""
    *before, last = messages
    return [*before, last | {"content": last["content"].rstrip() + _MARK}]


def _up_to_mark(text: str) -> str:
    """The rendered chat up to where its last message's content ends."""
    open_chat, found, _ = text.rpartition(_MARK)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the last message is not in the rendered chat.",
            param="continue_final_message",
        )
    return open_chat


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
