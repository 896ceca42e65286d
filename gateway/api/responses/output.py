"""Assembly of generated deltas into output items of the Responses API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gateway.api import strict_json
from gateway.api.openai.custom_tools import arguments_to_input
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
"""Prefixes of item ids, by item type."""

# Maximum nesting depth of a call's arguments. A request body that sends the call back may be 100
# levels deep. The other 10 levels are for the objects around the arguments.
_MAX_ARGUMENT_DEPTH = 90


class Form(NamedTuple):
    """Format of the output of one request.

    Attributes:
        ids: The response id without its prefix; item ids contain it.
        calls: The `ToolCallNames` with which tool calls are returned to the client. The keys are
            the names that the tools have in the prompt. Functions without a namespace are left out.
        with_summary: True if reasoning is also returned as a summary.
        with_encrypted: True if reasoning is also returned as `encrypted_content`.
        logprobs: Function that writes log probabilities of a message; None if not requested.
    """

    ids: str
    calls: Mapping[str, ToolCallNames] = {}
    with_summary: bool = False
    with_encrypted: bool = False
    logprobs: Logprobs | None = None


class Item:
    """Output item, possibly still incomplete."""

    def __init__(self, kind: Kind, index: int, form: Form, call: CallStart | None = None) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{ID_PREFIXES[kind]}_{form.ids}_{index}"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._form = form
        self._call = call
        self.state: State | None = None
        """Final state of a call that has ended. None before its end, and for an item that is not a
        call."""

    @property
    def text(self) -> str:
        """The text that was generated so far.

        The text of a function call is its arguments, and the text of a custom tool's call is its
        input.
        """
        text = "".join(self.texts)
        return arguments_to_input(text) if self.kind == "custom_tool_call" else text

    def build_start(self) -> dict[str, Any]:
        """Return the item as a JSON object for the event at its start: in progress, and without
        content."""
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
        """Return the content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class OutputPiece(NamedTuple):
    """Text that a delta adds to an output item. The text may be "" for a new item."""

    item: Item
    text: str
    logprobs: list[dict[str, Any]]


class Output:
    """The output items of one answer.

    `reasoning_tokens` counts the tokens of reasoning. If a delta has both reasoning and other text,
    the delta's tokens are split in proportion to the characters of the two texts. Tokens of tags,
    such as the end of reasoning, count toward the text that follows the tag.
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
        """Add a delta and return the new pieces of text. Each new item has at least one piece."""
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
        """Return the pieces to add at the end of the answer.

        The last tokens may have log probabilities but no text: these log probabilities are added to
        the message. If the answer has no items, an empty message is added, unless the token limit
        was reached.
        """
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
    """Return the items of a finished answer. `cut` is True if the last item is truncated."""
    return [item.build_end(cut=cut and item is items[-1]) for item in items]


def _parse_arguments(arguments: str) -> Any:
    """Return the parsed arguments of a call; the unparsed text if they exceed a request's limits.

    Parsed arguments above the limits could make this response fail. The client also sends the call
    back in its next request, which would be refused.
    """
    try:
        return strict_json.load(
            arguments.encode() or b"{}", repeated_keys=True, max_depth=_MAX_ARGUMENT_DEPTH
        )
    except InvalidRequest:
        return arguments
