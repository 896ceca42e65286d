"""The cache of encoded conversation turns: the same ids as encoding the complete text."""

from __future__ import annotations

import random
from array import array

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.tokenization import turn_record
from gateway.tokenization.turn_cache import TurnCache
from tests.support.small_tokenizers import BYTES

END, EXTRA = "<end>", "<extra>"
COMPOSING = "\u0338"  # composes with a preceding `>` to one character
# Texts that tokenizers encode differently at the beginning or end of a text or beside a token
PARTS = [
    END,
    EXTRA,
    "the cat",
    " sat",
    "  ",
    "\n",
    "s",
    "中文",
    "é",
    "<en",
    "d>",
    "<",
    "▁",
    COMPOSING,
    "",
]


def _byte_level(
    *added: AddedToken,
    prefix_space: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def _spaces(scheme: str) -> Tokenizer:
    """Return a tokenizer like Llama 2's.

    `scheme` says where a space is added: before the text, or before each word.
    """
    letters = "▁thecasmdn<>中文é\n"
    vocab = {token: i for i, token in enumerate(["<unk>", *letters, "▁t", "▁s"])}
    merges = [("▁", "t"), ("▁", "s")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    tokenizer.add_special_tokens([_token(END), _token(EXTRA)])
    return tokenizer


def _token(content: str, **kind: bool) -> AddedToken:
    return AddedToken(content, special=True, **{"normalized": False, **kind})


TOKENIZERS = {
    "plain": _byte_level(_token(END), _token(EXTRA)),
    "prefix space": _byte_level(_token(END), _token(EXTRA), prefix_space=True),
    "strips": _byte_level(_token(END, rstrip=True), _token(EXTRA, lstrip=True, rstrip=True)),
    "strips before": _byte_level(_token(END, lstrip=True), _token(EXTRA, rstrip=True)),
    "overlaps before": _byte_level(_token(END), _token("cat<en"), prefix_space=True),
    "overlaps behind": _byte_level(_token(END), _token("d>s")),
    "longer": _byte_level(_token(END), _token(END + "\n")),
    "whole words": _byte_level(_token(END, single_word=True), _token(EXTRA)),
    "composes": _byte_level(_token(END), _token(EXTRA), normalizer=normalizers.NFC()),
    "composes first": _byte_level(_token(END, normalized=True), normalizer=normalizers.NFC()),
    "first": _spaces("first"),
    "always": _spaces("always"),
    "never": _spaces("never"),
    "normalizer": _spaces("normalizer"),
}


def _id(tokenizer: Tokenizer, token: str) -> int:
    """Return the token's id, or -1, which is never an id, if the tokenizer lacks the token."""
    found = tokenizer.token_to_id(token)
    return -1 if found is None else found


class Asked:
    """An encoder that records the texts it is called with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def whole(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def __call__(self, texts: list[str]) -> list[array[int]]:
        self.texts += texts
        return [self.whole(text) for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_as_the_whole_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END), _id(tokenizer, EXTRA)], budget_bytes=4096)
    chance = random.Random(name)
    for _ in range(3000):
        text = "".join(chance.choices(PARTS, k=chance.randrange(12)))
        assert await cache.encode(text, asked) == asked.whole(text), repr(text)


@pytest.mark.parametrize("change", ["truncation", "padding", "specials as text"])
async def test_a_tokenizer_that_does_more_is_left_to_it(change: str) -> None:
    tokenizer = _byte_level(_token(END))
    if change == "truncation":
        tokenizer.enable_truncation(4)
    elif change == "padding":
        tokenizer.enable_padding(direction="left", length=40)
    else:
        tokenizer.encode_special_tokens = True
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    text = f"a{END}b{END}c{END}"
    assert await cache.encode(text, asked) == asked.whole(text)


async def test_only_what_is_new_is_encoded() -> None:
    tokenizer = TOKENIZERS["plain"]
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    turns = ["system: be kind" + END, "user: hello" + END, "assistant: hello" + END]
    await cache.encode("".join(turns), asked)
    asked.texts.clear()
    await cache.encode("".join([*turns, "user: and now?", END]), asked)
    assert asked.texts == [END + "user: and now?" + END]


async def test_room_is_for_those_used_last() -> None:
    tokenizer = TOKENIZERS["plain"]
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END)], budget_bytes=1000)
    often, once = "a" * 30 + END, "{}" + "b" * 30 + END
    for n in range(5):
        await cache.encode(often, asked)
        await cache.encode(once.format(n), asked)
    assert asked.texts.count(often) == 1
    await cache.encode(once.format(0), asked)
    assert asked.texts.count(once.format(0)) == 2


async def test_a_text_of_ends_alone_is_one_piece() -> None:
    tokenizer = TOKENIZERS["plain"]
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    text = END * 5000
    assert await cache.encode(text, asked) == asked.whole(text)
    assert asked.texts == [text]


def _known(cache: TurnCache, text: str, fingerprint: bytes) -> dict[bytes, bytes]:
    return turn_record.unpack(turn_record.pack(cache.cached_turns(text), fingerprint, {}))


def _learned(cache: TurnCache, text: str, fingerprint: bytes, known: dict[bytes, bytes]) -> None:
    found = [
        (turn, turn_record.ids_of(turn, fingerprint, known)) for turn in cache.split_turns(text)
    ]
    cache.learn([(turn, ids) for turn, ids in found if ids is not None])


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_what_one_process_kept_is_not_encoded_by_another(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ends = [_id(tokenizer, END), _id(tokenizer, EXTRA)]
    chance = random.Random(name)
    for _ in range(500):
        before = "".join(chance.choices(PARTS, k=chance.randrange(12))) + END
        after = before + "".join(chance.choices(PARTS, k=4))
        first, second = Asked(tokenizer), Asked(tokenizer)
        one, other = TurnCache(tokenizer, ends), TurnCache(tokenizer, ends)
        await one.encode(before, first)
        known = _known(one, before, b"this")
        _learned(other, after, b"this", known)
        assert await other.encode(after, second) == second.whole(after), repr(after)
        kept = {turn for turn, _ in one.cached_turns(before)}
        assert kept.isdisjoint(second.texts)


async def test_turns_of_another_tokenizer_are_not_known() -> None:
    tokenizer = TOKENIZERS["plain"]
    asked = Asked(tokenizer)
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    text = "be kind" + END + "hello" + END
    await cache.encode(text, asked)
    known = _known(cache, text, b"this")
    other = TurnCache(tokenizer, [_id(tokenizer, END)])
    _learned(other, text, b"that", known)
    assert not list(other.cached_turns(text))


async def test_only_new_turns_are_packed() -> None:
    tokenizer = TOKENIZERS["plain"]
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    before, after = "be kind" + END + "hello" + END, "and you?" + END
    await cache.encode(before, Asked(tokenizer))
    known = _known(cache, before, b"")
    await cache.encode(before + after, Asked(tokenizer))
    new = turn_record.unpack(turn_record.pack(cache.cached_turns(before + after), b"", known))
    assert len(new) == 1
    assert new.keys().isdisjoint(known)


@pytest.mark.parametrize("cut", [1, 4, 19, 21])
async def test_turns_that_were_cut_are_refused(cut: int) -> None:
    tokenizer = TOKENIZERS["plain"]
    cache = TurnCache(tokenizer, [_id(tokenizer, END)])
    text = "be kind" + END + "hello"
    await cache.encode(text, Asked(tokenizer))
    packed = turn_record.pack(cache.cached_turns(text), b"", {})
    with pytest.raises(ValueError, match="end within one"):
        turn_record.unpack(packed[:-cut])
