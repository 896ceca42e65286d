"""The deltas of a chat gathered to the items of an output, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gateway.api import strict_json
from gateway.api.custom_tools import arguments_to_input
from gateway.api.responses.items import encode_thoughts
from gateway.api.responses.tool_names import CallKind, ToolCallNames
from gateway.deltas import TextDelta, TokenLogprob
from gateway.errors import InvalidRequest
from gateway.parsers.tools.events import CallEnd, CallStart, Content, Reasoning, State

Kind = Literal["reasoning", "message"] | CallKind
Logprobs = Callable[[list[TokenLogprob]], list[dict[str, Any]]]

ID_PREFIXES: dict[Kind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
"""Of the ids of items."""

# A body may have 100 levels, some of which are those around the arguments.
_MAX_ARGUMENT_DEPTH = 90


class Form(NamedTuple):
    """How the output of one request is written.

    Attributes:
        ids: of the response, without its prefix; the items' ids hold it.
        calls: what calls are by the name that the model gives; others are plain functions.
        summarized: whether thoughts are told as a summary, too.
        encoded: whether they are told as `encrypted_content`, too.
        logprobs: writes those of a message; None where none are wanted.
    """

    ids: str
    calls: Mapping[str, ToolCallNames] = {}
    with_summary: bool = False
    with_encrypted: bool = False
    logprobs: Logprobs | None = None


class Item:
    """One item, as far as it has come."""

    def __init__(self, kind: Kind, index: int, form: Form, call: CallStart | None = None) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{ID_PREFIXES[kind]}_{form.ids}_{index}"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._form = form
        self._call = call
        self.state: State | None = None
        """Of a call that has ended."""

    @property
    def text(self) -> str:
        """Of a call, its arguments; of a custom tool's call, its input."""
        text = "".join(self.texts)
        return arguments_to_input(text) if self.kind == "custom_tool_call" else text

    def build_start(self) -> dict[str, Any]:
        """Return the item while it is empty."""
        members: dict[str, Any] = {"id": self.id, "type": self.kind, "status": "in_progress"}
        if self._call is not None:
            return members | self._call_members(self._call)
        if self.kind == "message":
            return members | {"role": "assistant", "content": []}
        return members | {"summary": [], "content": []}

    def _call_members(self, call: CallStart) -> dict[str, Any]:
        if self.kind == "tool_search_call":
            return {"call_id": call.call_id, "execution": "client", "arguments": {}}
        called = self._form.calls.get(call.name)
        members = {"call_id": call.call_id, "name": called.name if called else call.name}
        if called is not None and called.namespace is not None:
            members["namespace"] = called.namespace
        return members | {"input" if self.kind == "custom_tool_call" else "arguments": ""}

    def build_end(self, *, cut: bool) -> dict[str, Any]:
        if self._call is not None:
            cut = cut or self.state != "complete"
        members = self.build_start() | {"status": "incomplete" if cut else "completed"}
        if self.kind == "function_call":
            return members | {"arguments": self.text}
        if self.kind == "custom_tool_call":
            return members | {"input": self.text}
        if self.kind == "tool_search_call":
            return members | {"arguments": _parse_arguments(self.text)}
        if self.kind == "message":
            return members | {"content": [self.build_part(self.text)]}
        text = self.text
        if self._form.with_summary:
            members["summary"] = [{"type": "summary_text", "text": text}]
        if self._form.with_encrypted:
            members["encrypted_content"] = encode_thoughts(text)
        return members | {"content": [self.build_part(text)]}

    def build_part(self, text: str) -> dict[str, Any]:
        """The content of a message or of thoughts."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class OutputPiece(NamedTuple):
    """What is new in an item; of one that begins perhaps nothing."""

    item: Item
    text: str
    logprobs: list[dict[str, Any]]


class Output:
    """The items of one answer.

    `reasoning_tokens` are those that thoughts were told with. Of what is told at once with
    something else, tokens are shared out by characters; tags belong to what comes behind them.
    """

    def __init__(self, form: Form) -> None:
        self.items: list[Item] = []
        self._form = form
        self._tokens = 0
        self._reasoning = 0.0
        self._pending: list[TokenLogprob] = []

    @property
    def reasoning_tokens(self) -> int:
        return round(self._reasoning)

    def is_cut(self, last: TextDelta) -> bool:
        """Return True if the answer ended at a limit or within a call."""
        if last.finish == "length" or not self.items:
            return last.finish == "length"
        return self.items[-1].state == "open"

    def take(self, delta: TextDelta) -> list[OutputPiece]:
        """What a delta adds; each new item is that of a piece."""
        form, pieces = self._form, []
        if form.logprobs is not None:
            self._pending += delta.logprobs
        thoughts = others = 0
        for event in (Content(delta.text),) if delta.events is None else delta.events:
            if isinstance(event, CallStart):
                called = form.calls.get(event.name)
                kind: Kind = called.kind if called is not None else "function_call"
                pieces.append(OutputPiece(self._begin(kind, event), "", []))
                others += 1
                continue
            if isinstance(event, CallEnd):
                self.items[-1].state = event.state
                continue
            if not event.text:
                continue
            logprobs: list[dict[str, Any]] = []
            if isinstance(event, Reasoning):
                item = self._open("reasoning")
                thoughts += len(event.text)
            else:
                others += len(event.text)
                item = self._open("message") if isinstance(event, Content) else self.items[-1]
                if isinstance(event, Content):
                    logprobs = self._take_logprobs()
                    item.logprobs += logprobs
            item.texts.append(event.text)
            pieces.append(OutputPiece(item, event.text, logprobs))
        if pieces:
            if thoughts:
                new = delta.tokens - self._tokens
                self._reasoning += new * thoughts / (thoughts + others)
            self._tokens = delta.tokens
            self._pending.clear()
        if delta.finish is not None:
            pieces += self._end_pieces(delta)
        return pieces

    def _end_pieces(self, last: TextDelta) -> list[OutputPiece]:
        """Tokens without a text of their own; and an answer that says nothing is a message, too."""
        if not self.items:
            return [OutputPiece(self._begin("message"), "", [])] if last.finish != "length" else []
        if not self._pending or self.items[-1].kind != "message":
            return []
        logprobs = self._take_logprobs()
        self.items[-1].logprobs += logprobs
        return [OutputPiece(self.items[-1], "", logprobs)]

    def _open(self, kind: Kind) -> Item:
        if self.items and self.items[-1].kind == kind:
            return self.items[-1]
        return self._begin(kind)

    def _begin(self, kind: Kind, call: CallStart | None = None) -> Item:
        item = Item(kind, len(self.items), self._form, call)
        self.items.append(item)
        return item

    def _take_logprobs(self) -> list[dict[str, Any]]:
        if self._form.logprobs is None or not self._pending:
            return []
        entries, self._pending = self._pending, []
        return self._form.logprobs(entries)


def build_items(items: Sequence[Item], *, cut: bool) -> list[dict[str, Any]]:
    """Return the items of an answer that has ended; `cut` applies to the last one."""
    return [item.build_end(cut=cut and item is items[-1]) for item in items]


def _parse_arguments(arguments: str) -> Any:
    """Return the value of a call's arguments, or their text if a request could not hold the value.

    An object that is too deep or too large fails the response that holds it, or the next request.
    """
    try:
        return strict_json.load(
            arguments.encode() or b"{}", repeated_keys=True, max_depth=_MAX_ARGUMENT_DEPTH
        )
    except InvalidRequest:
        return arguments
