"""Encoding of control tokens in messages as plain text, so clients cannot inject chat turns.

A tokenizer encodes `<|im_end|>` as a control token wherever that text occurs. In a chat, only the
chat template may write control tokens. If a client's message contains the text of a control token,
three steps encode this text as plain text:

1. Before the chat is rendered, each control token in the message is replaced by a stand-in: a
   random text that no client can guess.
2. In the rendered chat, all control tokens now come from the template. Each of them is replaced by
   another random text, its alias. Then each stand-in is replaced by the client's original text.
3. A second tokenizer encodes the result. Only the aliases are control tokens for this tokenizer.

The second tokenizer uses the same model as the first, so all other text has its usual ids.

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

# Range and number of the random characters with which aliases and stand-ins begin. Clients cannot
# guess these characters.
_PRIVATE = range(0xE000, 0xF900)
_SECRET_CHARS = 8
# Size of the chunks in which messages are searched. A search holds the GIL, so one search of
# megabytes would block all running streams.
_SEARCH_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A rendered chat in which a client has written control tokens.

    Attributes:
        text: the readable text.
        aliased: the text with an alias in place of each control token that the template wrote.
        control: the object whose method `encode` encodes `aliased`.
    """

    text: str
    aliased: str
    control: ControlTokens

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token, and the random texts that replace it.

    Attributes:
        token: the text of the control token.
        alias: replaces the token in the template's text.
        stand_in: replaces the token in a client's text.
    """

    token: str
    alias: str
    stand_in: str


class ControlTokens:
    """The control tokens of one tokenizer: added tokens that only the template may write."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        harmless: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> None:
        """Find the control tokens: special tokens, and added tokens that the template contains.

        Some models do not mark the token that begins a turn as special. The template shows that
        this token is a control token.

        Args:
            tokenizer: the model's tokenizer.
            template: the source of the chat template.
            harmless: added tokens that clients may write.
            replaced: words that the template replaces in messages. Replacing a word may turn the
                text around it into a control token.
        """
        added = tokenizer.get_added_tokens_decoder()
        control = {
            token_id: token
            for token_id, token in added.items()
            if (token.special or (token.content.strip() and token.content in template))
            and token.content not in harmless
        }
        self.ids = frozenset(control)
        """Token ids of the control tokens."""
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_SECRET_CHARS))
        # Sort the tokens by length, the longest first. Otherwise, a token that is a part of a
        # longer token would be replaced within the longer token.
        self._control = [
            _Control(content, f"{secret}{n};", f"{secret}c{n};")
            for n, content in enumerate(
                sorted([t.content for t in control.values()], key=_by_length)
            )
        ]
        hidden = {each.token: each.stand_in for each in self._control}
        unchanged = {}
        if replaced:
            # Use no stand-ins for words that the template itself replaces, because the template
            # must find these words. The template's replacement may turn a client's text into a
            # control token. This requires the token's first letter in the text. So also replace the
            # first letters of all control tokens by stand-ins.
            words = (*harmless, *replaced)
            unchanged = {word: word for word in words if not any(token in word for token in hidden)}
            first = sorted({token[0] for token in hidden})
            hidden |= {letter: f"{secret}f{n};" for n, letter in enumerate(first)}
        self._tokens = _make_replacer(unchanged | hidden)
        self._stand_ins = _make_replacer({stand_in: word for word, stand_in in hidden.items()})
        self._aliases = _make_replacer({each.token: each.alias for each in self._control})
        # Search for control tokens in the JSON text of the messages. JSON escapes each character
        # separately. If a message contains a token, its JSON text therefore contains the JSON text
        # of the token.
        written = [
            orjson.dumps(word)[1:-1]
            for word in (*[each.token for each in self._control], *replaced)
        ]
        self._written = re.compile(build_alternation([word.decode() for word in written]).encode())
        self._longest = max(map(len, written), default=0)
        # Some tokenizers search for control tokens in normalized text. Characters that become a
        # control token by normalization are not found by a search for the token's text. So use
        # stand-ins for all messages, without a search.
        normalizes = str(tokenizer.normalizer) not in ("None", "Sequence(normalizers=[])")
        self._always = normalizes and any(token.normalized for token in control.values())
        self.tokenizer = Tokenizer(tokenizer.model)
        """The second tokenizer, which encodes aliased texts.

        Added tokens have other ids in this tokenizer than in the model's tokenizer. `encode`
        returns the ids of the model's tokenizer.
        """
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
        """Ids of all added tokens, by their text. The text of a control token is its alias."""
        self._real = {
            self.tokenizer.token_to_id(content): token_id
            for content, token_id in self.added.items()
        }

    def may_occur_in(self, values: Any) -> bool:
        """Return True if a string in these JSON values may contain a control token.

        Also return True if a replacement by the template might create a control token.
        """
        if not self._control:
            return False
        try:
            data = orjson.dumps(values)
        except TypeError:  # orjson refuses integers of more than 64 bits
            return True
        pieces = range(0, len(data), _SEARCH_CHUNK_BYTES)
        search, size = self._written.search, _SEARCH_CHUNK_BYTES + self._longest
        return self._always or any(search(data, at, at + size) for at in pieces)

    def hide(self, value: Any) -> Any:
        """Return a copy of a JSON value, with a stand-in in place of each control token."""
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
        """Return the GuardedText of a rendered chat in which `hide` had put the stand-ins."""
        return GuardedText(self.restore(rendered), self.restore(self._aliases(rendered)), self)

    def encode(self, aliased: str) -> array[int]:
        """Return the token ids of an aliased text, or of a part of it.

        Raises InvalidRequest if the tokenizer encodes a client's text as a control token. This
        happens if a control token is also in the vocabulary of the tokenizer's model.
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
    """Return a regular expression for any of the words; at each position, the longest word matches.

    Words with a common prefix share the prefix in the expression. A search therefore examines each
    letter once, not once per word. This matters because a model may have hundreds of control
    tokens, and a text may have such a prefix at every position.
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
    """Return a copy of the token with the alias as its text.

    The tokenizer searches for the alias before it normalizes the text.
    """
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
