"""The tokens of one tokenizer as bytes, and incremental decoding of token ids to text.

Two classes implement the protocol `TokenDecoder`:

- `ByteDecoder` for byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, newer Mistral models).
  It reads the text of each token from a table, which takes 0.1 us per token. If a character
  consists of several tokens, Python's UTF-8 decoder joins their bytes, which takes 0.3 us per
  token. The result is exact for any sequence of ids.
- `StreamDecoder` for all other vocabularies. It uses the class `DecodeStream` of the Rust library
  tokenizers, which takes 0.6 us per token, and more for the first token.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.tokenization.token_reach import token_reach

# Number of ids from the prompt's end that a `StreamDecoder` gets before the ids of the response.
# Some tokenizers decode the first id of a sequence differently: Metaspace drops its space. The
# sequence must therefore not begin with the first id of the response.
_PRIME_IDS = 6
# Maximum number of tokens to hold back while a character is incomplete. A character has at most 4
# bytes in UTF-8, and a token has at least one byte. If 4 tokens do not complete the character,
# further tokens do not complete it either.
_MAX_HELD_IDS = 4
_REPLACEMENT = "\ufffd"

Piece = str | bytes
"""The text of a token, or its bytes if they are only a part of a character."""


class TokenDecoder(Protocol):
    """Incremental decoder of token ids.

    It returns only complete characters, and drops bytes that are not valid UTF-8.
    """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids. Hold back an incomplete character at the end."""

    def flush(self) -> str:
        """Return the complete characters of the held-back tokens. Call this after the last id."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of GPT-2's alphabet.

    The alphabet has one printable character for each byte. The mapping is the inverse of
    `bytes_to_unicode` in GPT-2's encoder.py.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {chr(byte): byte for byte in plain}
    return stand_ins | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte for each printable character of a byte-level vocabulary."""


class Vocabulary:
    """Text and bytes of each token of a tokenizer, and decoders of token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        definition = json.loads(tokenizer.to_str())
        self.reach = token_reach(tokenizer, definition)
        """Maximum number of characters per token; None if there is no maximum."""
        self.form = _without_tokens(definition)
        """The tokenizer's JSON without the vocabulary and the merges of its model."""
        self._byte_level = _is_byte_level(definition)
        special = {t["id"] for t in definition["added_tokens"] if t["special"]}
        # Fill the tables as tokens occur, because most tokens of a large vocabulary never occur.
        self._shown: dict[int, Piece] = _Table(self)
        self._skipped: dict[int, Piece] = _Table(self)
        self._skipped.update(dict.fromkeys(special, ""))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token. For a special token, return the bytes of its text."""
        token = self.tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            # Byte-level vocabularies write each byte as one printable character.
            known = [BYTE_OF.get(char) for char in token]
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def decoder(
        self, prompt_ids: Sequence[int], visible: Iterable[str] = (), *, skip_special: bool = True
    ) -> TokenDecoder:
        """Return a decoder for the ids after `prompt_ids`.

        If `skip_special` is True, special tokens are decoded to "", except the tokens in `visible`.
        """
        if not self._byte_level:
            return StreamDecoder(self.tokenizer, prompt_ids, visible, skip_special=skip_special)
        table = self._skipped if skip_special else self._shown
        if visible:
            ids = {self.tokenizer.token_to_id(token): token for token in visible}
            table = _Table(self, table)
            table.update({i: text for i, text in ids.items() if i is not None})
        return ByteDecoder(table)

    def offsets(self, ids: Iterable[int]) -> list[int]:
        """Return the index at which the text of each token begins, in characters.

        Tokens that are parts of one character have the same index.
        """
        decoder = self.decoder([], skip_special=False)
        offsets, length = [], 0
        for token_id in ids:
            offsets.append(length)
            length += len(decoder.decode((token_id,)))
        return offsets


class _Table(dict[int, Piece]):
    """Text or bytes of tokens by id. Each entry is added at its first use.

    A new entry is copied from the table `under`. Without such a table, the entry is computed from
    the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, under: dict[int, Piece] | None = None) -> None:
        self._vocabulary = vocabulary
        self._under = under

    def __missing__(self, token_id: int) -> Piece:
        piece: Piece
        if self._under is not None:
            piece = self._under[token_id]
        else:
            piece = self._vocabulary.token_bytes(token_id)
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        self[token_id] = piece
        return piece


