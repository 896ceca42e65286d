"""`MessageReader`, which splits the text of a choice into reasoning, content and tool calls."""

from __future__ import annotations

import pytest

from gateway.parsers.message import MessageForm, MessageReader
from gateway.parsers.reasoning import THINK
from gateway.parsers.tools.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from gateway.parsers.tools.forced import ForcedCall

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def _read(form: MessageForm, text: str) -> tuple[MessageReader, list[object]]:
    reader = MessageReader(form)
    return reader, [*reader.read(text), *reader.finish()]


def test_thoughts_then_a_call() -> None:
    reader, events = _read(MessageForm(tools="hermes", reasoning=THINK), f"<think>a</think>{CALL}")
    assert [type(event) for event in events] == [Reasoning, CallStart, CallArguments, CallEnd]
    start = events[1]
    assert isinstance(start, CallStart)
    assert events[-1] == CallEnd(0, "complete", '{"x": 1}', '{"x": 1}')
    assert start.call_id.startswith("call_")
    assert reader.ends_with_call


def test_only_the_first_call_is_kept_where_parallel_ones_are_forbidden() -> None:
    _, both = _read(MessageForm(tools="hermes"), CALL + CALL)
    assert [event.index for event in both if isinstance(event, CallStart)] == [0, 1]
    _, one = _read(MessageForm(tools="hermes", parallel=False), CALL + CALL)
    assert [event.index for event in one if isinstance(event, CallStart)] == [0]
    assert all(event.index == 0 for event in one if isinstance(event, CallArguments))


@pytest.mark.parametrize("following", ["", CALL, "So"])
def test_a_call_ends_once_and_before_what_follows(following: str) -> None:
    """A cut of the text affects only the call at its end. Earlier calls are complete."""
    form = MessageForm(tools="hermes", custom=["f"])
    reader = MessageReader(form)
    events = [*reader.read(CALL.replace('{"x": 1}', '{"x": NaN}') + following)]
    events += reader.finish(cut=True)
    started = [number for number, event in enumerate(events) if isinstance(event, CallStart)]
    ends = [number for number, event in enumerate(events) if isinstance(event, CallEnd)]
    assert len(started) == len(ends)
    assert all(start < end for start, end in zip(started, ends, strict=True))
    assert all(end < start for start, end in zip(started[1:], ends, strict=False))
    assert events[ends[0]] == CallEnd(0, "complete", '{"x": NaN}', '{"x":null}')
    assert isinstance(events[-1], Content if following == "So" else CallEnd)


def test_a_named_call_does_not_end_the_turn() -> None:
    reader, events = _read(
        MessageForm(guided=ForcedCall("f")), '[{"name": "f", "arguments": {"x":1}}]'
    )
    assert any(isinstance(event, CallStart) for event in events)
    assert not reader.ends_with_call


def test_mistrals_ids_have_its_own_form() -> None:
    form = MessageForm(tools="mistral")
    _, events = _read(form, '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    [start] = [event for event in events if isinstance(event, CallStart)]
    assert len(start.call_id) == 9
    assert "[TOOL_CALLS]" in form.markers()


def test_plain_text_stays_content() -> None:
    assert _read(MessageForm(tools="hermes"), "just text")[1] == [Content("just text")]
