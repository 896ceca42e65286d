"""Stop strings of messages with reasoning: only the content is searched, however it is chunked."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.deltas import TextDelta, TokenDelta
from gateway.generation.engine_request import Generation
from gateway.parsers.harmony import FINAL, TURN
from gateway.parsers.message import MessageForm, MessageReader
from gateway.parsers.reasoning import THINK
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.stop_strings import StopStrings
from gateway.tokenization.text_stream import TextStream
from tests.support.generations import generation
from tests.support.small_tokenizers import BYTES, VOCABULARY, encode
from tests.support.tool_calls import piece_sizes, split_text

ANALYSIS = "<|channel|>analysis<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>"
CHANNELS = MessageForm(tools="openai", channel=TURN)
Parts = tuple[str, str, str]


def _parts(events: list[object]) -> Parts:
    kinds = (Reasoning, Content, CallArguments)
    thoughts, content, arguments = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in kinds
    )
    return thoughts, content, arguments


def _read(asked: Generation, written: str, sizes: list[int], *, as_text: bool) -> list[TextDelta]:
    """Return the deltas of a stream up to its finish."""
    stream = PieceStream(BYTES, asked) if as_text else TextStream(VOCABULARY, asked)
    pieces = list(split_text(written, sizes))
    deltas: list[TextDelta] = []
    for number, piece in enumerate(pieces, 1):
        given = TokenDelta([] if as_text else encode(piece), number == len(pieces))
        if as_text:
            given.text, given.tokens = piece, len(piece)
        deltas.append(stream.to_text(given))
        if deltas[-1].finish is not None:
            return deltas
    return [*deltas, stream.to_text(TokenDelta([], True))]


def _answer(
    form: MessageForm, written: str, stop: str, sizes: list[int], *, include: bool, as_text: bool
) -> tuple[Parts, str | None]:
    asked = generation(
        prompt_ids=encode("Q:"), max_tokens=1000, message=form, stop=(stop,), include_stop=include
    )
    deltas = _read(asked, written, sizes, as_text=as_text)
    return _parts([event for delta in deltas for event in delta.events or ()]), deltas[-1].stop


tagged = st.lists(
    st.sampled_from(["<think>", "</think>", "</th", "<t", "<", "a", "b", "\n", " "]), max_size=12
).map("".join)
stops = st.text("ab<>/thk\n", min_size=1, max_size=4) | st.sampled_from(["</think>", "<think>"])


@given(tagged, stops, piece_sizes, st.booleans(), st.booleans(), st.booleans())
def test_behind_the_tags(
    written: str, stop: str, sizes: list[int], starts_open: bool, include: bool, as_text: bool
) -> None:
    form = MessageForm(reasoning=THINK, reasoning_open=starts_open)
    reader = MessageReader(form)
    thoughts, content, _ = _parts([*reader.read(written), *reader.finish()])
    shown, stopped = StopStrings((stop,), include=include).end(content)
    found = _answer(form, written, stop, sizes, include=include, as_text=as_text)
    assert found == ((thoughts, shown, ""), stopped)


messages = st.lists(
    st.tuples(st.sampled_from([ANALYSIS, FINAL, CALL]), st.text("ab<|{", min_size=1, max_size=6)),
    max_size=5,
)


@given(
    messages,
    st.text("ab<|{", min_size=1, max_size=3) | st.sampled_from(["<|", "final", "<|end|>"]),
    piece_sizes,
    st.booleans(),
    st.booleans(),
)
def test_in_messages_that_are_no_reasoning(
    messages: list[tuple[str, str]], stop: str, sizes: list[int], include: bool, as_text: bool
) -> None:
    written, stopped = "", None
    want: dict[str, list[str]] = {ANALYSIS: [], FINAL: [], CALL: []}
    for header, text in messages:
        written += f"{header}{text}<|end|><|start|>assistant"
        if stopped is None:
            shown = text
            if header != ANALYSIS:
                shown, stopped = StopStrings((stop,), include=include).end(text)
            if header == CALL and stopped is not None:
                # If a stop string cuts a call, the parser drops a trailing `<` or `<|`, which may
                # begin an end marker.
                shown = re.sub(r"<\|?$", "", shown)
            if shown:
                want[header].append(shown)
    expected = "\n".join(want[ANALYSIS]), "\n".join(want[FINAL]), "".join(want[CALL])
    found = _answer(CHANNELS, written, stop, sizes, include=include, as_text=as_text)
    assert found == (expected, stopped)


@pytest.mark.parametrize("written", ["Yes. No.", " to be. No.", "to=x. No.", "to=. No"])
@pytest.mark.parametrize("size", [1, 99])
def test_text_without_channels_is_content(written: str, size: int) -> None:
    found = _answer(CHANNELS, written, ".", [size] * 99, include=False, as_text=False)
    assert found == (("", written.partition(".")[0], ""), ".")


@pytest.mark.parametrize(
    ("form", "opening"),
    [
        (MessageForm(reasoning=THINK), "<think>ab</think>"),
        (CHANNELS, f"{ANALYSIS}ab<|end|>{FINAL}"),
    ],
)
@pytest.mark.parametrize("least", [0, 1, 2, 3])
def test_behind_the_minimum_and_the_reasoning(form: MessageForm, opening: str, least: int) -> None:
    asked = generation(
        prompt_ids=encode("Q:"),
        max_tokens=1000,
        message=form,
        stop=("ab",),
        min_tokens=len(opening) + least,
    )
    for size in range(1, 9):
        deltas = _read(asked, f"{opening}abab", [size] * 99, as_text=False)
        content = _parts([event for delta in deltas for event in delta.events or ()])[1]
        assert content == ("" if not least else "abab" if least == 3 else "ab")


def test_a_call_that_a_stop_string_cuts_is_not_called() -> None:
    asked = generation(max_tokens=1000, message=CHANNELS, stop=("b",))
    deltas = _read(asked, f'{ANALYSIS}b<|end|>{CALL}{{"a": "b"}}', [5] * 99, as_text=False)
    events = [event for delta in deltas for event in delta.events or ()]
    assert _parts(events) == ("b", "", '{"a": "')
    assert any(isinstance(event, CallStart) for event in events)
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", "b")
