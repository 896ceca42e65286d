"""The joined events of a tool call parser."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hypothesis import strategies as st

from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.arguments import end_call
from gateway.parsers.tools.either import Either
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event
from gateway.parsers.tools.forced import ForcedCall, ForcedToolParser
from gateway.parsers.tools.forms import PARSERS
from gateway.parsers.tools.parser import ToolParser

# Parsers of all formats, of both types of forced calls, and of calls instead of an answer.
MAKERS: dict[str, Callable[[], ToolParser]] = {
    **PARSERS,
    "required": ForcedToolParser,
    "named": ForcedCall("f").parser,
    "either": Either(may_have_name=False).parser,
    "either, named": Either(may_have_name=True).parser,
}


def fold(events: list[Event]) -> list[Event]:
    """Return the events with neighbouring text deltas, or argument deltas of one call, joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def parse_pieces(maker: Callable[[], ToolParser], *pieces: str, cut: bool = False) -> list[Event]:
    """Return the events of a new parser for a text in `pieces`. `cut` means a truncated text."""
    parser = maker()
    events = [event for piece in pieces for event in parser.parse(piece)]
    return fold(events + parser.finish(cut=cut))


def call_events(
    name: str, *pieces: str, index: int = 0, call_id: str = "id", custom: bool = False
) -> list[MessageEvent]:
    """Return the events of one call whose arguments arrive in `pieces`."""
    arguments = [CallArguments(index, piece) for piece in pieces]
    end = end_call(index, "".join(pieces), custom=custom)
    return [CallStart(index, name, call_id), *arguments, end]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    """Return (name, arguments) of each call. Fail if an event is empty or out of order."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.text
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            assert event.text
    return calls


piece_sizes = st.lists(st.integers(1, 12) | st.integers(1, 200), min_size=1, max_size=6)


def split_text(text: str, sizes: list[int]) -> Iterator[str]:
    """Yield `text` in pieces of these sizes, repeated cyclically."""
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(text):
            return
        yield text[start : start + size]
        start += size
