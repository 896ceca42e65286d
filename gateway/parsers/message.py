"""Parsing of a chat choice's text into the parts of a message: reasoning, content, tool calls."""

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
    """The form in which the choices of one request are written.

    Attributes:
        tools: the form in which the model writes calls; None if no tools were offered.
        functions: the offered functions. Unused with `guided`.
        custom: the names of custom tools, whose arguments may be plain text.
        guided: the form of guided JSON, if the complete text is such JSON; otherwise None.
        parallel: True to report all calls; False to report only the first.
        reasoning: the model's reasoning tags; None for harmony, or without reasoning.
        reasoning_open: True if the prompt ends within the reasoning.
        channel: for harmony, the open header at the end of the prompt (see
            `harmony.read_open_header`); None for other models. The text is parsed for channels even
            if no tools were offered.
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
        """Return the tokens that detokenizing must show, even if they are special tokens."""
        if self.channel is not None:
            return MARKERS
        tags = tuple(self.reasoning or ())
        return tags + (PARSERS[self.tools].markers if self.tools and self.guided is None else ())

    @property
    def has_reasoning(self) -> bool:
        """Return True if the text may contain reasoning, between tags or in a harmony channel."""
        return self.reasoning is not None or (self.channel is not None and self.guided is None)

    @property
    def max_calls(self) -> int | None:
        """Return the maximum number of reported calls; None if there is no limit."""
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
    """Parser of one choice's text into the parts of a message; the text may be cut anywhere."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._parser = form.parser()
        self._splitter = None
        if form.reasoning is not None:
            self._splitter = ReasoningSplitter(form.reasoning, starts_open=form.reasoning_open)
        self._max_calls = form.max_calls
        # The current call, and the pieces of its arguments that were reported.
        self._call: CallStart | None = None
        self._arguments: list[str] = []
        self._repair = SurrogateRepair()
        self._last_end: CallEnd | None = None
        self.exceeded = False
        """True once a guided answer has started a call over the maximum number of calls."""

    @property
    def ends_with_call(self) -> bool:
        """Return True if the last call is complete and ends the turn; valid after `finish`.

        A call of a function that the request named does not end the turn, as at OpenAI.
        """
        if self._form.guided is not None and self._form.guided.name is not None:
            return False
        return self._last_end is not None and self._last_end.state == "complete"

    def read(self, text: str) -> list[MessageEvent]:
        return self._parse(self._splitter.split(text) if self._splitter else [Content(text)])

    def finish(self, *, cut: bool = False) -> list[MessageEvent]:
        """End the text, and return the events of text that was held back.

        `cut` is True if a limit or a stop string ended the text, and not the model. `read` must not
        be called afterwards.
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
        """Return the parser's events, with call ids, repaired arguments and the ends of calls
        added."""
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
        """Append the end of the current call to `events`.

        Arguments that the repair has held back are appended before it.
        """
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
