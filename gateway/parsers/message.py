"""Parsing of one choice's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from gateway.parsers.harmony import MARKERS, HarmonyParser
from gateway.parsers.reasoning import ReasoningSplitter, Tags
from gateway.parsers.tools.arguments import SurrogateRepair, end_call
from gateway.parsers.tools.either import Either
from gateway.parsers.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from gateway.parsers.tools.forced import MAX_CALLS, ForcedCall
from gateway.parsers.tools.forms import PARSERS, Form
from gateway.parsers.tools.ids import new_id
from gateway.parsers.tools.parser import Functions, ToolParser

MessageEvent = Event | CallEnd | Reasoning


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Format of the responses to one request.

    Attributes:
        tools: the format in which the model writes tool calls; None if the request offers no tools.
        functions: the offered functions. Unused if `guided` is set.
        custom: the names of custom tools, whose arguments may be plain text.
        guided: the JSON format of tool calls that guided decoding enforces: `ForcedCall` or
            `Either`. None if tool calls are not enforced in this way.
        parallel: True to report all tool calls; False to report only the first call.
        reasoning: the model's reasoning tags. None if responses have no reasoning, or if they have
            the harmony format.
        reasoning_open: True if the prompt ends within the reasoning.
        channel: the unfinished header at the end of a prompt in the harmony format (see
            `harmony.read_open_header`). None if the model does not use harmony. If the model uses
            harmony, its responses are parsed even without tools.
    """

    tools: Form | None = None
    functions: Functions = field(default_factory=dict)
    custom: Collection[str] = ()
    guided: ForcedCall | Either | None = None
    parallel: bool = True
    reasoning: Tags | None = None
    reasoning_open: bool = False
    channel: str | None = None

    def markers(self) -> tuple[str, ...]:
        """Return the markup tokens of the format.

        The detokenizer must output these tokens even if they are special tokens.
        """
        if self.channel is not None:
            return MARKERS
        tags = tuple(self.reasoning or ())
        return tags + (PARSERS[self.tools].markers if self.tools and self.guided is None else ())

    @property
    def has_reasoning(self) -> bool:
        """True if the text may contain reasoning, between tags or in a harmony channel."""
        return self.reasoning is not None or (self.channel is not None and self.guided is None)

    @property
    def max_calls(self) -> int | None:
        """Maximum number of tool calls to report; None without a limit."""
        if not self.parallel:
            return 1
        return None if self.guided is None else MAX_CALLS

    def parser(self) -> ToolParser | HarmonyParser | None:
        if self.guided is not None:
            return self.guided.parser()
        if self.channel is not None:
            return HarmonyParser(self.channel, calls=self.tools is not None)
        return PARSERS[self.tools](self.functions) if self.tools else None


class MessageReader:
    """Incremental parser of one choice's text. The text may arrive in chunks of any length."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._parser = form.parser()
        self._splitter = None
        if form.reasoning is not None:
            self._splitter = ReasoningSplitter(form.reasoning, starts_open=form.reasoning_open)
        self._max_calls = form.max_calls
        # The current tool call, and the pieces of its arguments that were already reported.
        self._call: CallStart | None = None
        self._arguments: list[str] = []
        self._repair = SurrogateRepair()
        self._last_end: CallEnd | None = None
        self.exceeded = False
        """True if a response with guided decoding contained more tool calls than `max_calls`."""

    @property
    def ends_with_call(self) -> bool:
        """True if the last tool call is complete, so that the finish reason must be "tool_calls".

        Use this only after `finish`. The value is always False if `tool_choice` names one function.
        In this case, the OpenAI API reports the finish reason "stop".
        """
        if self._form.guided is not None and self._form.guided.name is not None:
            return False
        return self._last_end is not None and self._last_end.state == "complete"

    def read(self, text: str) -> list[MessageEvent]:
        return self._parse(self._splitter.split(text) if self._splitter else [Content(text)])

    def finish(self, *, cut: bool = False) -> list[MessageEvent]:
        """Finish parsing. Return the events of text that was held back.

        Do not call `read` afterwards. `cut` is True if a token limit or a stop string ended the
        text, and False if the model ended it.
        """
        events = self._parse(self._splitter.finish() if self._splitter else [])
        if self._parser is not None:
            events += self._report(self._parser.finish(cut=cut))
            self._end_call(events, cut=cut)
        return events

    def _parse(self, split: Sequence[Reasoning | Content]) -> list[MessageEvent]:
        if self._parser is None:
            return [*split]
        events: list[MessageEvent] = []
        for event in split:
            if isinstance(event, Content):
                events += self._report(self._parser.parse(event.text))
            else:
                events.append(event)
        return events

    def _report(self, events: Sequence[Event | Reasoning]) -> list[MessageEvent]:
        """Return the parser's events for the client, with a `CallEnd` after each tool call.

        Each call gets an id, and lone surrogates in arguments are replaced. Calls above `max_calls`
        are dropped.
        """
        reported: list[MessageEvent] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                self._end_call(reported)
                reported.append(event)
            elif self._max_calls is not None and event.index >= self._max_calls:
                self._end_call(reported)
                self.exceeded = self._form.guided is not None
            elif isinstance(event, CallStart):
                self._end_call(reported)
                self._call = replace(event, call_id=new_id(self._form.tools or "hermes"))
                reported.append(self._call)
            elif text := self._repair.repair(event.text):
                self._arguments.append(text)
                reported.append(CallArguments(event.index, text))
        return reported

    def _end_call(self, events: list[MessageEvent], *, cut: bool = False) -> None:
        """End the current tool call. Append its remaining arguments and a `CallEnd` to `events`."""
        call = self._call
        if call is None:
            return
        if text := self._repair.flush():
            self._arguments.append(text)
            events.append(CallArguments(call.index, text))
        arguments, custom = "".join(self._arguments), call.name in self._form.custom
        self._last_end = end_call(call.index, arguments, custom=custom, cut=cut)
        events.append(self._last_end)
        self._call, self._arguments, self._repair = None, [], SurrogateRepair()
