"""Token ids decoded to text, with `ByteDecoder` and `StreamDecoder`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gateway.tokenization.vocabulary import ByteDecoder, StreamDecoder, TokenDecoder, Vocabulary
from tests.support.small_tokenizers import BYTES, EOS, HALVES, PIECES, SPACES, VOCABULARY, encode

BOTH = pytest.mark.parametrize("kind", ["bytes", "stream"])


def _decoder(
    kind: str, tokenizer: Tokenizer = BYTES, prompt: list[int] | None = None
) -> TokenDecoder:
    """Return a decoder of the given kind. `bytes` supports only byte-level vocabularies."""
    if kind == "stream":
        return StreamDecoder(tokenizer, prompt or [])
    decoder = Vocabulary(tokenizer).decoder(prompt or [])
    assert isinstance(decoder, ByteDecoder)
    return decoder


@BOTH
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_decoding_token_by_token_gives_the_text_back(kind: str, text: str) -> None:
    decoder = _decoder(kind, prompt=encode("prompt 中"))
    pieces = [decoder.decode([token_id]) for token_id in encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@BOTH
@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40))
def test_wild_ids_never_show_a_replacement_character_or_stall(kind: str, ids: list[int]) -> None:
    decoder = _decoder(kind)
    text = "".join([decoder.decode([token_id]) for token_id in ids])
    assert "\ufffd" not in text
    # After at most four undecodable tokens, text is decoded again.
    assert "".join([decoder.decode([i]) for i in encode("a" * 8)]).endswith("aaaa")


@given(st.lists(st.integers(0, HALVES.get_vocab_size() - 1), max_size=40), st.data())
def test_bytes_decode_exactly_however_the_ids_arrive(ids: list[int], data: st.DataObject) -> None:
    decoder = _decoder("bytes", HALVES)
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text, rest = text + decoder.decode(rest[:size]), rest[size:]
    assert text + decoder.flush() == HALVES.decode(ids).replace("\ufffd", "")


@BOTH
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.booleans())
def test_no_whole_character_is_ever_lost(kind: str, ids: list[int], prompt: bool) -> None:
    decoder = _decoder(kind, HALVES, [HALVES.token_to_id("Q")] if prompt else [])
    text = "".join([decoder.decode([token_id]) for token_id in ids]) + decoder.flush()
    assert text == HALVES.decode(ids).replace("\ufffd", "")


@BOTH
def test_a_token_of_a_character_and_a_half_gives_the_character(kind: str) -> None:
    decoder = _decoder(kind, HALVES)
    assert decoder.decode([HALVES.token_to_id("ãĥ³ã")]) + decoder.flush() == "ン"


@BOTH
def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(kind: str) -> None:
    half = encode("🦉")[:-1]
    decoder = _decoder(kind, prompt=encode("secret") + half)
    assert decoder.decode([encode("x")[0]]) == "x"


@BOTH
def test_special_tokens_are_shown_only_where_they_are_wanted(kind: str) -> None:
    ids = [*encode("a"), EOS, *encode("b")]
    for visible, skip, text in ((), True, "ab"), (("<eos>",), True, "a<eos>b"), ((), False, None):
        decoder = VOCABULARY.decoder([], visible, skip_special=skip)
        if kind == "stream":
            decoder = StreamDecoder(BYTES, [], visible, skip_special=skip)
        assert decoder.decode(ids) + decoder.flush() == (text or "a<eos>b")


def test_an_added_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokenizer = Tokenizer.from_str(HALVES.to_str())
    tokenizer.add_tokens([AddedToken("｜x｜", normalized=False)])
    ids = [tokenizer.token_to_id("｜x｜"), tokenizer.token_to_id("Q")]
    assert _decoder("bytes", tokenizer).decode(ids) == "｜x｜Q" == tokenizer.decode(ids)


def test_an_unknown_id_is_no_text() -> None:
    assert _decoder("bytes").decode([BYTES.get_vocab_size() + 7]) == ""


def test_other_vocabularies_take_the_decoder_of_the_tokenizer() -> None:
    assert isinstance(Vocabulary(SPACES).decoder([2]), StreamDecoder)


def test_the_space_of_the_first_word_is_kept() -> None:
    decoder = _decoder("stream", SPACES, [2])
    assert [decoder.decode([i]) for i in (3, 4, 3)] == [" cat", "s", " cat"]


def test_byte_fallback_characters_arrive_whole() -> None:
    decoder = _decoder("stream", SPACES, [2])
    assert [decoder.decode([i]) for i in (5, 6, 7, 3)] == ["", "", "你", " cat"]


def test_offsets_count_characters() -> None:
    assert VOCABULARY.offsets(encode("a中")) == [0, *[1] * (len(encode("a中")) - 1)]
