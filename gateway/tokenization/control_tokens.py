"""Control tokens in what clients write are text: whoever writes a message cannot end its turn.

A tokenizer takes `<|im_end|>` for that token wherever it stands. In a chat only the template's own
are meant. So where a client has written one, the template is given a stand-in for it, and what the
template itself writes becomes an alias. A second tokenizer knows the tokens by their aliases alone.
It shares the model with the first one, so all else has the ids that it always had.
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

# Private-use characters; so many drawn ones that no client can write an alias or a stand-in.
_PRIVATE = range(0xE000, 0xF900)
_SECRET_CHARS = 8
# A search holds the GIL: of megabytes it would hold up every stream.
_SEARCH_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A rendered chat with control tokens that a client wrote, to be encoded by `ControlTokens`.

    Attributes:
        text: as it reads.
        aliased: with an alias in place of each control token that the template wrote.
        control: whose aliases these are.
    """

    text: str
    aliased: str
    control: ControlTokens

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Control:
    """One token: what stands for it where the template wrote it, and where a client did."""

    token: str
    alias: str
    stand_in: str


class ControlTokens:
    """The added tokens of one tokenizer that are no text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        harmless: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> None:
        """They are the special ones, and those that the chat template names: not all models mark
        what begins a turn as special. `harmless` are never among them. `replaced` are words that
        the template replaces in what clients write, which may make a token of what is around."""
        added = tokenizer.get_added_tokens_decoder()
        control = {
            token_id: token
            for token_id, token in added.items()
            if (token.special or (token.content.strip() and token.content in template))
            and token.content not in harmless
        }
        self.ids = frozenset(control)
        """The ids of control tokens."""
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_SECRET_CHARS))
        # A token that is in another one comes after that.
        self._control = [
            _Control(content, f"{secret}{n};", f"{secret}c{n};")
            for n, content in enumerate(
                sorted([t.content for t in control.values()], key=_by_length)
            )
        ]
        hidden = {each.token: each.stand_in for each in self._control}
        unchanged = {}
        if replaced:
            # The template must find what it looks for. What it makes a token of has that token's
            # first letter from a client, too.
            words = (*harmless, *replaced)
            unchanged = {word: word for word in words if not any(token in word for token in hidden)}
            first = sorted({token[0] for token in hidden})
            hidden |= {letter: f"{secret}f{n};" for n, letter in enumerate(first)}
        self._tokens = _make_replacer(unchanged | hidden)
        self._stand_ins = _make_replacer({stand_in: word for word, stand_in in hidden.items()})
        self._aliases = _make_replacer({each.token: each.alias for each in self._control})
        # Clients' text is looked at as JSON, in which each of its characters is written alone.
        written = [
            orjson.dumps(word)[1:-1]
            for word in (*[each.token for each in self._control], *replaced)
        ]
        self._written = re.compile(build_alternation([word.decode() for word in written]).encode())
        self._longest = max(map(len, written), default=0)
        # A token that is looked for in normalized text may be written in other characters.
        normalizes = str(tokenizer.normalizer) not in ("None", "Sequence(normalizers=[])")
        self._always = normalizes and any(token.normalized for token in control.values())
        self.tokenizer = Tokenizer(tokenizer.model)
        """Encodes an aliased text; ids of added tokens are its own."""
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
        """The ids of all added tokens, by what stands for them in an aliased text."""
        self._real = {
            self.tokenizer.token_to_id(content): token_id
            for content, token_id in self.added.items()
        }

    def may_occur_in(self, values: Any) -> bool:
        """Whether one may stand in a string of these JSON values, or be made of it."""
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
        """A copy of a JSON value, with a stand-in for each control token."""
        if isinstance(value, str):
            return self._tokens(value)
        if isinstance(value, dict):
            return type(value)((self.hide(key), self.hide(each)) for key, each in value.items())
        if isinstance(value, list):
            return [self.hide(each) for each in value]
        return value

    def restore(self, text: str) -> str:
        """With the control tokens that the stand-ins are for."""
        return self._stand_ins(text)

    def build_guarded(self, rendered: str) -> GuardedText:
        """Of a text that was rendered with hidden values."""
        return GuardedText(self.restore(rendered), self.restore(self._aliases(rendered)), self)

    def encode(self, aliased: str) -> array[int]:
        """Return the token ids of an aliased text, or of a part of one.

        Raises InvalidRequest where the tokenizer's model itself, and not its search for added
        tokens, makes a control token of text.
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
    """An expression for any of the words, of those that begin at one place for the longest.

    It looks at each letter once, and not once for each word: a model may have hundreds of them, and
    a text may begin one at every place.
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
    """Puts its value in place of each word, in one pass over the text."""
    return partial(re.compile(build_alternation(words)).sub, lambda found: words[found[0]])


def _with_alias(alias: str, token: AddedToken) -> AddedToken:
    """The token by another name, which is found whatever a normalizer does: it is no text."""
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