class ByteDecoder:
    """Decoder for byte-level vocabularies: the text is the joined bytes of the tokens."""

    def __init__(self, table: dict[int, Piece]) -> None:
        self._table = table
        # Bytes of an incomplete character. Python's `codecs.IncrementalDecoder` could store them,
        # but takes four times as long.
        self._held = b""

    def decode(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1:
            piece = table[ids[0]]
            if not self._held and isinstance(piece, str):
                return piece
            return self._decode_bytes(_raw(piece))
        pieces = [table[token_id] for token_id in ids]
        if not self._held:
            # Try to join the pieces as strings. Checking the type of each piece takes longer.
            try:
                return "".join(cast("list[str]", pieces))
            except TypeError:
                pass
        return self._decode_bytes(b"".join([_raw(piece) for piece in pieces]))

    def flush(self) -> str:
        return self._decode_bytes(b"", final=True)

    def _decode_bytes(self, raw: bytes, *, final: bool = False) -> str:
        raw = self._held + raw
        text, used = codecs.utf_8_decode(raw, "ignore", final)
        self._held = raw[used:]
        return text


def _raw(piece: Piece) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


class StreamDecoder:
    """Decoder for vocabularies that are not byte-level.

    In these vocabularies, the text of a token may depend on the tokens before and after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        visible: Iterable[str] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        """Prepare to decode the ids after `prompt_ids`.

        If `skip_special` is True, special tokens are decoded to "", except the tokens in `visible`.
        """
        self._skip_special = skip_special
        self._tokenizer = tokenizer
        ids = {tokenizer.token_to_id(token): token for token in visible}
        self._visible = {i: token for i, token in ids.items() if i is not None}
        context = list(prompt_ids[-_PRIME_IDS:])
        # Decode without the prompt's last ids if the prompt ends within a character. Otherwise, the
        # first text of the stream would repeat the end of the prompt.
        if tokenizer.decode(context).endswith(_REPLACEMENT):
            context = []
        self._context = context
        self._restart()
        self._held: list[int] = []

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            return self._push(ids[0])
        return "".join([self._push(token_id) for token_id in ids])

    def flush(self) -> str:
        held, self._held = self._held, []
        if not held:
            return ""
        self._restart()
        return self._decode_complete(held)

    def _push(self, token_id: int) -> str:
        if token_id in self._visible:
            return self.flush() + self._visible[token_id]
        text = self._step(token_id)
        if text is not None:
            self._held = []
            return text.replace(_REPLACEMENT, "") if _REPLACEMENT in text else text
        self._held.append(token_id)
        if len(self._held) <= _MAX_HELD_IDS:
            return ""
        [given_up, *retry], self._held = self._held, []
        self._restart()
        return self._decode_complete([given_up]) + "".join([self._push(held) for held in retry])

    def _decode_complete(self, ids: list[int]) -> str:
        """Return the text of these ids, without characters of which some bytes are missing."""
        skip = self._skip_special
        before = self._tokenizer.decode(self._context, skip_special_tokens=skip)
        text = self._tokenizer.decode(self._context + ids, skip_special_tokens=skip)[len(before) :]
        return text.replace(_REPLACEMENT, "")

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # restart: the Rust binding raises bare Exception and breaks the stream
            self._restart()
            return self._stream.step(self._tokenizer, token_id)

    def _restart(self) -> None:
        self._stream = DecodeStream(self._context, skip_special_tokens=self._skip_special)


def _without_tokens(definition: dict[str, Any]) -> dict[str, Any]:
    model = {k: v for k, v in definition["model"].items() if k not in ("vocab", "merges")}
    return definition | {"model": model}


def _is_byte_level(definition: dict[str, Any]) -> bool:
    """Return True if a text is decoded by joining the bytes of its tokens."""
    decoder = definition.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return [step.get("type") for step in steps] == ["ByteLevel"]
