"""Treatment of control tokens in messages as text, so that a client cannot end its message's turn.

A tokenizer takes `<|im_end|>` for that token wherever it occurs. In a chat only the template's own
are meant. So if a client has written one, the template is given a stand-in for it, and the tokens
that the template writes become aliases. A second tokenizer knows the tokens by their aliases only.
It shares the model with the first one, so everything else has its usual ids.

See decision 044 in docs/decisions.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer

from gateway.errors import InvalidRequest

# Private-use characters. So many random ones that no client can guess an alias or a stand-in.
_PRIVATE = range(0xE000, 0xF900)
_SECRET_CHARS = 8
# A search holds the GIL: over megabytes it would block every stream.
_SEARCH_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A rendered chat with control tokens that a client wrote, to be encoded by `ControlTokens`.

    Attributes:
        text: the readable text.
        aliased: the text with an alias for each control token that the template wrote.
        control: the owner of the aliases.
    """

    text: str
    aliased: str
    control: ControlTokens

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Control:
    """A token, its alias in the template's text, and its stand-in in a client's text."""

    token: str
    alias: str
    stand_in: str


class ControlTokens:
    """The added tokens of one tokenizer that are not text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        harmless: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> None:
        """Find the control tokens: special ones, and those that the chat template names.

        Not all models mark the token that begins a turn as special. `harmless` tokens are never
        control tokens. `replaced` are words that the template replaces in messages, which may make
        a token of the text around them.
        """
        added = tokenizer.get_added_tokens_decoder()
        control = {
            token_id: token
            for token_id, token in added.items()
            if (token.special or (token.content.strip() and token.content in template))
            and token.content not in harmless
        }
        self.ids = frozenset(control)
        """Ids of control tokens."""
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_SECRET_CHARS))
        # A token within another one comes after that.
        self._control = [
            _Control(content, f"{secret}{n};", f"{secret}c{n};")
            for n, content in enumerate(
                sorted([t.content for t in control.values()], key=_by_length)
            )
        ]
        hidden = {each.token: each.stand_in for each in self._control}
        unchanged = {}
        if replaced:
            # The template must find the words that it replaces. A token that results from a
            # replacement has its first letter from a client, too, so the first letters are hidden
            # as well.
            words = (*harmless, *replaced)
            unchanged = {word: word for word in words if not any(token in word for token in hidden)}
            first = sorted({token[0] for token in hidden})
            hidden |= {letter: f"{secret}f{n};" for n, letter in enumerate(first)}
        self._tokens = _make_replacer(unchanged | hidden)
        self._stand_ins = _make_replacer({stand_in: word for word, stand_in in hidden.items()})
        self._aliases = _make_replacer({each.token: each.alias for each in self._control})
        # Messages are searched as JSON, in which each of a token's characters is written alone.
        written = [
            orjson.dumps(word)[1:-1]
            for word in (*[each.token for each in self._control], *replaced)
        ]
        self._written = re.compile(build_alternation([word.decode() for word in written]).encode())
        self._longest = max(map(len, written), default=0)
        # A token that is matched in normalized text may be written with other characters.
        normalizes = str(tokenizer.normalizer) not in ("None", "Sequence(normalizers=[])")
        self._always = normalizes and any(token.normalized for token in control.values())
        self.tokenizer = Tokenizer(tokenizer.model)
        """The tokenizer that encodes an aliased text; its ids of added tokens are its own."""
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(self.tokenizer, part, value)
        alias = {each.token: each.alias for each in self._control}
        known = {
            token_id: _with_alias(alias[token.content], token) if token_id in control else token
            for token_id, token in added.items()
        }
        self.tokenizer.add_tokens(list(known.values()))
        self.added = {token.content: token_id for token_id, token in known.items()}
        """Ids of all added tokens, by their text in an aliased text."""
        self._real = {
            self.tokenizer.token_to_id(content): token_id
            for content, token_id in self.added.items()
        }

    def may_occur_in(self, values: Any) -> bool:
        """Return True if a string of these JSON values may contain a control token, or become
        one."""
        if not self._control:
            return False
        try:
            data = orjson.dumps(values)
        except TypeError:  # a number of more than 64 bits
            return True
        pieces = range(0, len(data), _SEARCH_CHUNK_BYTES)
        search, size = self._written.search, _SEARCH_CHUNK_BYTES + self._longest
        return self._always or any(search(data, at, at + size) for at in pieces)

    def hide(self, value: Any) -> Any:
        """Return a copy of a JSON value, with a stand-in for each control token."""
        if isinstance(value, str):
            return self._tokens(value)
        if isinstance(value, dict):
            return type(value)((self.hide(key), self.hide(each)) for key, each in value.items())
        if isinstance(value, list):
            return [self.hide(each) for each in value]
        return value

    def restore(self, text: str) -> str:
        """Return the text with control tokens in place of their stand-ins."""
        return self._stand_ins(text)

    def build_guarded(self, rendered: str) -> GuardedText:
        """Return the guarded text of one that was rendered with hidden values."""
        return GuardedText(self.restore(rendered), self.restore(self._aliases(rendered)), self)

    def encode(self, aliased: str) -> array[int]:
        """Return the token ids of an aliased text, or of a part of one.

        Raises InvalidRequest if the tokenizer's model itself, and not its search for added tokens,
        makes a control token of text.
        """
        [encoding] = self.tokenizer.encode_batch_fast([aliased], add_special_tokens=False)
        ids = encoding.ids
        if not self.ids.isdisjoint(set(ids) - self._real.keys()):
            raise InvalidRequest(
                "messages: hold a control token, which this model's tokenizer cannot take as text.",
                param="messages",
            )
        return array("i", [self._real.get(token_id, token_id) for token_id in ids])


def build_alternation(words: Iterable[str]) -> str:
    """Return an expression for any of the words; of those at one position, the longest matches.

    It examines each letter once, and not once per word: a model may have hundreds of them, and a
    text may begin one at every position.
    """
    rest: dict[str, list[str]] = {}
    for word in words:
        rest.setdefault(word[:1], []).append(word[1:])
    one_ends_here = rest.pop("", None) is not None
    branches = [re.escape(first) + build_alternation(others) for first, others in rest.items()]
    if one_ends_here:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _make_replacer(words: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces each word by its value, in one pass over the text."""
    return partial(re.compile(build_alternation(words)).sub, lambda found: words[found[0]])


def _with_alias(alias: str, token: AddedToken) -> AddedToken:
    """Return the token under its alias, which is found whatever a normalizer does: it is not
    text."""
    return AddedToken(
        alias,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _by_length(token: str) -> int:
    return -len(token)
