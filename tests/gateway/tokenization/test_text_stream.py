"""Stop strings, finish reasons and the text that a choice's stream makes of token ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.deltas import TextDelta, TokenDelta
from gateway.generation.engine_request import Generation
from gateway.tokenization.stop_strings import StopStrings
from gateway.tokenization.text_stream import TextStream
from tests.support.generations import generation
from tests.support.small_tokenizers import VOCABULARY, encode


def _generation(**fields: object) -> Generation:
    return generation(**({"prompt_ids": encode("Q:"), "max_tokens": 1000} | fields))


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
    matcher, out, rest = StopStrings(stops), "", text
    stopped: str | None = None
    while rest and stopped is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = matcher.split_at_stop(rest[:size])
        out, rest = out + piece, rest[size:]
    if stopped is None:
        out += matcher.flush()
    want, want_stopped = _expected(text, stops)
    assert (stopped is not None) == want_stopped
    assert stopped is None or (stopped in stops and text.startswith(out + stopped))
    # If the text comes in chunks, a match that ends earlier wins over a longer one that begins
    # earlier.
    assert out == want or stopped is not None


def test_text_that_cannot_be_a_stop_string_goes_out_at_once() -> None:
    matcher = StopStrings(("</end>",))
    assert matcher.split_at_stop("abc") == ("abc", None)
    assert matcher.split_at_stop("x</e") == ("x", None)
    assert matcher.split_at_stop("x") == ("</ex", None)


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
    stream = TextStream(VOCABULARY, _generation(max_tokens=max_tokens, stop_ids=stop_ids))
    for token_id in ids[:-1]:
        assert stream.to_text(TokenDelta([token_id], False)).finish is None
    last = stream.to_text(TokenDelta(ids[-1:], True))
    assert (last.finish, last.tokens) == (finish, len(ids))


def test_a_stop_string_ends_the_stream_and_counts_its_tokens() -> None:
    ids = encode("one two END three")
    stream = TextStream(VOCABULARY, _generation(stop=("END",)))
    out: list[TextDelta] = []
    for token_id in ids:
        out.append(stream.to_text(TokenDelta([token_id], False)))
        if out[-1].finish:
            break
    assert "".join(d.text for d in out) == "one two "
    assert out[-1].finish == "stop"
    assert out[-1].tokens == len(out) < len(ids)


def test_a_stop_string_can_be_included() -> None:
    matcher = StopStrings(("END", "EN"), include=True)
    assert matcher.split_at_stop("the ENDx") == ("the END", "END")


def test_held_back_text_is_sent_when_the_stream_ends() -> None:
    stream = TextStream(VOCABULARY, _generation(stop=("END",)))
    text = "".join(stream.to_text(TokenDelta([i], False)).text for i in encode("the EN"))
    assert text == "the "
    assert stream.to_text(TokenDelta([], True)) == TextDelta(
        "EN", len(encode("the EN")), "stop", ids=[]
    )


@given(
    st.lists(st.integers(97, 100), max_size=12),
    st.integers(1, 6),
    st.sets(st.integers(97, 99)),
    st.sampled_from([(), ("ad",)]),
    st.data(),
)
def test_further_ends_count_behind_the_minimum(
    ids: list[int], least: int, ends: set[int], stop: tuple[str, ...], data: st.DataObject
) -> None:
    """The result is independent of chunk sizes and of text held back for a stop string."""
    tokens = [encode(chr(code))[0] for code in ids]
    of_ends = frozenset(encode(chr(code))[0] for code in ends)
    asked = _generation(
        later_end_ids=of_ends,
        min_tokens=least,
        stop=stop,
    )
    stream, rest, out = TextStream(VOCABULARY, asked), tokens, [TextDelta("", 0, None)]
    while out[-1].finish is None:
        size = data.draw(st.integers(min(1, len(rest)), len(rest)))
        out.append(stream.to_text(TokenDelta(rest[:size], size == len(rest))))
        rest = rest[size:]
    text = "".join(map(chr, ids))
    found = [n + 1 for n, token_id in enumerate(tokens) if n >= least and token_id in of_ends]
    # Only a stop string that begins after the minimum counts.
    at = text.find("ad", least) if stop else -1
    stopped = at >= 0 and (not found or at + 2 <= found[0])
    length = at + 2 if stopped else min(found, default=len(ids))
    assert "".join(delta.text for delta in out) == text[: at if stopped else length]
    assert (out[-1].finish, out[-1].tokens) == ("stop", length)
    assert [token_id for delta in out for token_id in delta.ids] == tokens[:length]
