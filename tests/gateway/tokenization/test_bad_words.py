"""The token ids of bad words, which match a word at the beginning of a text and inside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from gateway.tokenization.bad_words import bad_word_ids, with_and_without_space
from tests.support.small_tokenizers import BYTES


def _sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's, which puts a space before a text and each word."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz,.", "th", "the", "▁the"]
    vocab = {
        piece: at for at, piece in enumerate([*letters, *(f"<0x{n:02X}>" for n in range(256))])
    }
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


TOKENIZERS = {"byte level": BYTES, "sentencepiece": _sentencepiece()}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _holds(ids: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(word)]) == word for at in range(len(ids)))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["the", "on the mat", "on\nthe mat", "on\n the mat", "(the)"])
@pytest.mark.parametrize("word", ["the", " the"])
def test_a_word_is_found_wherever_it_stands(kind: str, text: str, word: str) -> None:
    tokenizer = TOKENIZERS[kind]
    words = bad_word_ids(tokenizer, (word,))
    assert any(_holds(_ids(tokenizer, text), ids) for ids in words)
    assert not any(_holds(_ids(tokenizer, "on a mat"), ids) for ids in words)


def test_both_ways_of_each_word_once() -> None:
    assert with_and_without_space(("a", " a", "b c")) == ("a", " a", "b c", " b c")
    assert with_and_without_space((" ",)) == (" ", "  ")


@given(st.text(min_size=1))
def test_any_word_has_ids_that_are_its_text(word: str) -> None:
    words = bad_word_ids(BYTES, (word,))
    texts = {BYTES.decode(list(ids), skip_special_tokens=False) for ids in words}
    assert texts == set(with_and_without_space((word,)))
