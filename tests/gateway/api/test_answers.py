"""The SSE writer: openai-python's own decoder reads any text back unchanged."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from gateway.api.openai.answers import OpenAIAnswer
from gateway.api.openai.chunks import Kind, UsageFrames
from gateway.api.sse import OPENAI
from gateway.deltas import TextDelta
from tests.support.answers_read import Written
from tests.support.generations import batch

# Random texts, and texts with line ends, quotes and colons or with lines that look like SSE.
pieces = st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["\n\n", "\r\n", "data: [DONE]", ": x", "event: y\n", '"', "\\", "\u2028", "\x85", "\x00"]
)


def _written(kind: Kind, texts: list[list[str]], usage: UsageFrames, comments: bool) -> bytes:
    body = Written()
    sink = OpenAIAnswer(kind, 'm"\n', batch(choices=len(texts))).stream(body, usage)
    for turn in range(max(map(len, texts), default=0)):
        for index, own in enumerate(texts):
            if turn < len(own):
                sink.accept(index, TextDelta(own[turn], turn + 1))
    for index, own in enumerate(texts):
        sink.accept(index, TextDelta("", len(own), "stop"))
    between = OPENAI.keep_alive if comments else b""
    return between + between.join(body.frames) + OPENAI.done


def _read(kind: Kind, raw: bytes, choices: int) -> tuple[list[str], list[str], Any]:
    texts, finishes, usage = [""] * choices, [""] * choices, None
    roles = 0
    events = list(SSEDecoder().iter_bytes(iter([raw])))
    assert events[-1].data == "[DONE]"
    for event in events[:-1]:
        assert event.event is None
        chunk = json.loads(event.data)
        assert "error" not in chunk
        assert chunk["model"] == 'm"\n'
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            roles += "role" in choice.get("delta", {})
            text = choice["delta"].get("content", "") if kind == "chat" else choice["text"]
            texts[choice["index"]] += text
            finishes[choice["index"]] += choice["finish_reason"] or ""
    assert roles == (choices if kind == "chat" else 0)
    return texts, finishes, usage


@given(
    st.sampled_from(["chat", "completion"]),
    st.lists(st.lists(pieces, max_size=6), min_size=1, max_size=3),
    st.sampled_from(["none", "last", "each"]),
    st.booleans(),
)
def test_any_text_survives_the_stream(
    kind: Kind, texts: list[list[str]], usage: UsageFrames, comments: bool
) -> None:
    raw = _written(kind, texts, usage, comments)
    read, finishes, counted = _read(kind, raw, len(texts))
    assert read == ["".join(own) for own in texts]
    assert finishes == ["stop"] * len(texts)
    assert (counted is None) is (usage == "none")
    if usage != "none":
        assert counted["completion_tokens"] == sum(map(len, texts))


def test_usage_so_far_is_in_each_frame() -> None:
    """Usage counts the tokens of all choices, even if a text looks like the end of an event."""
    text = ',"usage":null}\n\n'
    raw = _written("chat", [["a", text], ["b"]], "each", comments=False)
    chunks = [json.loads(event.data) for event in SSEDecoder().iter_bytes(iter([raw[:-14]]))]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == f"ab{text}"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 2, 3, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {1}
