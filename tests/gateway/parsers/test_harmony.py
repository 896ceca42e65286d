"""The Harmony parser with text split anywhere: reasoning, calls and content, without markers."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.harmony import FINAL, MARKERS, TURN, HarmonyParser, read_open_header
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning
from tests.support.tool_calls import piece_sizes, split_text

ANALYSIS = "<|channel|>analysis<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
Parts = list[tuple[str, str]]


def _read(pieces: Iterable[str], prompt: str = TURN, *, calls: bool = True) -> Parts:
    """Return (kind, text) pairs. Neighbours of one kind are joined; arguments follow their call."""
    parser = HarmonyParser(read_open_header(prompt), calls=calls)
    events = [event for piece in pieces for event in parser.parse(piece)] + parser.finish()
    parts: Parts = []
    for event in events:
        if isinstance(event, CallStart):
            parts.append(("call", event.name))
            assert event.index == sum(kind == "call" for kind, _ in parts) - 1
            continue
        kind = {Content: "content", Reasoning: "reasoning"}.get(type(event), "arguments")
        assert event.text
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + event.text)
        else:
            parts.append((kind, event.text))
    assert parser.calls == sum(kind == "call" for kind, _ in parts)
    return parts


GOLDEN: dict[str, Parts] = {
    # Examples of openai/harmony's format description
    f"{ANALYSIS}Simple.<|end|><|start|>assistant{FINAL}2 + 2 = 4.<|return|>": [
        ("reasoning", "Simple."),
        ("content", "2 + 2 = 4."),
    ],
    f'{ANALYSIS}Weather.<|end|><|start|>assistant{CALL}{{"city":"Paris"}}<|call|>': [
        ("reasoning", "Weather."),
        ("call", "f"),
        ("arguments", '{"city":"Paris"}'),
    ],
    f"<|channel|>commentary<|message|>I plan.<|end|><|start|>assistant{CALL}{{}}<|call|>": [
        ("content", "I plan."),
        ("call", "f"),
        ("arguments", "{}"),
    ],
    # The recipient beside the role, where the chat template writes it
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>': [
        ("call", "f"),
        ("arguments", '{"a": 1}'),
    ],
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>": [
        ("call", "f"),
        ("arguments", "{}"),
    ],
    # Calls without arguments, several calls, and a built-in tool that gpt-oss was trained with
    f"{CALL}<|end|><|start|>assistant to=functions.g<|channel|>commentary<|message|><|call|>": [
        ("call", "f"),
        ("arguments", "{}"),
        ("call", "g"),
        ("arguments", "{}"),
    ],
    "<|channel|>analysis to=python code<|message|>1+1<|call|>": [
        ("call", "python"),
        ("arguments", "1+1"),
    ],
    # Several messages of one kind
    f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}<|end|><|start|>assistant{ANALYSIS}b": [
        ("reasoning", "a\nb"),
    ],
    f"<|channel|>commentary<|message|>a<|end|>\n<|start|>assistant{FINAL}b": [("content", "a\nb")],
    # Text cut in a message, in an unfinished marker (which then is text), in a header, and in a
    # call
    f"{ANALYSIS}a b": [("reasoning", "a b")],
    f"{FINAL}a <|en": [("content", "a <|en")],
    "<|channel|>anal": [],
    f"{ANALYSIS}a<|end|><|start|>assist": [("reasoning", "a")],
    "<|channel|>commentary to=functions.get_wea": [],
    "<|channel|>commentary t": [],
    f'{CALL}{{"a": [': [("call", "f"), ("arguments", '{"a": [')],
    CALL: [],
    # Malformed text: no channels, unknown channels, no header, missing or repeated markers
    "Yes.": [("content", "Yes.")],
    "to be": [("content", "to be")],
    "to=x": [("content", "to=x")],
    "<|channel|>musing<|message|>a": [("content", "a")],
    "<|message|>a": [("content", "a")],
    "a<|channel|>final<|message|>b": [("content", "a\nb")],
    f"{ANALYSIS}a{FINAL}b": [("reasoning", "a"), ("content", "b")],
    f"{FINAL}a<|message|>b<|constrain|>c": [("content", "abc")],
    "<|channel|>final It is 4.<|end|>": [("content", "It is 4.")],
    "<|channel|>final It is 4.": [("content", "It is 4.")],
    '<|channel|>commentary to=functions.f {"a": 1}<|call|>': [
        ("call", "f"),
        ("arguments", '{"a": 1}'),
    ],
    "<|channel|>analysis " + "ab " * 200: [("reasoning", "ab " * 200)],
    f"{FINAL}a<|end|>b<|end|>": [("content", "a\nb")],
    "": [],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_channels(text: str) -> None:
    assert _read([text]) == GOLDEN[text]
    assert _read(text) == GOLDEN[text]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|start|>user<|message|>2+2<|end|><|start|>assistant", f"{FINAL}4", [("content", "4")]),
        (f"<|start|>assistant{ANALYSIS}", f"a<|end|>{TURN}{FINAL}4", GOLDEN_OPEN := [
            ("reasoning", "a"),
            ("content", "4"),
        ]),
        (f"{TURN}<|channel|>analysis", f"<|message|>a<|end|>{TURN}{FINAL}4", GOLDEN_OPEN),
        # A continued answer, and a prompt that does not open the assistant's message
        (f"{TURN}{FINAL}It is", " 4", [("content", " 4")]),
        (f"{TURN}{FINAL}It is 4<|return|>", f"{TURN}{FINAL}5", [("content", "5")]),
        ("no form at all", "4", [("content", "4")]),
    ],
)  # fmt: skip
def test_the_output_goes_on_where_the_prompt_ends(prompt: str, text: str, expected: Parts) -> None:
    assert _read([text], prompt) == expected
    assert _read(text, prompt) == expected


def test_without_tools_there_are_no_calls() -> None:
    assert _read([CALL + "{}<|call|>"], calls=False) == [("content", "{}")]
    assert _read(["<|channel|>analysis to=python<|message|>1+1"], calls=False) == [
        ("reasoning", "1+1")
    ]


def test_everything_goes_out_as_soon_as_it_is_certain() -> None:
    parser = HarmonyParser()
    for text, expected in [
        ("<|channel|>analysis<|mess", []),
        ("age|>a <", [Reasoning("a ")]),
        ("b", [Reasoning("<b")]),
        ("<|end|><|start|>assistant<|channel|>commentary to=functions.f", []),
        ("<|message|>", []),
        ("{", [CallStart(0, "f"), CallArguments(0, "{")]),
    ]:
        assert parser.parse(text) == expected


WORDS = (*MARKERS, "assistant", " to=", "functions.f", "analysis", "final", "commentary", " ", "\n",
         "json", "{}", "<", "<|", "|>", "to", "a", "x " * 130, "中")  # fmt: skip
wild_text = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
PROMPTS = (TURN, TURN + FINAL, f"{TURN}<|channel|>analysis")


@given(text=wild_text, prompt=st.sampled_from(PROMPTS), calls=st.booleans(), sizes=piece_sizes)
def test_the_result_does_not_depend_on_the_cuts(
    text: str, prompt: str, calls: bool, sizes: list[int]
) -> None:
    whole = _read([text], prompt, calls=calls)
    assert _read(split_text(text, sizes), prompt, calls=calls) == whole
    assert not any(marker in part for _, part in whole for marker in MARKERS)
    if not any(marker in text for marker in MARKERS) and prompt != PROMPTS[2]:
        assert "".join(part for _, part in whole) in (text, "" if text.isspace() else text)


@given(
    thought=st.text(max_size=20), plan=st.text(max_size=20), answer=st.text(min_size=1, max_size=20)
)
def test_no_word_is_lost(thought: str, plan: str, answer: str) -> None:
    texts = (thought, plan, answer)
    if any("<|" in text for text in texts):
        return
    parts = _read(
        f"{ANALYSIS}{thought}<|end|>{TURN}<|channel|>commentary<|message|>{plan}<|end|>"
        f"{TURN}{FINAL}{answer}<|return|>"
    )
    content = f"{plan}\n{answer}" if plan else answer
    assert parts == ([("reasoning", thought)] if thought else []) + [("content", content)]


@pytest.mark.parametrize(
    "unit", ["a ", "<", "<|", "\n", "<|channel|>", "<|start|>", "to=", "<|message|>a<|end|>"]
)
def test_time_is_linear(unit: str) -> None:
    """Parsing text in chunks of four characters takes linear time."""

    def cpu_s(characters: int) -> float:
        text = unit * (characters // len(unit))
        best = float("inf")
        for _ in range(3):
            parser = HarmonyParser()
            began = time.process_time()
            for at in range(0, len(text), 4):
                parser.parse(text[at : at + 4])
            parser.finish()
            best = min(best, time.process_time() - began)
        return best

    # Four times the text takes about four times as long. Quadratic time would be 16 times.
    assert cpu_s(160_000) < 8 * cpu_s(40_000)
