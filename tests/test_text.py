"""Detokenizer, stop strings and finish reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.generation import Generation, Sampling, TextDelta, TokenDelta
from gateway.text import Detokenizer, StopStrings, TextStream


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "中文 中文", "日本語"], trainer)
    return tokenizer


def _halves() -> Tokenizer:
    """Every byte, and one token that holds a whole character and the first byte of another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ãĥ", "ãĥ³", "ãĥ³ã"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁cat": 3, "s": 4, "<0xE4>": 5, "<0xBD>": 6}
    vocab["<0xA0>"] = 7
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTES = _byte_level()
HALVES = _halves()
PIECES = [HALVES.token_to_id(t) for t in ("ãĥ³ã", "ãĥ³", "ãĥ", "ã", "ĥ", "³", "ð", "Ł", "Q")]
SPACES = _metaspace()
EOS = BYTES.token_to_id("<eos>")


def _encode(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False).ids)


def _generation(**fields: object) -> Generation:
    defaults: dict[str, object] = {
        "request_id": "r",
        "prompt_ids": _encode("Q:"),
        "max_tokens": 1000,
        "sampling": Sampling(seed=1),
    }
    return Generation(**(defaults | fields))  # type: ignore[arg-type]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_detokenizing_token_by_token_gives_the_text_back(text: str) -> None:
    detokenizer = Detokenizer(BYTES, _encode("prompt 中"))
    pieces = [detokenizer.push(token_id) for token_id in _encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40))
def test_wild_ids_never_show_a_replacement_character_or_stall(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, [])
    text = "".join([detokenizer.push(token_id) for token_id in ids])
    assert "\ufffd" not in text
    # After at most four undecodable tokens, text flows again.
    assert "".join([detokenizer.push(i) for i in _encode("a" * 8)]).endswith("aaaa")


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.booleans())
def test_no_whole_character_is_ever_lost(ids: list[int], prompt: bool) -> None:
    detokenizer = Detokenizer(HALVES, [HALVES.token_to_id("Q")] if prompt else [])
    text = "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()
    assert text == HALVES.decode(ids).replace("\ufffd", "")


def test_a_token_of_a_character_and_a_half_gives_the_character() -> None:
    detokenizer = Detokenizer(HALVES, [])
    assert detokenizer.push(HALVES.token_to_id("ãĥ³ã")) == ""
    assert detokenizer.flush() == "ン"


def test_a_prompt_that_ends_in_half_a_character_is_not_repeated() -> None:
    half = _encode("🦉")[:-1]
    detokenizer = Detokenizer(BYTES, _encode("secret") + half)
    assert detokenizer.push(_encode("x")[0]) == "x"


def test_the_space_of_the_first_word_is_kept() -> None:
    detokenizer = Detokenizer(SPACES, [2])
    assert [detokenizer.push(i) for i in (3, 4, 3)] == [" cat", "s", " cat"]


def test_byte_fallback_characters_arrive_whole() -> None:
    detokenizer = Detokenizer(SPACES, [2])
    assert [detokenizer.push(i) for i in (5, 6, 7, 3)] == ["", "", "你", " cat"]


def _expected(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    found = [i for s in stops if (i := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


@given(
    st.text(alphabet="ab<中", max_size=30),
    st.lists(st.text(alphabet="ab<中", min_size=1, max_size=5), max_size=3).map(tuple),
    st.data(),
)
def test_stop_strings_cut_at_any_place(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    matcher, out, stopped, rest = StopStrings(stops), "", False, text
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = matcher.push(rest[:size])
        out, rest = out + piece, rest[size:]
    if not stopped:
        out += matcher.flush()
    want, want_stopped = _expected(text, stops)
    assert stopped == want_stopped
    # Fed in pieces, a match that ends earlier is seen before a longer one that begins earlier.
    assert out == want or (stopped and any(text.startswith(out + stop) for stop in stops))


def test_text_that_cannot_be_a_stop_string_goes_out_at_once() -> None:
    matcher = StopStrings(("</end>",))
    assert matcher.push("abc") == ("abc", False)
    assert matcher.push("x</e") == ("x", False)
    assert matcher.push("x") == ("</ex", False)


@pytest.mark.parametrize(
    ("ids", "max_tokens", "stop_ids", "finish"),
    [
        ([1, 2, 3], 3, (), "length"),
        ([1, 2], 3, (), "stop"),
        ([1, 2, 3], 3, ((2, 3),), "stop"),
        ([1, 2, 3], 3, ((3, 2),), "length"),
        ([], 3, (), "stop"),
    ],
)
def test_finish_reason(
    ids: list[int], max_tokens: int, stop_ids: tuple[tuple[int, ...], ...], finish: str
) -> None:
    stream = TextStream(BYTES, _generation(max_tokens=max_tokens, stop_ids=stop_ids))
    for token_id in ids[:-1]:
        assert stream.push(TokenDelta([token_id], False)).finish is None
    last = stream.push(TokenDelta(ids[-1:], True))
    assert (last.finish, last.tokens) == (finish, len(ids))


def test_a_stop_string_ends_the_stream_and_counts_its_tokens() -> None:
    ids = _encode("one two END three")
    stream = TextStream(BYTES, _generation(stop=("END",)))
    out: list[TextDelta] = []
    for token_id in ids:
        out.append(stream.push(TokenDelta([token_id], False)))
        if out[-1].finish:
            break
    assert "".join(d.text for d in out) == "one two "
    assert out[-1].finish == "stop"
    assert out[-1].tokens == len(out) < len(ids)


def test_a_stop_string_can_be_included() -> None:
    matcher = StopStrings(("END", "EN"), include=True)
    assert matcher.push("the ENDx") == ("the END", True)


def test_held_back_text_is_sent_when_the_stream_ends() -> None:
    stream = TextStream(BYTES, _generation(stop=("END",)))
    text = "".join(stream.push(TokenDelta([i], False)).text for i in _encode("the EN"))
    assert text == "the "
    assert stream.push(TokenDelta([], True)) == TextDelta("EN", len(_encode("the EN")), "stop")
