"""Length limits for text: a text that is refused unencoded would really have too many tokens."""

from __future__ import annotations

import json
import random
import sys
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from gateway.tokenization.token_reach import TokenReach, token_reach
from ops.commands.up import DEMO_MODEL
from tests.support.small_tokenizers import BYTES

# Texts that different tokenizers encode in few tokens
PARTS = [
    "<end>",
    "\u212b",  # composes to a character with fewer bytes
    "\u1f00\u0300\u0345",
    "\u03b1\u0313\u0300\u0345",  # four code points that compose to one
    "\u1100\u1161\u11a8",
    "\ufb03",
    "e\u0301",
    "the cat sat on the mat",
    " ",
    "\n",
    "\u00a0",
    "\x1c",
    "中文",
    "日本語",
    "🧑‍🧑‍🧒",
    "a",
    "\0",
]


def _bytes(normalizer: normalizers.Normalizer | None = None, **token: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False, **token)])
    return tokenizer


def _fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thecasmdn", "▁t", "▁th"]
    vocab = {token: n for n, token in enumerate(letters)}
    merges = [("▁", "t"), ("▁t", "h")]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def _one_unknown(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Return a tokenizer whose every token is one character long."""
    tokenizer = Tokenizer(models.BPE({"?": 0, "a": 1}, [], unk_token="?"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


BOUNDED = {
    "demo": Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
    "bytes": _bytes(),
    "composing": _bytes(normalizers.NFC()),
    "composing compatibly": _bytes(normalizers.NFKC()),
    "decomposing": _bytes(normalizers.NFD()),
    "takes blanks": _bytes(rstrip=True, lstrip=True),
    "byte fallback": _fallback(),
    "one unknown": _one_unknown(),
    "one unknown, composing": _one_unknown(normalizers.NFC()),
}


def _reach(tokenizer: Tokenizer) -> TokenReach | None:
    return token_reach(tokenizer, json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_is_fewer_tokens_than_said(name: str) -> None:
    tokenizer = BOUNDED[name]
    reach = _reach(tokenizer)
    assert reach is not None
    chance = random.Random(name)
    for _ in range(2000):
        few = chance.choices(PARTS, k=chance.randrange(1, 4))
        text = "".join(chance.choices(few, k=chance.randrange(1, 40)))
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert not reach.exceeds(text, tokens), repr(text)


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_far_too_long_is_refused(name: str) -> None:
    reach = _reach(BOUNDED[name])
    assert reach is not None
    assert reach.exceeds("x" * (10 * reach.chars + 1), 10)
    assert not reach.exceeds("x" * (10 * reach.chars), 10)


def test_composition_takes_four_characters_at_most() -> None:
    every = map(chr, range(sys.maxunicode + 1))
    assert max(len(unicodedata.normalize("NFD", char)) for char in every) == 4


def _unbounded() -> dict[str, Tokenizer]:
    """Return tokenizers that encode some texts of any length in few tokens."""
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    pieces = Tokenizer(models.WordPiece({"<unk>": 0}, unk_token="<unk>"))
    fused = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    dropped = Tokenizer(models.BPE({"a": 1}, []))
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    stripped = _bytes(normalizers.Strip())
    squeezed = _bytes(normalizers.Replace(Regex("x+"), "x"))
    deleted = _bytes(normalizers.Replace("x", ""))
    removed = _bytes()
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]
    )
    truncated = _bytes()
    truncated.enable_truncation(4)
    return {
        "words": words,
        "pieces": pieces,
        "fused": fused,
        "dropped": dropped,
        "unigram": unigram,
        "stripped": stripped,
        "squeezed": squeezed,
        "deleted": deleted,
        "removed": removed,
        "truncated": truncated,
    }


@pytest.mark.parametrize("name", _unbounded())
def test_no_bound_where_there_is_none(name: str) -> None:
    assert _reach(_unbounded()[name]) is None
