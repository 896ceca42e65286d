"""`ReasoningSplitter`, which splits text into reasoning and content, for text chunked anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.reasoning import TAGS, THINK, ReasoningSplitter, Tags, guess, is_open
from gateway.parsers.tools.events import Content, Reasoning
from tests.support.cpu import costs_less_than

Events = list[Reasoning | Content]


def _split(text: list[str], **options: object) -> tuple[str, str]:
    """Return (reasoning, content). Assert that all reasoning precedes the content."""
    splitter = ReasoningSplitter(**options)  # type: ignore[arg-type]
    events: Events = [event for piece in text for event in splitter.split(piece)]
    events += splitter.finish()
    assert all(event.text for event in events)
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[Reasoning, Content].index)
    thought = "".join(e.text for e in events if isinstance(e, Reasoning))
    return thought, "".join(e.text for e in events if isinstance(e, Content))


@pytest.mark.parametrize(
    ("text", "starts_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "\nhm\n", "\n\nYes."),
        ("\n <think>hm</think>Yes.", False, "hm", "Yes."),
        ("hm</think>\nYes.", True, "hm", "\nYes."),
        ("\n<think>hm</think>Yes.", True, "hm", "Yes."),
        ("\nhm</think>Yes.", True, "\nhm", "Yes."),
        ("<think></think>Yes.", False, "", "Yes."),
        ("<think>hm", False, "hm", ""),
        ("<think>hm</thi", False, "hm</thi", ""),
        ("hm", True, "hm", ""),
        ("<thi", True, "<thi", ""),
        ("\n<thi", False, "", "\n<thi"),
        ("<thin>x", False, "", "<thin>x"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<think>a<</think>b</think>c", False, "a<", "b</think>c"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_content(text: str, starts_open: bool, reasoning: str, content: str) -> None:
    assert _split([text], starts_open=starts_open) == (reasoning, content)
    assert _split(list(text), starts_open=starts_open) == (reasoning, content)


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "中"]),
        max_size=12,
    ).map("".join),
    st.booleans(),
    st.data(),
)
def test_cut_anywhere(text: str, starts_open: bool, data: st.DataObject) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    reasoning, content = _split(pieces, starts_open=starts_open)
    assert (reasoning, content) == _split([text], starts_open=starts_open)
    opened = text.lstrip().startswith(THINK.opening)
    if opened or starts_open:
        inner = text.lstrip().removeprefix(THINK.opening) if opened else text
        assert (reasoning, content) == (
            inner.partition("</think>")[0],
            inner.partition("</think>")[2],
        )
    else:
        assert (reasoning, content) == ("", text)


def test_everything_goes_out_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter()
    pieces: list[tuple[str, Events]] = [
        ("\n<thi", []),
        ("nk>one ", [Reasoning("one ")]),
        ("two </", [Reasoning("two ")]),
        ("p></think", [Reasoning("</p>")]),
        (">\nYes", [Content("\nYes")]),
        (" <", [Content(" <")]),
    ]
    assert [(text, splitter.split(text)) for text, _ in pieces] == pieces
    assert splitter.finish() == []


def test_whitespace_alone_takes_time_that_is_linear() -> None:
    splitter, blank = ReasoningSplitter(), " " * 80
    # This takes 0.02 s. A scan from the beginning for each chunk took 10 s.
    with costs_less_than(1):
        assert not any(splitter.split(blank) for _ in range(20_000))
    assert splitter.split("x") == [Content(blank * 20_000 + "x")]


@pytest.mark.parametrize("tags", set(TAGS.values()))
def test_tags_can_be_others(tags: Tags) -> None:
    text = f"\n{tags.opening} hm {tags.closing}\nYes."
    assert _split([text], tags=tags) == _split(list(text), tags=tags) == (" hm ", "\nYes.")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{%- if '</think>' in content %}", THINK),
        ("{{- '[THINK]' + block['thinking'] + '[/THINK]' }}", TAGS["mistral"]),
        ("{%- set think_end_token = '</seed:think>' -%}", TAGS["seed_oss"]),
        (
            "thoughts after 'Here is my thought process:' and write your response after"
            " 'Here is my response:' for each user query.",
            TAGS["granite"],
        ),
        ("{{ content.split('◁/think▷')[-1] }}", TAGS["kimi"]),
        # Phi-4-reasoning describes its tags in the system prompt.
        ("the specified format: <think> {Thought section} </think> {Solution section}.", THINK),
        ("{{ message['content'] }}", None),
    ],
)
def test_the_tags_are_guessed_from_the_template(template: str, tags: Tags | None) -> None:
    assert guess(template) == tags


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(prompt: str, expected: bool) -> None:
    assert is_open(prompt, THINK) is expected
