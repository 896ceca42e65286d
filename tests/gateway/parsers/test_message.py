"""Reasoning, content and calls of one choice, put together."""

from __future__ import annotations

from gateway.parsers.message import MessageForm, MessageReader
from gateway.parsers.reasoning import THINK
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning
from gateway.parsers.tools.forced import ForcedCall

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def _read(form: MessageForm, text: str) -> tuple[MessageReader, list[object]]:
    reader = MessageReader(form)
    return reader, [*reader.read(text), *reader.finish()]


def test_thoughts_then_a_call() -> None:
    reader, events = _read(MessageForm(tools="hermes", reasoning=THINK), f"<think>a</think>{CALL}")
    assert [type(event) for event in events] == [Reasoning, CallStart, CallArguments]
    start = events[1]
    assert isinstance(start, CallStart)
    assert start.call_id.startswith("call_")
    assert reader.called


def test_only_the_first_call_is_kept_where_parallel_ones_are_forbidden() -> None:
    _, both = _read(MessageForm(tools="hermes"), CALL + CALL)
    assert [event.index for event in both if isinstance(event, CallStart)] == [0, 1]
    _, one = _read(MessageForm(tools="hermes", parallel=False), CALL + CALL)
    assert [event.index for event in one if isinstance(event, CallStart)] == [0]
    assert all(event.index == 0 for event in one if isinstance(event, CallArguments))


def test_a_named_call_does_not_end_the_turn() -> None:
    reader, events = _read(
        MessageForm(guided=ForcedCall("f")), '[{"name": "f", "arguments": {"x":1}}]'
    )
    assert any(isinstance(event, CallStart) for event in events)
    assert not reader.called


def test_mistrals_ids_have_its_own_form() -> None:
    form = MessageForm(tools="mistral")
    _, events = _read(form, '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    [start] = [event for event in events if isinstance(event, CallStart)]
    assert len(start.call_id) == 9
    assert "[TOOL_CALLS]" in form.markers()


def test_plain_text_stays_content() -> None:
    assert _read(MessageForm(tools="hermes"), "just text")[1] == [Content("just text")]
