"""`AccumulatedText`, which finds the new part of a text that is sent complete each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import EngineError
from gateway.triton.llmapi.accumulated import AccumulatedText

TEXTS = st.text(st.sampled_from("ab \n\ufffd\u00bf\u00e9\u4eac\U0001f600\U0001f3fd"), max_size=200)


def shown(raw: bytes, style: int) -> bytes:
    """Return the bytes as a detokenizer shows them, with an incomplete character at the end.

    By `style` the incomplete bytes appear unchanged, as one U+FFFD, or as one U+FFFD per byte.
    """
    whole = raw.decode(errors="ignore").encode()
    half = len(raw) - len(whole)
    return (
        whole + (raw[len(whole) :], "\ufffd".encode() * bool(half), "\ufffd".encode() * half)[style]
    )


@given(TEXTS, st.lists(st.integers(0, 10_000)), st.integers(0, 2), st.booleans(), st.integers(0, 9))
def test_pieces_are_the_text_whatever_is_known_when(
    text: str, cuts: list[int], style: int, repeated: bool, lead: int
) -> None:
    raw = text.encode()
    reader, pieces = AccumulatedText(), ""
    for cut in sorted(cut % (len(raw) + 1) for cut in cuts):
        for _ in range(1 + repeated):
            text_so_far = shown(raw[:cut], style)
            # The text may be inside a larger buffer.
            data = b"x" * lead + text_so_far + b"behind"
            pieces += reader.take_new(data, lead, lead + len(text_so_far))
            assert text.startswith(pieces)  # returned text never changes
        assert len(pieces) >= len(raw[:cut].decode(errors="ignore").rstrip("\ufffd"))
    pieces += reader.take_new(raw)
    # A U+FFFD that the model wrote at the very end looks like an incomplete character.
    assert text.removeprefix(pieces).strip("\ufffd") == ""


def test_the_end_may_be_mended_until_it_is_given() -> None:
    reader = AccumulatedText()
    texts = ["", "to\ufffd", "to\ufffd\ufffd", "to\u4eac", "to\u4eac!"]
    assert [reader.take_new(text.encode()) for text in texts] == ["", "to", "", "\u4eac", "!"]


def test_of_a_text_of_replacement_characters_the_last_alone_are_held_back() -> None:
    """At most 64 characters are held back.

    Scanning a long run of replacement characters again for each token would block the event loop.
    """
    reader, given = AccumulatedText(), 0
    for size in range(1000):
        given += len(reader.take_new("\ufffd".encode() * size))
        assert given >= size - 64


def test_what_was_given_and_shrinks_is_given_once() -> None:
    reader = AccumulatedText()
    assert [reader.take_new(text) for text in (b"one ", b"one", b"one t")] == ["one ", "", "t"]


@pytest.mark.parametrize("changed", [b"ond two", b"onx", b"onx two and more", b"x"])
def test_nothing_is_given_behind_what_became_another_text(changed: bytes) -> None:
    reader = AccumulatedText()
    reader.take_new(b"one t")
    with pytest.raises(EngineError, match="changed"):
        reader.take_new(changed)
